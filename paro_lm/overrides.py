"""Command-line overrides: checked against the schema and quoted before hydra's grammar reads them.

hydra decides the type of a value from its look: `run_name=7e12` becomes 7000000000000.0 and `run_name=1234e567` becomes inf before
any schema is asked. Here the schema is asked first: values of string options are taken as they were typed and quoted for hydra,
and keys that do not exist are refused by name, also with `+`.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paro_lm.config import field_types, is_section, lookup, optional_inner, unknown_key

_OVERRIDE = re.compile(r"(?:\+\+|\+)?(?P<key>[^=]+)=(?P<value>.*)", re.DOTALL)
_PLAIN_VALUE = re.compile(r"[\w.+-]+|\$\{.*\}", re.DOTALL)
_SWEEP = re.compile(r"(choice|range|interval|glob|tag|sort|shuffle)\(|[^'\"\[{]*,")


@dataclass(frozen=True)
class Checked:
    """Overrides that hydra may read, and what is wrong with the others, by key."""

    overrides: list[str]
    problems: dict[str, str]


def check_overrides(overrides: list[str], schema: type, groups: Mapping[str, set[str] | None], *, is_sweep: bool = False) -> Checked:
    """Refuse unknown keys and group choices, quote values of string options.

    `groups` has the choices of every config group (None = hydra decides). With `is_sweep` values that look like hydra sweeps stay
    as they are.
    """
    accepted: list[str] = []
    problems: dict[str, str] = {}
    for override in overrides:
        result = _check_one(override, schema, groups, is_sweep)
        if isinstance(result, str):
            accepted.append(result)
        else:
            problems.update([result])
    return Checked(accepted, problems)


def _check_one(override: str, schema: type, groups: Mapping[str, set[str] | None], is_sweep: bool) -> str | tuple[str, str]:
    """The override for hydra, or (key, problem)."""
    match = _OVERRIDE.fullmatch(override)
    if override.startswith("~"):
        return override
    if match is None:
        return override, f"{override}: is neither an option nor a flag; write key=value, --help shows examples"
    key, value = match["key"].strip(), match["value"]
    if key.partition(".")[0] == "hydra" or "/" in key or "@" in key:
        return override
    if key in groups:
        return _check_choice(override, key, value, groups[key], is_sweep)
    kind = lookup(schema, key)
    if kind is None:
        return key, unknown_key(schema, key)
    if is_section(kind):
        if value.startswith("{") or value == "null":
            return f"{key}={value}"
        return key, f"{key}: is a section, got {value!r}; set its keys, such as {key}.{next(iter(field_types(kind)))}"
    if is_sweep and _SWEEP.match(value):
        return override
    prefix = "++" if _is_in_mapping(schema, key) else ""  # a known key needs no +, a new name in a mapping does
    return f"{prefix}{key}={_quoted_value(value, kind)}"


def _check_choice(override: str, group: str, value: str, choices: set[str] | None, is_sweep: bool) -> str | tuple[str, str]:
    if choices is None or value in choices or value == "null" or (is_sweep and _SWEEP.match(value)) or value.startswith("["):
        return override
    close = difflib.get_close_matches(value, sorted(choices), n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return group, f"{group}: there is no {group}/{value}.yaml; {hint}choose one of {', '.join(sorted(choices))}"


def _is_in_mapping(schema: type, key: str) -> bool:
    parts = key.split(".")
    return any(typing.get_origin(lookup(schema, ".".join(parts[:count]))) is dict for count in range(1, len(parts) + 1))


def _quoted_value(value: str, kind: Any) -> str:
    """The text of a value in hydra's grammar, so that it arrives with the type of its option."""
    inner, is_optional = optional_inner(kind)
    origin = typing.get_origin(inner)
    if origin is list:
        item = typing.get_args(inner)[0]
        text = value.strip()
        body = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        return "[" + ",".join(_quoted_value(part, item) for part in _split(body)) + "]"
    if origin is dict or (value == "null" and (is_optional or inner is not str)):
        return value
    if inner is str:
        return value if _is_quoted(value) else quote(value)
    return value if _PLAIN_VALUE.fullmatch(value) else quote(value)


def _is_quoted(value: str) -> bool:
    return len(value) >= 2 and value[0] in "'\"" and value[-1] == value[0] and value[0] not in value[1:-1]


def quote(value: str) -> str:
    """hydra's single-quoted form: backslashes count only in front of a quote."""
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + r"\'", value)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return "'" + escaped + "\\" * trailing + "'"


def _split(text: str) -> list[str]:
    """Parts between commas that stand outside quotes, stripped; an empty text has none."""
    parts = re.findall(r"""((?:'[^']*'|"[^"]*"|[^,])*)(?:,|$)""", text)
    stripped = [part.strip() for part in parts]
    return stripped[:-1] if stripped and not stripped[-1] else stripped
