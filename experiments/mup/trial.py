"""A few steps of a small model on the CPU, and how its activations and weights change."""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import Batch
from pretrain import models
from pretrain.config.optimizers import OptimizerConfig
from pretrain.engine import optimizers
from pretrain.engine.optimizers.groups import kinds
from pretrain.models import ModelConfig
from pretrain.models.model import Head, Model

LOGITS = "logits"
# modules by their names: what one of a model's layers adds, or its whole output
_KINDS = {
    "embedding": r"embedding",
    "attention": r".*\.(self_)?attention",
    "cross-attention": r".*\.cross_attention",
    "feed-forward": r".*\.feed_forward",
    "layers": r".*(layers|encoder|decoder)\.\d+",
    "bridge": r"bridge",
}


class Trial:
    """A model and its optimizer. Weights are drawn with `seed`."""

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, seed: int, rate: float = 1.0):
        """`rate`: multiplies the learning rates of all groups."""
        torch.manual_seed(seed)
        self.model: Model = models.build(model)
        self._clipping = optimizer.gradient_clipping
        self._optimizer = optimizers.build(self.model, optimizer)
        for group in self._optimizer.param_groups:
            group["lr"] = group["base_rate"] * rate

    def loss(self, batch: Batch) -> Tensor:
        """The loss of a step: the sum of the means of all losses, as in training."""
        found = self.model(**batch)
        means = []
        for name, values in found.items():
            counted = batch.get(name, batch["labels"]) != IGNORE_INDEX
            means.append(values.sum() / counted.sum().clamp(min=1))
        return torch.stack(means).sum()

    def step(self, batch: Batch) -> float:
        """Takes a step; returns the loss before it."""
        loss = self.loss(batch)
        loss.backward()
        if self._clipping:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def activations(self, batch: Batch) -> tuple[dict[str, float], float]:
        """Root mean squares by kind of module and of the logits, over all modules of a kind; and how far the logits of
        targets stand above the mean over the vocabulary, on average."""
        with _recorded(self.model) as (squares, lifts):
            self.loss(batch)
        return {kind: (sum(found) / len(found)) ** 0.5 for kind, found in squares.items()}, lifts[0]

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def changes(self, before: dict[str, Tensor]) -> dict[str, float]:
        """Root mean squares of what changed since `before`, over the elements that did, by kind of parameter."""
        found: dict[str, list[float]] = defaultdict(list)
        kind_of = kinds(self.model)
        for name, weight in self.model.named_parameters():
            change = (weight.detach() - before[name]).double()
            if (count := int(change.count_nonzero())) and kind_of[name] in ("embeddings", "output", "matrices"):
                found[kind_of[name]].append(float(change.square().sum()) / count)
        return {kind: (sum(squares) / len(squares)) ** 0.5 for kind, squares in found.items()}


@contextmanager
def _recorded(model: nn.Module) -> Iterator[tuple[dict[str, list[float]], list[float]]]:
    """Within the block, the mean squares of modules' outputs and of the logits are recorded by kind, and how far the
    targets' logits stand above the mean over the vocabulary."""
    squares: dict[str, list[float]] = defaultdict(list)
    lifts: list[float] = []

    def record(kind: str, module: nn.Module, inputs: Any, output: Any) -> None:
        squares[kind].append(float(output.detach().double().square().mean()))

    def record_logits(module: Head, inputs: Any) -> None:
        x, labels = inputs[0].detach().flatten(0, -2), inputs[1].flatten()
        logits = (module.scaled(x[labels != IGNORE_INDEX]) @ module.weight.t()).double()
        targets = logits.gather(-1, labels[labels != IGNORE_INDEX][:, None])
        squares[LOGITS].append(float(logits.square().mean()))
        lifts.append(float(targets.mean() - logits.mean()))

    hooks = [
        module.register_forward_hook(partial(record, kind))
        for name, module in model.named_modules()
        for kind, pattern in _KINDS.items()
        if re.fullmatch(pattern, name)
    ]
    hooks.append(model.get_submodule("lm_head").register_forward_pre_hook(record_logits))
    try:
        yield squares, lifts
    finally:
        for hook in hooks:
            hook.remove()
