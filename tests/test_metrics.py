"""Records of a run: the file, the rates, the console, the trackers. Numbers are exact."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from paro_lm.config import LoggingConfig
from paro_lm.console import ProgressReporter, RunSummary, describe_run
from paro_lm.logs import log_path, report_failure, setup_logging
from paro_lm.metrics import MetricsLogger, Rates, StepRecord, Throughput, known_peak, peak_tflops
from paro_lm.profiler import Profiler
from paro_lm.trackers import tracker_problems

RATES = Rates(seconds=0.5, tokens_per_sec=160.0, tokens_per_sec_per_rank=80.0, tflops=0.25, mfu=None)


def record(step: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": step, "loss": 1 / 3 + step, "lr": 1e-3, "grad_norm": 0.1 + 0.2, "tokens": 80, "consumed_tokens": 80 * step,
        "skipped": 0, "rates": RATES, "memory_gb": 1.5, "bytes": {"dp_inter": 10, "dp_intra": 20},
    }  # fmt: skip
    return StepRecord(**(values | changes))


def quiet() -> Console:
    return Console(file=io.StringIO(), force_terminal=False)


def open_logger(
    folder: Path, *, resume_step: int = 0, rank: int = 0, cfg: LoggingConfig | None = None, console: Console | None = None
) -> Any:
    return MetricsLogger(
        cfg or LoggingConfig(), folder, run_name="test", total_steps=10, rank=rank, resume_step=resume_step, console=console or quiet()
    )


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_records_have_the_promised_keys_at_full_precision(tmp_path: Path) -> None:
    with open_logger(tmp_path) as logger:
        logger.log_state_bytes([{"param": 1, "grad": 2, "main": 3}, {"param": 1, "grad": 2, "main": 4}])
        logger.log_evaluation(0, 1.5)
        logger.log_step(record(1))
    states, evaluation, step = read(tmp_path)
    assert states == {"state_bytes": [{"param": 1, "grad": 2, "main": 3}, {"param": 1, "grad": 2, "main": 4}]}
    assert evaluation == {"step": 0, "val_loss": 1.5, "val_ppl": math.exp(1.5)}
    assert step == {
        "step": 1, "loss": 1 / 3 + 1, "lr": 1e-3, "grad_norm": 0.1 + 0.2, "tokens": 80, "consumed_tokens": 80, "skipped": 0,
        "tokens_per_sec": 160.0, "tokens_per_sec_per_rank": 80.0, "seconds": 0.5, "tflops": 0.25, "mfu": None, "memory_gb": 1.5,
        "bytes": {"dp_inter": 10, "dp_intra": 20},
    }  # fmt: skip


def test_a_record_is_on_disk_when_log_step_returns(tmp_path: Path) -> None:
    logger = open_logger(tmp_path)
    logger.log_step(record(1))
    assert [item["step"] for item in read(tmp_path)] == [1]
    logger.close()
    logger.close()


@pytest.mark.parametrize("partial", ["", '{"step": 8, "lo', '{"step": 2}'])
def test_exactly_one_record_per_step_after_a_resume(tmp_path: Path, partial: str) -> None:
    """Stopped in step 8 (in the middle of a line, or of a line that happens to parse), resumed from the checkpoint of step 5."""
    with open_logger(tmp_path) as logger:
        logger.log_state_bytes([{"param": 1, "grad": 1, "main": 1}])
        for step in range(8):
            if step:
                logger.log_step(record(step))
            if step % 5 == 0:
                logger.log_evaluation(step, 2.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(partial)
    before = [item for item in read_complete(tmp_path) if "loss" in item and item["step"] <= 5]
    with open_logger(tmp_path, resume_step=5) as logger:
        logger.log_state_bytes([{"param": 2, "grad": 1, "main": 1}])
        logger.log_evaluation(5, 2.0)
        for step in range(6, 11):
            logger.log_step(record(step, loss=float(step)))
        logger.log_evaluation(10, 1.0)
    after = read(tmp_path)
    losses = [item for item in after if "loss" in item]
    assert [item["step"] for item in losses] == list(range(1, 11))
    assert losses[:5] == before
    assert [item["loss"] for item in losses[5:]] == [6.0, 7.0, 8.0, 9.0, 10.0]
    assert [item["step"] for item in after if "val_loss" in item] == [0, 5, 10]
    assert [item["state_bytes"][0]["param"] for item in after if "state_bytes" in item] == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def read_complete(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rindex("\n")].splitlines()]


def test_a_start_from_zero_begins_a_new_file(tmp_path: Path) -> None:
    with open_logger(tmp_path) as logger:
        logger.log_evaluation(0, 3.0)
        logger.log_step(record(1))
    with open_logger(tmp_path) as logger:
        logger.log_evaluation(0, 3.0)
    assert read(tmp_path) == [{"step": 0, "val_loss": 3.0, "val_ppl": math.exp(3.0)}]


def test_only_rank_0_writes(tmp_path: Path) -> None:
    with open_logger(tmp_path, rank=1, cfg=LoggingConfig(tensorboard=True)) as logger:
        logger.log_state_bytes([])
        logger.log_step(record(1))
        logger.log_evaluation(1, 1.0)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    with open_logger(tmp_path) as logger:
        logger.log_step(record(1, loss=math.nan, grad_norm=math.inf, skipped=1, loss_scale=512.0))
        logger.log_evaluation(1, 1000.0)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    step, evaluation = read(tmp_path)
    assert (step["loss"], step["grad_norm"], step["skipped"], step["loss_scale"]) == (None, None, 1, 512.0)
    assert (evaluation["val_loss"], evaluation["val_ppl"]) == (1000.0, None)


def test_a_token_counts_once_whatever_ranks_do_with_it() -> None:
    """tp 2: two ranks work on the same 80 tokens for one second."""
    times = iter([10.0, 11.0, 100.0, 100.5])
    throughput = Throughput(num_ranks=2, flops_per_token=1e12, peak_tflops=100.0, clock=lambda: next(times))
    throughput.start()
    assert throughput.stop(80) == Rates(seconds=1.0, tokens_per_sec=80.0, tokens_per_sec_per_rank=40.0, tflops=40.0, mfu=0.4)
    throughput.start()  # 89 seconds of evaluation do not count
    assert throughput.stop(80).tokens_per_sec == 160.0


def test_peaks() -> None:
    names = {
        "NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA H100 80GB HBM3": 989.0, "NVIDIA H200": 989.0, "NVIDIA GH200 480GB": 989.0,
        "NVIDIA H100 PCIe": 756.0, "NVIDIA L40S": 362.0, "NVIDIA L4": 121.0, "NVIDIA A10": 125.0, "Some Accelerator 9": None,
    }  # fmt: skip
    assert {name: known_peak(name) for name in names} == names
    cpu = torch.device("cpu")
    assert peak_tflops(None, cpu, torch.bfloat16) is None
    assert peak_tflops(1.5, cpu, torch.float32) == 1.5


def test_memory_of_the_process_is_its_peak() -> None:
    """What is held counts, also after it is gone; what the imports took before is below it."""
    code = (
        "import torch; from paro_lm.metrics import memory_gb; cpu = torch.device('cpu');"
        "held = torch.ones(2 * 10**9, dtype=torch.uint8); during = memory_gb(cpu); del held; print(during, memory_gb(cpu))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    during, after = map(float, printed.split())
    assert 2.0 < during < 4.0  # 2 GB held, beside the interpreter and its libraries
    assert after >= during


def test_plain_lines_without_a_terminal() -> None:
    """Every third step and the last; the pace of the last steps gives the time that is left."""
    console, times = quiet(), iter([0.0, 2.0, 4.0, 6.0])
    reporter = ProgressReporter(console, total_steps=10, every=3, clock=lambda: next(times))
    for step in (1, 2, 3, 10):
        reporter.step(record(step, rates=Rates(**(vars(RATES) | {"mfu": 0.415}))).as_dict())
    reporter.evaluation(10, 2.0, math.exp(2.0))
    reporter.close()
    assert console.file.getvalue().splitlines() == [
        "step 3/10 | loss 3.3333 | lr 1.00e-03 | grad norm 0.300 | 160 tokens/s | 0.25 TFLOP/s per rank | mfu 41.5 % | 1.50 GB | "
        "sent dp_inter 0.0 MB, dp_intra 0.0 MB | eta 0:00:14",
        "step 10/10 | loss 10.3333 | lr 1.00e-03 | grad norm 0.300 | 160 tokens/s | 0.25 TFLOP/s per rank | mfu 41.5 % | 1.50 GB | "
        "sent dp_inter 0.0 MB, dp_intra 0.0 MB | eta 0:00:00",
        "step 10/10 | validation loss 2.0000 | perplexity 7.39",
    ]


def test_a_bar_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    reporter = ProgressReporter(console, total_steps=10, first_step=4)
    reporter.step(record(5).as_dict())
    reporter.evaluation(5, 2.0, math.exp(2.0))
    reporter.close()
    text = console.file.getvalue()
    assert "step 5/10" in text
    assert "loss 5.3333 | 160 tokens/s | eta" in text
    assert "\x1b[?25l" in text
    assert "validation loss 2.0000" in text
    assert "\x1b[?25h" in text  # and comes back


def summary(**changes: Any) -> RunSummary:
    values: dict[str, Any] = {
        "run_name": "r", "model_name": "tiny", "num_params": 1000, "num_trainable": 1000, "data_tokens": 40_000, "samples_per_step": 4,
        "seq_length": 50, "steps": 100, "total_tokens": 20_000, "state_bytes": {"param": 2_000_000, "grad": 4_000_000, "main": 12_000_000},
        "layout": "pp 1 x dp_inter 1 x dp_intra 1 x tp 1, NNN",
    }  # fmt: skip
    return RunSummary(**(values | changes))


def test_the_table_before_the_first_step() -> None:
    console = quiet()
    describe_run(summary(), console)
    text = console.file.getvalue()
    for part in (
        "tiny, 1,000 parameters\n", "40,000 tokens\n", "200 tokens (4 samples of 50)", "20,000 tokens in 100 steps, 0.50 epochs",
        "20.00 (about 20 is compute-optimal)", "0.018 GB = param 0.002 + grad 0.004 + main 0.012", "dp_intra 1 x tp 1, NNN",
    ):  # fmt: skip
        assert part in text
    assert "warning" not in text
    assert not summary(total_tokens=40_000).warnings()


def test_memory_that_two_buffers_share_counts_once() -> None:
    sizes = {"param": 4_000_000, "grad": 4_000_000, "main": 12_000_000, "shared": 4_000_000}
    assert "0.016 GB = param 0.004 + grad 0.004 + main 0.012 - shared 0.004," in dict(summary(state_bytes=sizes).rows())["memory per rank"]
    assert "shared" not in dict(summary(state_bytes=sizes | {"shared": 0}).rows())["memory per rank"]


def test_data_that_repeats_is_warned_about() -> None:
    console = quiet()
    describe_run(summary(total_tokens=100_000, num_trainable=10), console)
    text = console.file.getvalue()
    assert "warning: The data repeats: 100,000 tokens are 2.50 epochs of 40,000." in text
    assert "1,000 parameters, 10 of them trainable" in text


def test_tensorboard_continues_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg = LoggingConfig(tensorboard=True)
    with open_logger(tmp_path, cfg=cfg) as logger:
        for step in (1, 2, 3):
            logger.log_step(record(step, loss=float(step)))
    with open_logger(tmp_path, cfg=cfg, resume_step=2) as logger:
        logger.log_step(record(3, loss=30.0, grad_norm=math.nan))
        logger.log_evaluation(3, 7.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [event.step for event in events.Scalars("train/grad_norm")] == [1, 2]
    assert [(event.step, event.value) for event in events.Scalars("bytes/dp_intra")] == [(1, 20.0), (2, 20.0), (3, 20.0)]
    assert [(event.step, event.value) for event in events.Scalars("valid/val_loss")] == [(3, 7.0)]


def test_wandb_online_without_a_key_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="logging.wandb=online finds no API key.*wandb login.*logging.wandb=offline"):
        open_logger(run, cfg=LoggingConfig(wandb="online"))
    assert not run.exists()
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {'0' * 40}\n")
    assert tracker_problems(LoggingConfig(wandb="online")) == []


def test_wandb_offline_keeps_its_id_over_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    ids = []
    for resume_step in (0, 1):
        with open_logger(tmp_path, cfg=LoggingConfig(wandb="offline"), resume_step=resume_step) as logger:
            logger.log_step(record(resume_step + 1))
        ids.append((tmp_path / "wandb_id").read_text())
    assert ids[0] == ids[1]
    runs = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 2, runs
    assert all(ids[0] in name for name in runs), runs  # two parts within one second get a number at the end


def test_nothing_is_imported_or_sent_unless_asked(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from paro_lm.config import LoggingConfig; from paro_lm.metrics import MetricsLogger\n"
        "MetricsLogger(LoggingConfig(), Path(sys.argv[1]), run_name='r', total_steps=1).close()\n"
        "assert not {'wandb', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


@pytest.fixture
def restored_logging() -> Any:
    """Put the global state of the logging module back."""
    loggers = [logging.getLogger(name) for name in (None, "paro_lm", "py.warnings")]
    before = [(logger, list(logger.handlers), logger.level) for logger in loggers]
    yield
    for logger, handlers, level in before:
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.handlers[:] = handlers
        logger.setLevel(level)
    logging.captureWarnings(False)


def test_each_rank_has_a_log_and_the_console_shows_rank_0(tmp_path: Path, restored_logging: None) -> None:
    console = quiet()
    for rank in (1, 0, 0):  # the second call replaces the first
        logger = setup_logging(tmp_path, rank, console=console)
        logger.info("hello from %d", rank)
        logging.getLogger("paro_lm.data").warning("look [here] %d", rank)
        logging.getLogger("other").warning("elsewhere %d", rank)
    shown = console.file.getvalue().splitlines()
    assert shown == ["hello from 0", "warning: look [here] 0"] * 2
    for rank, times in ((0, 2), (1, 1)):
        text = log_path(tmp_path, rank).read_text()
        for part in (f"INFO paro_lm: hello from {rank}", f"WARNING paro_lm.data: look [here] {rank}", f"WARNING other: elsewhere {rank}"):
            assert text.count(part) == times
        assert f"hello from {1 - rank}" not in text


def fail(message: str) -> RuntimeError:
    try:
        raise RuntimeError(message)
    except RuntimeError as error:
        return error


def test_the_first_failure_is_the_last_line_of_every_rank(tmp_path: Path, restored_logging: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    streams = [io.StringIO(), io.StringIO()]
    console = quiet()
    setup_logging(tmp_path, 1)
    report_failure(tmp_path, 1, fail("out of memory"), stream=streams[1])
    setup_logging_without_reset(tmp_path, console)
    report_failure(tmp_path, 0, fail("connection closed by peer"), stream=streams[0])
    last = f"rank 1 failed first: RuntimeError: out of memory (logs: {tmp_path / 'logs'})"
    assert [stream.getvalue().splitlines()[-1] for stream in streams] == [last, last]
    assert "Traceback" in streams[1].getvalue()
    assert streams[0].getvalue() == last + "\n"
    assert console.file.getvalue() == ""
    assert "connection closed by peer" in log_path(tmp_path, 0).read_text()
    assert "out of memory" in log_path(tmp_path, 1).read_text()


def setup_logging_without_reset(folder: Path, console: Console) -> None:
    """Rank 0 set itself up before rank 1 failed; in one process that comes later, so the failure is kept aside meanwhile."""
    failure = folder / "logs" / "first_failure.json"
    kept = failure.read_text()
    setup_logging(folder, 0, console=console)
    assert not failure.exists()  # a new start forgets the failure of an earlier one
    failure.write_text(kept)


def test_a_failure_is_shown_where_the_run_folder_cannot_be_written(tmp_path: Path, restored_logging: None) -> None:
    (tmp_path / "logs").write_text("a file in the way")
    stream = io.StringIO()
    line = report_failure(tmp_path, 3, fail("disk"), stream=stream)
    assert line.startswith("rank 3 failed first: RuntimeError: disk")
    assert stream.getvalue().endswith(line + "\n")


def test_torchrun_is_told(tmp_path: Path, restored_logging: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    report_failure(tmp_path, 0, fail("told"), stream=io.StringIO())
    assert "told" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


def test_profiler_traces_the_steps_asked_for(tmp_path: Path) -> None:
    profiler = Profiler([2, 3], tmp_path / "traces", rank=1)
    for step in range(1, 5):
        with profiler.step(step):
            torch.ones(8) @ torch.ones(8)
    profiler.close()
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "rank_1_steps_2-3.json"
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {"step 2", "step 3"} <= names
    assert not {"step 1", "step 4"} & names
    assert "aten::dot" in names


def test_profiler_that_is_stopped_early_writes_what_it_has(tmp_path: Path) -> None:
    profiler = Profiler([1, 9], tmp_path)
    with profiler.step(4):
        torch.ones(8).sum()
    assert profiler.close() == tmp_path / "rank_0_steps_4-4.json"
    assert profiler.close() is None
    assert os.listdir(tmp_path) == ["rank_0_steps_4-4.json"]


def test_profiler_is_off_by_default_and_refuses_bad_ranges(tmp_path: Path) -> None:
    profiler = Profiler([], tmp_path)
    with profiler.step(0):
        pass
    assert profiler.close() is None
    for bad in ([3], [5, 2], [0, 1], [1, 2, 3]):
        with pytest.raises(ValueError, match="logging.profile_steps="):
            Profiler(bad, tmp_path)
