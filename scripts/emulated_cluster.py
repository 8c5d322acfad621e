#!/usr/bin/env python3
"""Nodes with shaped links on one machine: `scripts/emulated_cluster.py run --nodes 2 --ranks 2 --rate 500mbit -- COMMAND`."""

import sys

from paro_lm.tools.emulated_cluster import main

if __name__ == "__main__":
    sys.exit(main())
