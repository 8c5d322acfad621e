"""The command line that all tools share: hydra composes, the schema judges, errors become exit codes.

Exit codes: 0 done, 2 the user's input is refused (a message says what, got and remedy; all problems at once), 75 stopped by a
signal or a time limit after saving, 1 anything else (with a traceback).
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra import main as hydra_main
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from paro_lm.config import Config, ConfigError, convert, field_types, is_section, leaves
from paro_lm.logs import ReportedError
from paro_lm.overrides import check_overrides, quote
from paro_lm.validation import check_fields, validate

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_REFUSED = 2
EXIT_STOPPED = 75

# hydra's own run folders, logging and working directory are off: ranks that start in different seconds would disagree on them.
_HYDRA_SETTINGS = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra.sweep.dir=outputs",
    "hydra.sweep.subdir=.",
    "hydra.job.chdir=false",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)
_INPUT_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One console command: its schema, the YAML file it starts from, and what `--help` prints.

    `check` returns the problems of a config whose types are right: by default those of single fields, `check_run` for a run.
    """

    name: str
    description: str
    examples: Sequence[str]
    schema: type = Config
    config_name: str = "train"
    check: Callable[[Any], list[str]] = field(default=check_fields)


def config_folder() -> Path:
    """The folder of shipped YAML files: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(f"conf/train.yaml is neither in {package} nor beside it; install the package again")


def check_run(cfg: Config) -> list[str]:
    """`validate` for the world that the launcher (torchrun) announces, or the fake one that the config names."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if cfg.runtime.backend == "fake":
        return validate(cfg, cfg.runtime.world_size or world_size, cfg.cluster.ranks_per_node, complete=False)
    return validate(cfg, world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), complete=False)


def load(
    overrides: Sequence[str], *, config_dir: Path | str | None = None, tool: Tool | None = None, config_name: str | None = None
) -> Any:
    """The typed and checked config of a command line, for use from Python and in tests.

    Without a tool it is a training config whose cross-group checks are left to the caller. Raises ConfigError with all problems.
    """
    tool = tool or Tool(name="paro-train", description="", examples=())
    folders = [Path(config_dir).resolve()] if config_dir is not None else []
    checked = check_overrides(list(overrides), tool.schema, _groups_of(tool, [config_folder(), *folders], overrides))
    try:
        values = _compose(checked.overrides, tool, folders, config_name or tool.config_name)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([*checked.problems.values(), _hydra_message(error)]) from error
    return _typed(values, tool, checked.problems)


def hydra_entry(task: Callable[[Any], int], tool: Tool, argv: Sequence[str] | None = None) -> NoReturn:
    """Compose and check the config of this command line, run `task(cfg) -> exit code`, and exit with its code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = get_args_parser().parse_args(arguments)
    if options.help:
        print(_help(tool))
        sys.exit(EXIT_OK)
    if options.multirun or options.info or options.hydra_help or options.shell_completion or options.experimental_rerun:
        sys.exit(_delegate(task, tool, arguments, options))
    try:
        cfg = load(options.overrides, config_dir=_existing(options.config_dir), tool=tool, config_name=options.config_name)
    except ConfigError as error:
        sys.exit(_refuse(tool, error.problems))
    sys.exit(_delegate(task, tool, arguments, options) if options.cfg else run_task(task, cfg, tool))


def run_task(task: Callable[[Any], int], cfg: Any, tool: Tool) -> int:
    """The exit code of a task; refused input is told in a sentence, anything else with its traceback."""
    try:
        return task(cfg)
    except ConfigError as error:
        return _refuse(tool, error.problems)
    except (ValueError, *_INPUT_ERRORS) as error:
        if not _is_refusal(error):
            traceback.print_exc()
            return EXIT_ERROR
        print(f"{tool.name}: {_rank_prefix()}{error}", file=sys.stderr, flush=True)
        return EXIT_REFUSED
    except ReportedError:
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(f"{tool.name}: interrupted; nothing was saved", file=sys.stderr)
        return EXIT_ERROR
    except Exception:
        traceback.print_exc()
        return EXIT_ERROR


def _is_refusal(error: BaseException) -> bool:
    """Whether an error is a word to the user: a file that is not there, or a ValueError that this package itself raised."""
    if isinstance(error, _INPUT_ERRORS):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(Path(__file__).resolve().parent)


def _refuse(tool: Tool, problems: list[str]) -> int:
    """Print all problems on the first rank of each node; the others wait, so that the launcher does not end it before it speaks."""
    if int(os.environ.get("LOCAL_RANK", "0")):
        time.sleep(10)
        return EXIT_REFUSED
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"{tool.name}: the configuration is refused, {count}:", *(f"  {problem}" for problem in problems)]
    print("\n".join(lines), file=sys.stderr, flush=True)
    return EXIT_REFUSED


def _rank_prefix() -> str:
    return f"[rank {os.environ['RANK']}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""


def _existing(folder: str | None) -> Path | None:
    if folder is None:
        return None
    if not Path(folder).is_dir():
        raise ConfigError([f"--config-dir: there is no folder {Path(folder).resolve()}"])
    return Path(folder).resolve()


def _groups_of(tool: Tool, folders: list[Path], overrides: Sequence[str] = ()) -> dict[str, set[str] | None]:
    """Choices of the tool's config groups; None, which leaves them to hydra, when the command line adds search paths of its own."""
    groups: dict[str, set[str]] = {}
    sections = set(field_types(tool.schema))
    is_run = issubclass(tool.schema, Config)  # then an experiment, which is no section, is a choice too
    for folder in folders:
        for path in folder.glob("*/**/*.yaml"):
            group, *choice = path.relative_to(folder).with_suffix("").parts
            if is_run or group in sections:
                groups.setdefault(group, set()).add("/".join(choice))
    if any(override.lstrip("+").startswith("hydra.searchpath") for override in overrides):
        return dict.fromkeys(groups)
    return dict(groups)


def _compose(overrides: list[str], tool: Tool, folders: list[Path], config_name: str) -> DictConfig:
    """hydra's composition over the schema's defaults; plain values, not yet typed."""
    _store_schema(tool.schema)
    known = [config_folder(), *folders]
    main = next((folder for folder in known if (folder / f"{config_name}.yaml").is_file()), known[0])
    others = ",".join(quote(f"file://{folder}") for folder in known if folder != main)
    with initialize_config_dir(config_dir=str(main), job_name=tool.name, version_base="1.3"):
        return compose(config_name=config_name, overrides=[*([f"hydra.searchpath=[{others}]"] if others else []), *overrides])


def _store_schema(schema: type) -> None:
    """Give hydra the schema's defaults as plain values under the schema's name.

    The dataclasses themselves cannot be stored: a frozen one makes its node read-only, so that nothing could override it.
    """
    ConfigStore.instance().store(name=schema.__name__, node=default_values(schema))


def default_values(schema: type) -> dict[str, Any]:
    """All defaults of a schema as plain nested values."""
    instance, kinds = schema(), field_types(schema)
    return {name: default_values(kind) if is_section(kind) else getattr(instance, name) for name, kind in kinds.items()}


def _typed(composed: DictConfig, tool: Tool, problems: dict[str, str]) -> Any:
    """The typed config, or ConfigError with `problems`, wrong keys and types, and what else is wrong with the rest."""
    try:
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([*problems.values(), _hydra_message(error)]) from error
    assert isinstance(values, dict)
    cfg, wrong = convert({str(name): value for name, value in values.items()}, tool.schema)
    wrong = {**problems, **wrong}
    # A refused option has its default here; what is said about that default would only confuse.
    further = [problem for problem in tool.check(cfg) if not any(_mentions(problem, key) for key in wrong)]
    if wrong or further:
        raise ConfigError([*wrong.values(), *further])
    return cfg


def _mentions(problem: str, key: str) -> bool:
    names = (name.rstrip(".") for name in re.findall(r"[\w.]+", problem))
    return any(name == key or name.startswith(f"{key}.") for name in names)


def _hydra_message(error: Exception) -> str:
    """hydra's own words, without the pointer to its web pages."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("See https://")]
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        lines.append(str(cause).splitlines()[0])
    return " ".join(lines)


def _delegate(task: Callable[[Any], int], tool: Tool, arguments: list[str], options: Any) -> int:
    """Let hydra itself handle `--cfg`, `--multirun`, `--info` and the like, on overrides that have been checked here."""
    codes: list[int] = []

    def job(composed: DictConfig) -> None:
        try:
            cfg = _typed(composed, tool, {})
        except ConfigError as error:
            codes.append(_refuse(tool, error.problems))
        else:
            codes.append(run_task(task, cfg, tool))

    try:
        folders = [path for path in [_existing(options.config_dir)] if path is not None]
    except ConfigError as error:
        return _refuse(tool, error.problems)
    checked = check_overrides(
        options.overrides, tool.schema, _groups_of(tool, [config_folder(), *folders], options.overrides), is_sweep=options.multirun
    )
    if checked.problems:
        return _refuse(tool, list(checked.problems.values()))
    _store_schema(tool.schema)
    flags = [argument for argument in arguments if argument not in options.overrides]
    sys.argv = [tool.name, *flags, *_HYDRA_SETTINGS, *checked.overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise, do not exit with 1
    try:
        hydra_main(version_base="1.3", config_path=str(config_folder()), config_name=tool.config_name)(job)()
    except (HydraException, OmegaConfBaseException) as error:
        return _refuse(tool, [_hydra_message(error)])
    return max(codes, default=EXIT_OK)


def _default_text(item: Field[Any]) -> str:
    value = item.default
    if value is MISSING:
        assert item.default_factory is not MISSING
        value = item.default_factory()
    return "default null" if value is None else f"default {value!r}"


def _help(tool: Tool) -> str:
    examples = "\n".join(f"  {example}" for example in tool.examples)
    groups = "\n".join(f"  {name}: {', '.join(sorted(names or ()))}" for name, names in sorted(_groups_of(tool, [config_folder()]).items()))
    keys = "\n".join(f"  {name}: {item.metadata['doc']} ({_default_text(item)})" for name, _, item in leaves(tool.schema))
    is_run = issubclass(tool.schema, Config)
    return f"""{tool.name}: {tool.description}

Usage: {tool.name} [flags] {"[group=choice ...] " if is_run else ""}[key=value ...]

Examples:
{examples}

{"Groups and their choices:" if is_run else "Keys:"}
{groups if is_run else keys}

Flags:
  --cfg job                        print the composed config instead of running
  --config-dir DIR                 add a folder of own YAML files, such as DIR/experiment/mine.yaml for experiment=mine
  --multirun                       one run after the other for key=a,b (give each its own run_name, such as 'lr_${{optim.lr}}')

Every key with its type, default and meaning: docs/config.md
Exit codes: 0 done, 2 input refused, 75 stopped by a signal after saving, 1 anything else."""
