"""What the runs of an experiment have reached, from their own files."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.choose import newest
from pretrain.models import outline
from pretrain.run.metrics_file import Row, read_metrics
from pretrain.tools.experiment.planned_runs import PlannedRun

_VALIDATION = re.compile(r"validation/(.+)/loss")


@dataclass(frozen=True)
class Result:
    """A finished run. Losses are in nats per target token; None where they weren't measured.

    - `train_loss`: the mean since the line of metrics before the last.
    - `validation_loss`: after the last step, on the first validation corpus. `curve`: (step, loss) of all evaluations.
    - `text_loss`: the same on text tokens alone. `input_worth`: by how much it rises with another row's input.
    - `embedding_loss`: without its coefficient, like `train_loss`. `effective_rank`: of the embedding matrix.
    - `tokens`: of text that were trained on. `seconds`, `processor_seconds`: of the steps alone, by the clock
      and of all ranks' processors.
    """

    row: str
    seed: int
    steps: int
    parameters: int
    train_loss: float | None
    validation_loss: float | None
    embedding_loss: float | None
    effective_rank: float | None
    curve: list[tuple[int, float]]
    text_loss: float | None = None
    input_worth: float | None = None
    tokens: float | None = None
    seconds: float | None = None
    processor_seconds: float | None = None


def results(runs: Iterable[PlannedRun]) -> list[Result]:
    """The results of those of `runs` that have finished."""
    return [_result(run) for run in runs if run.finished]


def losses_by_seed(results: Iterable[Result], row: str) -> dict[int, float]:
    """The validation losses of a row."""
    found = ((result.seed, result.validation_loss) for result in results if result.row == row)
    return {seed: loss for seed, loss in found if loss is not None}


def _result(run: PlannedRun) -> Result:
    checkpoint = newest(run.directory)
    assert checkpoint is not None, "a finished run has saved"
    model, metrics = checkpoint_index.read(checkpoint).model, read_metrics(run.directory)
    validation = next((name for row in metrics for name in row.metrics if _VALIDATION.fullmatch(name)), None)
    found = _VALIDATION.fullmatch(validation or "")
    corpus = found[1] if found else ""
    embedding_loss = _last(metrics, "train/embedding_loss")
    if embedding_loss is not None:
        embedding_loss /= getattr(model, "embedding_loss").coefficient  # noqa: B009 - of one family alone
    return Result(
        run.row,
        run.seed,
        run.config.run.max_steps,
        outline(model).num_parameters(),
        _last(metrics, "train/loss"),
        _last(metrics, validation),
        embedding_loss,
        _last(metrics, "embedding/effective_rank"),
        [(row.step, row.metrics[validation]) for row in metrics if validation in row.metrics] if validation else [],
        _last(metrics, f"validation/{corpus}/text_loss"),
        _last(metrics, f"input_use/{corpus}/worth"),
        _last(metrics, "train/tokens"),
        _sum(metrics, "train/seconds"),
        _sum(metrics, "train/processor_seconds"),
    )


def _last(metrics: Sequence[Row], name: str | None) -> float | None:
    return next((row.metrics[name] for row in reversed(metrics) if name in row.metrics), None)


def _sum(metrics: Sequence[Row], name: str) -> float | None:
    values = [row.metrics[name] for row in metrics if name in row.metrics]
    return sum(values) if values else None
