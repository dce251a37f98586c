"""The budget of an experiment: the length of every run by one rule."""

import re
from collections.abc import Iterator

from data_pipeline.foundation.errors import UserError
from pretrain.config import RunConfig
from pretrain.trainer.throughput import flops_per_step
from pretrain.trainer.validate import validate

_NUMBER = r"\d+(\.\d+)?"
_BUDGET = re.compile(rf"(?P<steps>[1-9]\d*)steps?|(?P<percent>{_NUMBER})%|(?P<flops>{_NUMBER}(e\+?\d+)?)flops", re.I)
_SMALLEST = 50  # steps: with fewer, whole steps miss the FLOPs by more than 1 %


def shortened(config: RunConfig, budget: str) -> list[str]:
    """The overrides that give the run of `config` the length of `budget`: "400steps", "5%" of its steps or "2e13flops".
    Raises UserError for anything else."""
    match = _BUDGET.fullmatch(budget.replace(" ", ""))
    if match and match["steps"]:
        return of_length(config, int(match["steps"]))
    if match and match["flops"] and float(match["flops"]) > 0:
        return of_length(config, _steps_of_flops(config, float(match["flops"])))
    percent = float(match["percent"] or 0) if match else 0.0
    if not 0 < percent <= 100:
        raise UserError(
            f"--budget: {budget!r}; expected a number of steps, such as 400steps, a share, such as 5%, or FLOPs, "
            "such as 2e13flops"
        )
    return of_length(config, max(1, round(percent / 100 * config.run.max_steps)))


def of_length(config: RunConfig, steps: int) -> list[str]:
    """The overrides that give the run of `config` a length of `steps`, and every number of steps in its file in
    proportion.

    These are warm-up and decay, the ramp of the batch size, the curriculum, and the steps from one evaluation,
    checkpoint and line of metrics to the next. A number of steps stays at least 1. Widths, batches, learning rates and
    data stay as they are.
    """
    share = steps / config.run.max_steps
    lengths = {key: max(1, round(share * value)) for key, value in _lengths(config) if value}
    return [f"{key}={value}" for key, value in {**lengths, "run.max_steps": steps}.items()]


def _steps_of_flops(config: RunConfig, flops: float) -> int:
    # The weights that a run starts from may come from another run of the experiment, which isn't there yet.
    alone = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"init_from": None})})
    steps = round(flops / flops_per_step(validate(alone, 0, 1, ranks_are_here=False)))
    if steps < _SMALLEST:
        raise UserError(f"--budget: {flops:g} FLOPs are {steps} steps of {config.run.name}; {_SMALLEST} at least")
    return steps


def _lengths(config: RunConfig) -> Iterator[tuple[str, int | None]]:
    """Every key of a run file that counts steps of the run, with its value."""
    for key in ("warmup_steps", "until_step", "decay_steps"):
        yield f"schedule.{key}", getattr(config.schedule, key, None)
    for number, ramp in enumerate(config.batch.ramp_up):
        yield f"batch.ramp_up.{number}.until_step", ramp.until_step
    for number, stage in enumerate(config.data.curriculum):
        yield f"data.curriculum.{number}.until_step", stage.until_step
    for number, hook in enumerate(config.evaluation):
        yield f"evaluation.{number}.every_steps", hook.every_steps
    yield "checkpoint.every_steps", config.checkpoint.every_steps
    yield "checkpoint.keep_every_steps", config.checkpoint.keep_every_steps
    yield "tracking.log_every_steps", config.tracking.log_every_steps
