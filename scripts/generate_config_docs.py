"""Write docs/config.md from the dataclasses of paro_lm.config; with --check, fail when it is not fresh."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from paro_lm.config import Config, field_types, is_section
from paro_lm.tools import calibrate, doctor, evaluate, export, generate, plan, reproduce

TARGET = Path(__file__).resolve().parent.parent / "docs" / "config.md"
HEAD = """# Configuration

Every option of a run and of the tools, written by `make docs` from their dataclasses. Set options on the command line
(`optim.lr=3e-4`), in an experiment file (`conf/experiment/*.yaml`, or `--config-dir DIR experiment=mine` for
`DIR/experiment/mine.yaml`), or choose a group's file (`model=gpt2_124m`, `precision=bf16`). `paro-train --cfg job ...` prints what a
command line composes to.
"""


def type_name(kind: Any) -> str:
    """`int or null` for `int | None`."""
    name = kind.__name__ if isinstance(kind, type) and not getattr(kind, "__args__", ()) else str(kind)
    return name.replace(" | None", " or null")


def default_text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, (list, dict)) else str(value)


def limits(item: dataclasses.Field[Any]) -> str:
    """The sentence about the values that are allowed, or nothing."""
    choices, least, above = (item.metadata[name] for name in ("choices", "least", "above"))
    if choices:
        return " One of " + ", ".join(f"`{choice}`" for choice in choices) + "."
    if least is not None:
        return f" At least {least}."
    return f" Above {above}." if above is not None else ""


def section(schema: type, title: str, prefix: str) -> list[str]:
    """The table of one dataclass, then those inside it."""
    summary = (schema.__doc__ or "").strip().splitlines()[0]
    lines = ["", f"## {title}", "", summary, "", "| key | type | default | meaning |", "|---|---|---|---|"]
    defaults, kinds, nested = schema(), field_types(schema), []
    for item in dataclasses.fields(schema):
        kind = kinds[item.name]
        if is_section(kind):
            nested += section(kind, f"`{prefix}{item.name}`", f"{prefix}{item.name}.")
            continue
        meaning = (item.metadata["doc"] + limits(item)).replace("|", "\\|")
        lines.append(f"| `{prefix}{item.name}` | {type_name(kind)} | `{default_text(getattr(defaults, item.name))}` | {meaning} |")
    return lines + nested


def render() -> str:
    """The whole page."""
    lines = section(Config, "Run", "")
    lines += section(plan.PlanToolOptions, f"`{plan.TOOL.name}`, beside the options of a run", "plan.")
    for tool in (reproduce.TOOL, calibrate.TOOL, doctor.TOOL, generate.TOOL, evaluate.TOOL, export.TOOL):
        lines += section(tool.schema, f"`{tool.name}`", "")
    return HEAD + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 when the page is not fresh")
    if parser.parse_args().check:
        return int(TARGET.read_text() != render())
    TARGET.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
