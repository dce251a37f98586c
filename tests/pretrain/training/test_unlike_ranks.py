"""Two ranks of which one meets what the other doesn't: both continue or both end. And what ranks tell one another."""

import contextlib
import errno
import io
import math
import resource
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
import torch.distributed as dist

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import DamagedInput, FailedError, StoreUnavailable, UserError
from data_pipeline.corpus import open_corpus
from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.batches import Batch
from pretrain.config import RunConfig
from pretrain.config.evaluation import HookSettings
from pretrain.engine.ranks import joined_world
from pretrain.evaluate.hook import EvalResult, Evaluation, ValidationData
from pretrain.evaluate.hook_runner import HookRunner
from pretrain.training.callback import Callback, StepResult
from pretrain.training.trainer import Trainer
from tests.support.rank_processes import each, on_ranks
from tests.support.runs import run_file
from tests.support.small_runs import flip

HERE = "tests.pretrain.training.test_unlike_ranks"
LIMIT = resource.getrlimit(resource.RLIMIT_FSIZE)


class Unlike(Callback):
    """What happens on rank 1 alone, by default in step 2."""

    def __init__(self, what: str):
        self.what = what if dist.get_rank() == 1 else ""
        if self.what == "can't be made":
            raise RuntimeError("no such device")
        if self.what == "other arithmetic":
            torch.set_num_threads(2)

    @contextlib.contextmanager
    def during_step(self, trainer: Trainer, micro_batches: list[Batch]) -> Iterator[None]:
        model, handles = trainer.engine.deepspeed.module, []
        if self.what == "a gradient that isn't finite" and trainer.step == 2:
            handles.append(next(model.parameters()).register_hook(lambda gradient: gradient * float("nan")))
        if self.what == "a spike" and trainer.step == 9:
            handles.append(model.register_forward_hook(lambda *given: {"labels": 99 * given[2]["labels"]}))
        if self.what == "slow":
            time.sleep(0.02)
        yield
        for handle in handles:
            handle.remove()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step != 2:
            return
        if self.what == "a pause":
            trainer.resume_clocks()
        if self.what == "a stop":
            trainer.stop()
        if self.what == "a flipped bit":
            flip(next(trainer.engine.deepspeed.module.parameters()).data, 3, 7)
        if self.what == "a full disk":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, LIMIT[1]))

    def metrics(self, trainer: Trainer) -> dict[str, float]:
        if self.what == "a metric":
            trainer.metrics.record("recorded", 2.0, "sum")
        return {"mine": 1.0} if self.what == "a metric" else {}


def locks_no_more(_: object) -> None:
    raise RuntimeError("the system locks no more pages")


def trained(path: Path, corpus: Path, what: str) -> int | str:
    """The exit code of a run, or the error that it ends with, and what it warns of."""
    from pretrain.engine.checkpoint.engine_state import PinnedStaging
    from pretrain.training.run import train_in_group

    alone = dist.get_rank() == 1
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        if what == "no memory" and alone:
            patch.setattr(PinnedStaging, "take", locks_no_more)
        patch.chdir(path.parent if what == "no corpus" and alone else corpus)
        try:
            return train_in_group(joined_world(), load(path, [], RunConfig))
        except UserError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, LIMIT)
            torch.set_num_threads(threads)


# By callback: what is unlike, the sections of the run file for it, and how both ranks end.
CASES: dict[str, tuple[str, dict[str, Any], int | str]] = {
    "SkippedSteps": ("a gradient that isn't finite", {}, 0),
    "Spikes": ("a spike", {"run": {"max_steps": 10}, "faults": {"spikes": {"window": 8}}}, 0),
    "Speed": ("a pause", {}, 0),
    "Reporting": ("a metric", {}, 0),
    "Checkpointing": ("a full disk", {}, "can't be saved: rank 1: File too large"),
    "Stops": ("a stop", {"run": {"max_steps": 4}}, 75),
}
BESIDE = {
    "callback": (
        "can't be made",
        {},
        f"rank 1: callbacks.0: {HERE}:Unlike can't be made: RuntimeError: no such device",
    ),
    "corpus": ("no corpus", {}, "rank 1: manifest.json: "),
    "copy": (
        "no memory",
        {},
        "rank 1: the state can't be copied for a checkpoint: the system locks no more pages",
    ),
}


def test_each_callback_with_one_rank_unlike_the_other(small_corpus, tmp_path):
    from pretrain.training.callbacks import build_callbacks

    callbacks = build_callbacks(load(run_file(tmp_path, small_corpus), [], RunConfig))
    assert CASES.keys() == callbacks.keys() - {"EvaluationHooks"}  # in the test below
    cases, expected = [], []
    for name, (what, sections, end) in {**CASES, **BESIDE}.items():
        changes = {"evaluation": [], "callbacks": [{"name": f"{HERE}:Unlike", "what": what}], **sections}
        changes["run"] = {"max_steps": 3, **sections.get("run", {})}
        path = run_file(tmp_path / name, Path(), **changes)
        cases.append((path, small_corpus, what))
        expected.append(end)
    found = on_ranks(2, each, trained, cases)
    assert found[0] == found[1]
    for case, one, end in zip(cases, found[0], expected, strict=True):
        assert one == end or (isinstance(end, str) and end in str(one)), (case, one)


class AloneSettings(HookSettings):
    """Rank 0 has results; the other rank has `others`."""

    implementation: ClassVar[str] = f"{HERE}.Alone"
    hook: Literal["alone"] = "alone"
    others: Literal["nothing", "an error"]


class Alone:
    def __init__(self, settings: AloneSettings):
        self._settings = settings

    def evaluate(self, evaluation: Evaluation) -> Any:
        if evaluation.held_out.layout.rank == 0:
            return EvalResult({"found": 1.0})
        return 1 // 0 if self._settings.others == "an error" else None


def evaluated(corpus: Path) -> list[tuple[bool, list[str]]]:
    from tests.support.small_runs import engine_of, run_config

    engine = engine_of(run_config(2))
    layout = BatchLayout(dist.get_rank(), 2, 2, 1)
    held_out = ValidationData({}, open_corpus(corpus).tokenizer, False, layout)
    runner = HookRunner([AloneSettings(others=one) for one in ("nothing", "an error")], held_out, None)
    found = [(one.failed, [*one.lines]) for one in runner.after(engine, 1, last=True)]
    engine.close()
    return found


def test_a_hook_whose_results_are_rank_0s_alone(small_corpus):
    line = "warning: evaluation by alone failed on rank 1: ZeroDivisionError: integer division or modulo by zero"
    found = on_ranks(2, evaluated, small_corpus)
    assert found == [[(False, []), (True, [line])]] * 2


ALONE = [
    FailedError("data.workers: the loader's worker process died: killed"),
    StoreUnavailable("s3://bucket: no answer for 600 s"),
    UserError("corpora/mine: no such folder"),
    DamagedInput("train/00001.tar", "byte 7", "another sha256"),
]


def left(error: UserError, together: bool) -> tuple[Any, str]:
    """How a rank ends, and what it prints, without a supervisor. Rank 1 alone has the error, unless all learn of it
    `together`."""
    from pretrain.engine import ranks

    printed, end = io.StringIO(), None
    try:
        with contextlib.redirect_stderr(printed), ranks.process_group(cpu_threads=1, seconds=60):
            mine = partial(raised, error if dist.get_rank() == 1 else None)
            ranks.run_on_all_ranks(mine) if together else mine()
    except SystemExit as exited:
        end = exited.code
    except UserError as told:  # which the command prints
        end = str(told)
    return end, printed.getvalue()


def test_a_rank_without_a_supervisor_says_why_it_alone_ends():
    """As under torchrun, `deepspeed --module` or srun: rank 0 would only see that its peer is gone."""
    for error in ALONE:
        assert on_ranks(2, left, error, False, joined=False) == [
            (None, ""),
            (error.exit_code, f"error: rank 1: {error}\n"),
        ]
    error = ALONE[0]
    assert on_ranks(2, left, error, True, joined=False) == [(f"rank 1: {error}", ""), (error.exit_code, "")]


class Planted:
    """Unpickled, it would make a file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def exchanged(planted: Path) -> list[Any]:
    from pretrain.engine import ranks

    rank = dist.get_rank()
    found: list[Any] = [
        ranks.all_gather({f"of {rank}": (rank * math.inf if rank else 0.5, Path(f"a\udcff/{rank}"))}, OF_RANK),
        ranks.broadcast("α" * (2 + 9 * rank), str),
    ]
    for wrong in (Planted(planted), "1"):
        try:
            found.append(ranks.all_gather(wrong if rank else 1, int))
        except ValueError:
            found.append("ValueError")
    errors = [UserError("two\nlines"), StoreUnavailable("no answer"), OSError(errno.ENOSPC, "No room", "a file")]
    for error in errors:
        for ranks_that_fail in ({0}, {1}, {0, 1}):
            try:
                found.append(ranks.run_on_all_ranks(partial(raised, error if rank in ranks_that_fail else None)))
            except UserError as raised_on_all:
                found.append((type(raised_on_all), str(raised_on_all)))
    return found


OF_RANK = dict[str, tuple[float, Path]]


def raised(error: Exception | None) -> None:
    if error:
        raise error


def test_ranks_exchange_values_of_known_types_and_run_nothing_that_a_peer_sends(tmp_path):
    """What one rank can't say, or refuses, all learn at once."""
    found = on_ranks(2, exchanged, tmp_path / "planted")
    values = [{"of 0": (0.5, Path("a\udcff/0"))}, {"of 1": (math.inf, Path("a\udcff/1"))}]
    refusals = [
        *((UserError, f"{rank}two\nlines") for rank in ("", "rank 1: ", "")),
        *((StoreUnavailable, f"{rank}no answer") for rank in ("", "rank 1: ", "")),
        *((FailedError, f"{rank}No room") for rank in ("rank 0: ", "rank 1: ", "rank 0: ")),
    ]
    assert found == [[values, "αα", "ValueError", "ValueError", *refusals]] * 2
    assert not (tmp_path / "planted").exists()
