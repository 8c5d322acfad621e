"""The wheel alone: it brings conf/ and py.typed along, and own YAML files work with nothing else."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command, **options):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves folders behind
    source.mkdir()
    tracked = (
        run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines() if (ROOT / ".git").exists() else []
    )
    for name in tracked:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    if not tracked:
        pytest.skip("the files of the project are known from git only")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_content(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"paro_lm/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "paro_lm").rglob("*.py")}
    assert (expected | {"paro_lm/py.typed"}) - names == set()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"paro_lm"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_own_experiment_with_the_wheel_alone(wheel, tmp_path):
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel)
    # the dependencies of the tests, without the checkout that is installed beside them
    dependencies = {str(Path(path)) for path in sys.path if path.endswith("site-packages")}
    (site / "dependencies.pth").write_text("\n".join(sorted(dependencies)))
    work = tmp_path / "work"
    (work / "experiment").mkdir(parents=True)
    (work / "experiment" / "mine.yaml").write_text("# @package _global_\nrun_name: mine\nsteps: 7\nmodel: {num_layers: 2}\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = run(python, "-c", "import paro_lm; print(paro_lm.__file__)", cwd=work, env=environment)
    assert Path(where.strip()).is_relative_to(venv)
    command = (venv / "bin" / "paro-train", "--cfg", "job", "--config-dir", ".", "experiment=mine", "precision=bf16")
    composed = run(*command, cwd=work, env=environment).splitlines()
    assert {"run_name: mine", "steps: 7", "  num_layers: 2", "  param_dtype: bf16"} <= set(composed)
    assert [path.name for path in work.iterdir()] == ["experiment"]
