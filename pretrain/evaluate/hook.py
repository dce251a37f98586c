"""Hooks: evaluations that all ranks run together while a model trains, or on a checkpoint.

A package of your own offers a hook through an entry point, which names the class of its settings:

    [project.entry-points."encdec_pretrain.hooks"]
    answer_length = "my_package.settings:AnswerLengthSettings"

If a hook returns, raises or hangs on one rank, all ranks leave the hook: otherwise the others would wait in their next
collective for ever. So before each collective the ranks exchange their states. `Collectives` does this.
"""

import contextlib
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist

from data_pipeline.corpus import Corpus
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.loading.batch_layout import IGNORE_INDEX, BatchLayout
from data_pipeline.loading.batches import Batch, validation_batches
from pretrain.engine.ranks import all_gather
from pretrain.models.model import Model, recording_hits
from pretrain.run import watchdog

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pretrain.engine.engine import Engine

T = TypeVar("T")
Row = Mapping[str, Any]
"""A row of a table: its cells by column."""
_CONTINUES, _LATE, _RAISED, _RETURNED = range(4)


@dataclass(frozen=True)
class EvalResult:
    """The results of a hook. Only the results of rank 0 are kept.

    Attributes:
        metrics: numbers by name, for metrics.jsonl and MLflow.
        tables: rows by the name of their table. A table grows from evaluation to evaluation; the step is added to each
            row.
        images: matplotlib figures by name.
        lines: the lines to print; a line that begins with "warning: " is a warning.
        more_lines: further lines that only `pretrain evaluate` prints.
        failed: True if the hook raised or hung, and has no results.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    tables: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    images: Mapping[str, "Figure"] = field(default_factory=dict)
    lines: Sequence[str] = ()
    more_lines: Sequence[str] = ()
    failed: bool = False


class EvalModel(Protocol):
    """A model under evaluation. All ranks make the same calls in the same order."""

    @property
    def device(self) -> torch.device: ...

    @property
    def module(self) -> Model:
        """The model that computes `losses`. ZeRO-3 shards its weights."""
        ...

    def losses(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The fp32 losses that the model's forward returns, without dropout and without gradients."""
        ...

    def whole(self) -> AbstractContextManager[Model]:
        """Within the block, the model in evaluation mode with all its weights on this rank."""
        ...


@dataclass(frozen=True)
class ValidationData:
    """The held-out rows of a run, and this rank's share of them.

    Attributes:
        corpora: the corpora, by their names in metrics.
        skip_damage: True if rows of damaged blocks are left out instead of ending the run.
    """

    corpora: Mapping[str, Corpus]
    tokenizer: Tokenizer
    skip_damage: bool
    layout: BatchLayout


@dataclass(frozen=True)
class Evaluation:
    """The model and the data that a hook evaluates. All ranks call its methods in the same order.

    Attributes:
        step: the number of training steps so far.
        earlier: returns the rows that earlier evaluations added to a table, where NaN is "NaN", as `float` reads it.
    """

    model: EvalModel
    held_out: ValidationData
    step: int
    collectives: "Collectives"
    earlier: Callable[[str], Sequence[Row]] = lambda table: ()

    def batches(self, corpus: Corpus, rows: int | None = None, shift: int = 0) -> Iterator[Batch]:
        """This rank's batches of the held-out rows of `corpus`. All ranks together get each row once.

        The batches end early once the budget is spent. `rows`: maximum number of rows over all ranks, rounded up to
        whole batches; None: all rows. Rows that pad the last batches have labels of -100 only. `shift`: the row `shift`
        rows further on replaces each row; after the last row comes the first.
        """
        data = self.held_out
        left = rows
        for batch in validation_batches(corpus, data.layout, data.skip_damage, shift):
            watchdog.alive()
            yield batch
            if left is not None:
                left -= data.layout.ranks * data.layout.micro_batch
            if self.collectives.late or (left is not None and left <= 0):
                return

    def losses(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The fp32 losses of a batch by name, as the model's forward returns them; "labels": (batch, targets)."""
        with self.collectives.guard():
            return self.model.losses(batch)

    def losses_and_hits(self, batch: Batch, alone: bool = False) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """`losses`, and whether each target is the model's likeliest id: bool (batch, targets).

        `alone`: True if the model is whole on this rank, and other ranks don't call this.
        """
        with self.collectives.shield(), recording_hits(self.model.module) as hits:
            losses = self.model.losses(batch) if alone else self.losses(batch)
        labels, (found,) = batch["labels"].to(hits[0].device), hits
        if found.shape != labels.shape:  # without ignored labels
            found = torch.zeros_like(labels, dtype=torch.bool).masked_scatter(labels != IGNORE_INDEX, found)
        return losses, found

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[Model]:
        """Within the block, the model in evaluation mode with all its weights on this rank; it uses no collectives."""
        with self.collectives.guard(), self.model.whole() as model, self.collectives.unshielded():
            yield model

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` over all ranks."""
        with self.collectives.guard():
            if self.held_out.layout.ranks > 1:
                dist.all_reduce(values)
        return values

    def shared(self, items: Sequence[T], work: Callable[[Sequence[T]], Sequence[Any]], kind: Any) -> list[Any]:
        """Divides `items` among the ranks; returns the results of `work` on all ranks, in the order of `items`.

        `work` maps some items to their results. It must use no collectives, and only a model that is whole on this
        rank. `kind`: the type of a result; pydantic sends results between ranks as JSON.
        """
        rank, ranks = self.held_out.layout.rank, self.held_out.layout.ranks
        mine = [*work(items[rank::ranks])]
        with self.collectives.guard():
            gathered = all_gather(mine, list[kind]) if ranks > 1 else [mine]
        return [gathered[index % ranks][index // ranks] for index in range(len(items))]


class Hook(Protocol):
    """An evaluation. Each hook is created once, from its settings, when training begins."""

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        """Evaluates the model; called on all ranks without gradients.

        A hook that raises is reported, and training continues.
        """
        ...


@runtime_checkable
class StepHook(Hook, Protocol):
    """A hook that also encloses the training step before its evaluation."""

    def during(self, engine: "Engine") -> AbstractContextManager[None]:
        """Encloses a training step of `engine`, on all ranks. A hook must neither change the step nor use
        collectives."""
        ...


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """How a hook ended: on all ranks with a `value`, or on all ranks with an `error`.

    Attributes:
        traceback: the traceback of the exception that this rank's hook raised, if any.
        others_left: True if the error is of another rank.
    """

    value: T | None = None
    error: str | None = None
    traceback: str | None = None
    others_left: bool = False


class _Interrupted(BaseException):
    """Raised in a hook that hangs. A BaseException, so that the hook doesn't catch it."""


class _OthersLeft(BaseException):
    """Raised in a hook that other ranks have left."""


class Collectives:
    """Runs one hook on all ranks.

    Attributes:
        late: True if the budget is spent, as all ranks have agreed.
    """

    def __init__(self, seconds: float | None, device: torch.device, alone: bool = False):
        """`seconds`: the hook's budget (None: no limit). `alone`: True if there is no process group."""
        self._seconds = seconds
        self._device = device
        self._alone = alone
        self._began = time.monotonic()
        self._shielded = self._overdue = False
        self.late = False

    def run(self, hook: Callable[[], T]) -> Outcome[T]:
        """Calls `hook`. Either all ranks get a value, or all get an error.

        A hook that hangs in Python code is interrupted after twice its budget. A hook that hangs in native code can't
        be interrupted; the run's watchdog then ends the run.
        """
        try:
            with self._alarm():
                outcome = Outcome(value=hook())
        except _OthersLeft as error:
            return Outcome(error=str(error), others_left=True)
        except _Interrupted:
            outcome = Outcome(error=f"hung: no end after {2 * (self._seconds or 0):g} s, twice its budget")
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            outcome = Outcome(
                error=f"{type(error).__name__}: {lines[0]}".rstrip(": "), traceback=traceback.format_exc()
            )
        try:
            self._agree(_RETURNED if outcome.error is None else _RAISED)
        except _OthersLeft as error:
            return Outcome(error=str(error), others_left=True)
        return outcome

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Within the block, all ranks are in the same collective, and the budget doesn't interrupt it."""
        overdue = self._seconds is not None and time.monotonic() - self._began > self._seconds
        with self.shield():
            self._agree(_LATE if overdue else _CONTINUES)
            yield

    def _agree(self, state: int) -> None:
        """Raises _OthersLeft if this rank continues, but another rank has left the hook."""
        states = torch.zeros(4, dtype=torch.int64, device=self._device)
        states[state] = 1
        if not self._alone:
            dist.all_reduce(states)
        continuing, late, raised, returned = states.tolist()
        self.late |= late > 0
        if state == _RAISED:
            return
        if raised:
            raise _OthersLeft("failed on another rank")
        if returned and continuing + late:
            raise _OthersLeft("its ranks made different numbers of collective calls")

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """Within the block, the hook isn't interrupted, so that the block can restore what it changes. An interruption
        that is due comes after the block."""
        before, self._shielded = self._shielded, True
        try:
            yield
        finally:
            self._shielded = before
        if self._overdue and not before:
            raise _Interrupted

    @contextlib.contextmanager
    def unshielded(self) -> Iterator[None]:
        """Within this block, inside a shielded block, the hook may be interrupted."""
        self._shielded = False
        try:
            if self._overdue:
                raise _Interrupted
            yield
        finally:
            self._shielded = True

    @contextlib.contextmanager
    def _alarm(self) -> Iterator[None]:
        if self._seconds is None or threading.current_thread() is not threading.main_thread():
            yield
            return

        def overdue(signal_number: int, frame: FrameType | None) -> None:
            self._overdue = True
            if not self._shielded:
                raise _Interrupted

        before = signal.signal(signal.SIGALRM, overdue)
        began = time.monotonic()
        others_seconds, interval = signal.setitimer(signal.ITIMER_REAL, 2 * self._seconds)
        try:
            yield
        finally:
            self._shielded = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            if others_seconds:  # another alarm was set before; it goes off at its own time
                left = others_seconds - (time.monotonic() - began)
                signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), interval)
