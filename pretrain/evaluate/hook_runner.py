"""Runs the hooks that are due, on all ranks together."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from data_pipeline.base.atomic import write_bytes
from pretrain.config.evaluation import HookSettings
from pretrain.engine.ranks import all_gather
from pretrain.evaluate import record
from pretrain.evaluate.hook import (
    Collectives,
    EvalModel,
    EvalResult,
    Evaluation,
    Hook,
    Outcome,
    Row,
    StepHook,
    ValidationData,
)
from pretrain.run import watchdog

if TYPE_CHECKING:
    from pretrain.engine.engine import Engine


class HookRunner:
    """Runs the hooks of a run. `folder`: where their tables and images are written. None: nowhere. `resumes`: as in
    `record.keep`."""

    def __init__(
        self, settings: Sequence[HookSettings], held_out: ValidationData, folder: Path | None, resumes: bool = True
    ):
        self._hooks = [(one, build(one)) for one in settings]
        self._held_out, self._folder, self._resumes = held_out, folder, resumes
        self._errors: dict[int, Exception] = {}  # by id(hook), of hooks that raised in `during`

    def after(self, model: EvalModel, step: int, last: bool) -> Iterator[EvalResult]:
        """Runs each hook that is due after `step` steps, and writes its tables and images. All ranks call this.

        After the last step every hook is due. Of hooks that differ in `every_steps` alone, one runs. A hook that fails
        or exceeds its budget gives a warning.
        """
        for settings, hook in self._due(step, last):
            yield self._evaluated(settings, hook, model, step)

    @contextlib.contextmanager
    def during(self, engine: "Engine", step: int, last: bool) -> Iterator[None]:
        """Encloses the training step before a call of `after`, for the hooks that measure steps."""
        with contextlib.ExitStack() as stack:
            for _, hook in self._due(step, last):
                if isinstance(hook, StepHook):
                    stack.enter_context(self._around_step(hook, engine))
            yield

    @contextlib.contextmanager
    def _around_step(self, hook: StepHook, engine: "Engine") -> Iterator[None]:
        """Encloses a step by `hook.during`. The hook's evaluation raises an error of `during`."""
        self._errors.pop(id(hook), None)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(hook.during(engine))
            except Exception as error:
                self._errors[id(hook)] = error
            yield
            try:
                stack.close()
            except Exception as error:
                self._errors[id(hook)] = error

    def _evaluate(self, hook: Hook, evaluation: Evaluation) -> EvalResult:
        if error := self._errors.pop(id(hook), None):
            raise error
        return hook.evaluate(evaluation) or EvalResult()  # on other ranks than 0 a hook may return None

    def _due(self, step: int, last: bool) -> Iterator[tuple[HookSettings, Hook]]:
        ran = []
        for settings, hook in self._hooks:
            apart_from_period = settings.model_dump(exclude={"every_steps"})
            if (last or step % settings.every_steps == 0) and apart_from_period not in ran:
                ran.append(apart_from_period)
                yield settings, hook

    def _evaluated(self, settings: HookSettings, hook: Hook, model: EvalModel, step: int) -> EvalResult:
        collectives = Collectives(settings.budget_seconds, model.device, alone=self._held_out.layout.ranks == 1)
        evaluation = Evaluation(model, self._held_out, step, collectives, partial(self._earlier, step))
        began = time.monotonic()
        with watchdog.slow_phase(), torch.no_grad():
            outcome = collectives.run(lambda: self._recorded(step, self._evaluate(hook, evaluation)))
        seconds = time.monotonic() - began
        if outcome.value is None:
            return self._failed(settings.hook, step, outcome)
        result, warnings = outcome.value, []
        if collectives.late:
            budget = f"its budget of {settings.budget_seconds:g} s (evaluation.budget_seconds)"
            warnings = [f"warning: {settings.hook} was cut after {seconds:.1f} s, {budget}; it covers only a part"]
        metrics = {**result.metrics, f"evaluation/{settings.hook}/seconds": seconds}
        return EvalResult(metrics, lines=[*result.lines, *warnings], more_lines=result.more_lines)

    def _earlier(self, step: int, table: str) -> list[Row]:
        """The rows that a table got before `step`."""
        rows = record.table(self._folder / f"{table}.json") if self._folder is not None else []
        return [row for row in rows if row["step"] < step]

    def _recorded(self, step: int, result: EvalResult) -> EvalResult:
        if self._held_out.layout.rank == 0 and self._folder is not None:
            record.keep(self._folder, step, result, self._resumes)
        return result

    def _failed(self, hook: str, step: int, outcome: Outcome[EvalResult]) -> EvalResult:
        """The warning for a hook that failed on some rank. A rank with a traceback writes it to a file."""
        rank, ranks = self._held_out.layout.rank, self._held_out.layout.ranks
        own = None if outcome.others_left else outcome.error
        errors = all_gather(own, str | None) if ranks > 1 else [own]
        first = next((rank for rank, error in enumerate(errors) if error is not None), 0)
        if outcome.traceback is not None and self._folder is not None:
            with contextlib.suppress(OSError):
                file = self._folder / "failures" / f"{hook}-step-{step:08d}-rank-{rank}.txt"
                write_bytes(file, outcome.traceback.encode())
        where = f" on rank {first}" if ranks > 1 else ""
        return EvalResult(lines=[f"warning: evaluation by {hook} failed{where}: {errors[first]}"], failed=True)


def build(settings: HookSettings) -> Hook:
    """The hook that `settings` describe."""
    module, name = settings.implementation.rsplit(".", 1)
    return getattr(import_module(module), name)(settings)
