"""Imports go one way (docs/design.md, section 3)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "paro_lm"

# What each part may import from the package, besides `config` and itself. Longest prefix wins.
ALLOWED = {
    "config": set(),
    "overrides": set(),
    "validation": {"model.validate", "model.trainable", "optim.schedule", "parallel.sharding", "parallel.stages", "trackers"},
    "cli": {"overrides", "validation", "logs"},
    "train": {"cli", "fake", "trainer", "validation"},
    "rendezvous": set(),
    "distributed": {"rendezvous"},
    "testing": {"distributed"},
    "parallel.axes": set(),
    "parallel.mesh": {"distributed", "parallel.axes"},
    "parallel.sharding": {"parallel.axes"},
    "parallel.collectives": {"distributed", "parallel.mesh", "parallel.sharding", "parallel.queue"},
    "parallel.buffer": {"distributed", "parallel.mesh", "parallel.sharding"},
    "parallel.tensor": {"distributed", "parallel.mesh", "model.spec", "parallel.columns", "parallel.tensor_groups", "parallel.collectives"},
    "parallel.columns": {"parallel.tensor"},
    "parallel.activation": {"model", "parallel.tensor"},
    "parallel.cost": {"parallel.axes", "parallel.sharding"},
    "parallel": {"distributed", "parallel", "model.spec"},
    "model": {"parallel.tensor", "parallel.columns"},
    "data": {"data"},
    "planner": {
        "planner",
        "model.trainable",
        "parallel.axes",
        "parallel.sharding",
        "parallel.cost",
        "parallel.stages",
        "model.sizes",
        "model.flops",
    },
    "metrics": {"parallel.cost", "trackers", "console", "model.flops"},
    "trackers": set(),
    "console": set(),
    "logs": {"console"},
    "profiler": set(),
    "optim.schedule": set(),
    "optim": {"distributed", "parallel", "optim"},
    "checkpoint": {"distributed", "parallel", "checkpoint"},
}


def imported_modules(path: Path) -> set[str]:
    """Names inside the package that a file imports at any level, relative to the package."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "paro_lm" else [node.module or ""]
        else:
            continue
        found.update(name.removeprefix("paro_lm.") for name in names if name.startswith("paro_lm."))
    return found


def is_under(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


DEVICE_FILES = {"distributed.py", "optimizer.py", "queue.py"}  # the latter two ask what kind of device they were given
FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_name(path) or "paro_lm")
def test_imports_go_one_way(path):
    module = module_name(path)
    rules = [prefix for prefix in ALLOWED if is_under(module, prefix)]
    if not rules:  # trainer, evaluation, tools: they sit on top
        assert not any(is_under(name, "tools") for name in imported_modules(path)) or is_under(module, "tools")
        return
    rule = max(rules, key=len)
    allowed = ALLOWED[rule] | {"config", rule}
    wrong = {name for name in imported_modules(path) if not any(is_under(name, prefix) for prefix in allowed)}
    assert not wrong, f"{module} must not import {sorted(wrong)}"


def test_configuration_needs_no_torch():
    code = "import sys, paro_lm.train; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


def test_no_device_name_outside_the_device_module():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            is_name = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda")
            assert not is_name or path.name in DEVICE_FILES, f"{path}:{node.lineno}"
