"""Collectives over groups of ranks: HO-Ring, and what it is compared with."""

from paro_lm.parallel.collectives.grid import ALGORITHMS, AUTO_BYTES, GridCollectives
from paro_lm.parallel.collectives.ledger import ByteLedger

__all__ = ["ALGORITHMS", "AUTO_BYTES", "ByteLedger", "GridCollectives"]
