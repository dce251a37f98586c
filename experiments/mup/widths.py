"""A run's model at other widths, and the rows that all of them learn from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
from pydantic import ValidationError

from data_pipeline.base.errors import UserError
from data_pipeline.loading.batch_layout import IGNORE_INDEX, BatchLayout
from data_pipeline.loading.batches import Batch, TrainingBatches
from pretrain import models
from pretrain.config import RunConfig
from pretrain.config.model_config import ModelConfig
from pretrain.run.world import World
from pretrain.training.prepare import prepare

INPUTS, TARGETS, ROWS = 64, 32, 4  # of a step: what a CPU takes in a tenth of a second
_LAYERS = 2  # of a stack: width is what is checked
_IDS = 2048  # further ids are folded onto these: a larger output matrix would take most of the time
_LEAST_WIDTH, _MOST_WIDTH = 64, 512  # unless widths are given


@dataclass(frozen=True)
class Subject:
    """What is checked: the model of a run, small in all but its width, and a step's rows at a time."""

    model: ModelConfig
    base_width: int
    batches: list[Batch]
    source: str

    def at(self, width: int, mup: bool) -> ModelConfig:
        """The model at `width`, with muP or as published."""
        given = {**self.model.model_dump(exclude_unset=True), "mup": {"base_width": self.base_width} if mup else None}
        share = Fraction(width, self.model.width)
        for path, value in {"d_model": self.model.width, **self.model.in_proportion()}.items():
            section, _, name = path.rpartition(".")
            if section or "d_model" in given:
                (given[section] if section else given)[name] = round(value * share)
        return type(self.model).model_validate(given)


def subject(config: RunConfig, steps: int) -> Subject:
    """The model of a run, and rows for `steps` steps: of its corpus if it is here, else generated."""
    model: ModelConfig = config.model
    batches, source = None, "generated tokens"
    directory = Path(config.data.train[0].corpus)
    if (directory / "manifest.json").exists():
        setup = prepare(config, World.on_this_node())
        model, source = setup.model, str(directory)
        rows = TrainingBatches(setup.stream, BatchLayout(0, 1, ROWS, 1))
        batches = [_shortened(rows[step * ROWS].batch) for step in range(steps)]
    ids = min(_IDS, model.vocab_size or _IDS)
    changes = {
        **_fewer_layers(model),
        **{name: 0.0 for name in type(model).training_only if hasattr(model, name)},
        "vocab_size": ids,
        "pad_id": model.pad_id % ids,
        "eos_id": model.eos_id % ids,
        "pad_vocab_to_multiple_of": 1,
    }
    small = type(model).model_validate({**model.model_dump(exclude_unset=True), **changes, "mup": None})
    batches = batches or [_generated(small, ids, step) for step in range(steps)]
    return Subject(small, model.base_width, [_folded(batch, ids) for batch in batches], source)


def _fewer_layers(model: ModelConfig) -> dict[str, object]:
    """The depths of the model's stacks, at most `_LAYERS`, as its section has them."""
    changes: dict[str, object] = {}
    for stack, section in model.stacks.items():
        names = ("num_layers", "num_encoder_layers", "num_decoder_layers")
        depths = {name: min(_LAYERS, value) for name in names if (value := getattr(section, name, None))}
        changes |= {stack: {**section.model_dump(exclude_unset=True), **depths}} if stack else depths
    return changes


def default_widths(model: ModelConfig) -> list[int]:
    """Doublings of the least width with whole heads: 64 to 512, or three of them beyond."""
    unit = model.width // math.gcd(model.width, *model.in_proportion().values())
    least = unit * -(-_LEAST_WIDTH // unit)
    found = [least * 2**power for power in range(4)]
    return [width for width in found if width <= _MOST_WIDTH] if found[2] <= _MOST_WIDTH else found[:3]


def check_widths(subject: Subject, widths: Sequence[int]) -> None:
    """Raises UserError, a line for each width at which heads or layers would not be whole, or for too few widths."""
    problems = []
    if len(set(widths)) < 3:
        problems.append(f"--widths: {', '.join(map(str, widths))}; expected three different ones or more")
    for width in widths:
        d_model = subject.model.width
        fractions = [
            f"{name} {value} of d_model {d_model} would be {value * width / d_model:g}"
            for name, value in subject.model.in_proportion().items()
            if value * width % d_model
        ]
        try:
            if not fractions:
                subject.at(width, mup=True)
        except ValidationError as error:
            fractions = [one["msg"].removeprefix("Value error, ") for one in error.errors()]
        problems += [f"--widths: {width}: {line}" for line in fractions]
    if problems:
        raise UserError("\n".join(problems))


def _shortened(batch: Batch) -> Batch:
    """The first tokens of each row; inputs and targets of one stack stay equally long."""
    alike = batch["encoder_input_ids"].shape == batch["labels"].shape
    return {
        name: rows[:, : INPUTS if alike or name.startswith(("encoder", "token")) else TARGETS].contiguous()
        if rows.dim() > 1
        else rows
        for name, rows in batch.items()
        if name != "target_indices"
    }


def _folded(batch: Batch, ids: int) -> Batch:
    folding = ("encoder_input_ids", "decoder_input_ids", "labels")
    return {
        name: torch.where(rows == IGNORE_INDEX, rows, rows % ids) if name in folding else rows
        for name, rows in batch.items()
    }


def _generated(model: ModelConfig, ids: int, step: int) -> Batch:
    """Rows of a chain: frequencies as 1 / rank, and half of the tokens follow from the one before."""
    draws = torch.Generator().manual_seed(step)
    objectives = models.FAMILIES[model.family].objectives
    inputs = min(INPUTS, model.longest_sequence or INPUTS)
    length = inputs + TARGETS if "span_corruption" in objectives else inputs + 1
    free = torch.multinomial(1 / torch.arange(1.0, ids - 2), ROWS * length, replacement=True, generator=draws) + 3
    chain, follows = free.view(ROWS, length), torch.rand(ROWS, length, generator=draws) < 0.5
    for index in range(1, length):
        chain[:, index] = torch.where(follows[:, index], (7 * chain[:, index - 1] + 1) % (ids - 3) + 3, chain[:, index])
    if "span_corruption" in objectives:
        return {
            "encoder_input_ids": chain[:, :inputs].contiguous(),
            "labels": chain[:, inputs : inputs + TARGETS].contiguous(),
        }
    if "causal_lm" in objectives:
        return {"encoder_input_ids": chain[:, :-1].contiguous(), "labels": chain[:, 1:].contiguous()}
    masked = torch.rand(ROWS, inputs, generator=draws) < 0.15
    return {
        "encoder_input_ids": chain[:, :inputs].masked_fill(masked, 2),
        "labels": torch.where(masked, chain[:, :inputs], IGNORE_INDEX),
    }
