"""The DeepSpeed engine: one optimizer step over a global batch.

The loss of a step is the mean over the valid target tokens of the global batch, however the batch is split. DeepSpeed
averages gradients over ranks, so each micro-batch contributes its sum of losses × ranks ÷ all valid tokens.
"""

import contextlib
import hashlib
import io
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import LABELS, Batch
from pretrain import optimizers
from pretrain.config import RunConfig
from pretrain.functional.arithmetic import OnHost, to_device
from pretrain.models.model import Losses, Model
from pretrain.optimizers.flat_buffers import Sharded
from pretrain.optimizers.groups import set_rates
from pretrain.run import heartbeat
from pretrain.zero import deepspeed_private
from pretrain.zero.construction import deepspeed_config
from pretrain.zero.deepspeed_private import deepspeed
from pretrain.zero.step_measures import DeviceTimes, HostTimes, StepNorms, StepTimes

Count = TypeVar("Count", int, torch.Tensor)
_METRICS = {"labels": "loss", "next_sentence_labels": "next_sentence_loss"}  # others by the names of their losses


class Outcome(NamedTuple):
    """The outcome of a step, the same on all ranks.

    - `loss`: the mean over the valid targets of the global batch, in nats; the gradient is that of this loss.
    - `applied`: False if the gradient was not finite and the step was skipped.
    - `requests`: for each request, whether any rank made it.
    """

    loss: float
    applied: bool
    requests: tuple[bool, ...]


class Engine:
    """A model under DeepSpeed. `step` trains on one global batch; `losses` returns losses without gradients.

    `optimizer`: instead of that of `config`.
    """

    def __init__(self, model: nn.Module, config: RunConfig, optimizer: Optimizer | None = None):
        self.config = config
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        with contextlib.redirect_stdout(io.StringIO()):  # stage 1 prints its memory in bf16
            self.deepspeed, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer or optimizers.build(model, config.optimizer),
                config=deepspeed_config(config, self._ranks),
            )
        for buffer in self.deepspeed.module.buffers():  # DeepSpeed broadcasts only parameters
            dist.broadcast(buffer, src=0)
        deepspeed_private.spare_passes(self.deepspeed)
        deepspeed_private.order_streams(self.deepspeed)
        if isinstance(sharded := deepspeed_private.wrapped(self.deepspeed), Sharded):
            layout = deepspeed_private.flat_buffers(self.deepspeed)
            sharded.attach(layout, self.deepspeed.optimizer.dp_process_group, self.deepspeed.device)
        deepspeed_private.check(self.deepspeed)
        self.device = self.deepspeed.device
        self.times: StepTimes = DeviceTimes() if self.device.type == "cuda" else HostTimes()
        deepspeed_private.time_waits(self.deepspeed, self.times.waiting)
        self._all_reduce = self.times.waiting(dist.all_reduce)
        self._rate = 0.0  # of the last step
        self.before_update: Callable[[], None] = lambda: None
        """Called in each step when its gradients are there, and before the weights change."""
        self.applied = False
        """True if the last step changed the weights: a step without a finite gradient is skipped."""
        self.unlogged: dict[str, tuple[float, int]] = {}
        """By name, the sum of each loss since the last metrics, and the number of what it is a mean over."""

    def step(self, step: int, position: int, batches: list[Batch], requests: tuple[bool, ...] = ()) -> Outcome:
        """Trains on this rank's micro-batches of `step`, whose rows begin at `position` of the stream.

        Dropout is keyed by (seed, step, first row of the micro-batch): a resumed run draws the same masks, even with
        its micro-batches on other ranks.
        """
        heartbeat.mark(step + 1)
        totals = self._totals(batches, requests)
        counted = dict(zip(LABELS, totals, strict=False))
        sums: dict[str, torch.Tensor] = {}
        deepspeed_private.forget_gradients(self.deepspeed.optimizer)
        self._rate = set_rates(self.deepspeed.optimizer, self.config, step)
        self.deepspeed.module.begin_step(self.config.run.seed, step)
        for number, batch in enumerate(batches):
            self.deepspeed.set_gradient_accumulation_boundary(number + 1 == len(batches))
            torch.manual_seed(self._dropout_seed(step, position, len(batches), self._rank, number))
            found_losses, trained = self._accumulate(batch, counted)
            for name, total in found_losses.items():
                sums[name] = sums.get(name, 0) + total
            heartbeat.mark()
            if number + 1 == len(batches):
                reduced = torch.stack(list(sums.values()))
                self._all_reduce(reduced)
                # before the update, for which the host waits for the gradient's norm: the copy is there by then
                found = OnHost(torch.cat([reduced, totals]))
                self.before_update()
            self.deepspeed.step()
        heartbeat.mark()
        values = iter(found.tolist())
        step_sums = dict(zip(sums, values, strict=False))
        step_counts = {name: int(next(values)) for name in LABELS}
        applied = self.applied = self.deepspeed.was_step_applied()
        if applied:
            for name, added in step_sums.items():
                before, counted_before = self.unlogged.get(name, (0.0, 0))
                self.unlogged[name] = before + added, counted_before + _count(step_counts, name)
        loss = sum(step_sums[name] / max(_count(step_counts, name), 1) for name in step_sums if name in trained)
        return Outcome(loss, applied, tuple(asked > 0 for asked in values))

    def counted(self, batches: list[Batch]) -> dict[str, torch.Tensor]:
        """How many labels of each kind count in the global batch, on the device. All ranks call this together."""
        return dict(zip(LABELS, self._totals(batches), strict=True))

    def replay(
        self, step: int, position: int, rank: int, batches: int, batch: Batch, counted: dict[str, torch.Tensor]
    ) -> None:
        """Computes the gradient of the first of the `batches` micro-batches that `rank` has in `step`, once more.

        Only hooks on parameters see it: it is neither added to that of the step nor reduced. Weights, random numbers
        and times of the step stay as they are. All ranks call this together, between steps. The other arguments are as
        in `step` and from `counted`.
        """
        model = self.deepspeed.module
        heartbeat.mark()
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self._dropout_seed(step, position, batches, rank, 0))
            model.begin_step(self.config.run.seed, step)
            losses = {name: values.sum() for name, values in self._losses_of(model, batch).items()}
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            # unlike `backward`, this runs none of DeepSpeed's hooks on accumulated gradients
            torch.autograd.grad(self._loss(losses, counted), parameters, allow_unused=True)

    def _totals(self, batches: list[Batch], requests: tuple[bool, ...] = ()) -> torch.Tensor:
        """The number of labels of each kind that count in the global batch, and of the ranks that make each request."""
        counts = torch.stack([_counts(batch) for batch in batches]).sum(dim=0).to(self.device)
        agreed = torch.cat([counts, to_device([int(request) for request in requests], self.device, counts.dtype)])
        self._all_reduce(agreed)
        return agreed

    def _dropout_seed(self, step: int, position: int, batches: int, rank: int, number: int) -> int:
        """Of the micro-batch `number` of the `batches` that `rank` has in `step`, whose rows begin at `position`."""
        rows = self.config.batch.rows(step) // self._ranks // batches  # of a micro-batch
        return _dropout_seed(self.config.run.seed, step, position + (rank * batches + number) * rows)

    def _accumulate(self, batch: Batch, counted: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Adds the gradient of one micro-batch; returns its sums of losses by name, and which of them it is of."""
        with self.times.forward():
            losses = {name: values.sum() for name, values in self.training_losses(batch).items()}
        heartbeat.mark()
        self.deepspeed.backward(self._loss(losses, counted), scale_wrt_gas=False)
        trained = [name for name, total in losses.items() if total.requires_grad]
        return {name: total.detach().double() for name, total in losses.items()}, trained

    def _loss(self, losses: dict[str, torch.Tensor], counted: dict[str, torch.Tensor]) -> torch.Tensor:
        """The part of a micro-batch, whose sums of losses these are, in the loss of the step, × ranks."""
        shares = [total / _count(counted, name).clamp(min=1) for name, total in losses.items() if total.requires_grad]
        share = sum(shares, torch.zeros((), device=self.device))
        # A loss that is not finite can have a finite gradient. NaN makes the gradient NaN, so that all ranks skip it.
        share = share * torch.where(torch.isfinite(share), 1.0, float("nan"))
        return share * self._ranks

    def training_losses(self, batch: Batch) -> Losses:
        """The model's losses of a micro-batch in training, with dropout and its wrapper."""
        return self._losses_of(self.deepspeed, batch)

    def _losses_of(self, model: nn.Module, batch: Batch) -> Losses:
        return model(**self._to_device(batch))

    @torch.no_grad()
    def losses(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The model's losses, fp32, without dropout and wrapper. All ranks must call this together."""
        with self._evaluating():
            return self.deepspeed(**self._to_device(batch))

    def has_finite_loss(self, batch: Batch) -> bool:
        """True if the losses of a micro-batch are finite on every rank. All ranks must call this together."""
        wrong = torch.stack([~torch.isfinite(values).all() for values in self.losses(batch).values()]).any().int()
        dist.all_reduce(wrong)
        return not int(wrong)

    @contextlib.contextmanager
    def whole(self) -> Iterator[Model]:
        """Within the block, the model in evaluation mode with all its weights on each rank.

        All ranks enter together.
        """
        with self._evaluating(), deepspeed_private.gathered_whole(self.deepspeed):
            yield self.deepspeed.module

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Within the block, the model in evaluation mode; then each of its modules is in the mode that it was in."""
        modes = [(module, module.training) for module in self.deepspeed.module.modules()]
        try:
            self.deepspeed.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call.

        train/loss: the mean per target token, in nats, over the steps that weren't skipped; NaN if all were.
        train/NAME: other losses by their names, a family's "embedding_loss" and "next_sentence_loss" as the gradient
        includes them.
        train/gradient_norm: L2 norm of the last step's gradient before clipping; infinite if that step was skipped.
        """
        sums, self.unlogged = self.unlogged or {"labels": (0.0, 0)}, {}
        means = {name: total / number if number else math.nan for name, (total, number) in sorted(sums.items())}
        return {
            **{f"train/{_METRICS.get(name, name)}": mean for name, mean in means.items()},
            "train/learning_rate": self._rate,
            "train/gradient_norm": self.gradient_norm,
        }

    @property
    def gradient_norm(self) -> float:
        """L2 norm of the last step's gradient before clipping; infinite if that step was skipped."""
        return float(self.deepspeed.get_global_grad_norm()) if self.applied else math.inf

    @contextlib.contextmanager
    def measured(self) -> Iterator[StepNorms]:
        """Within the block, measures the norms of the step that is taken there."""
        norms = StepNorms(self.deepspeed)
        with norms.measuring(self.deepspeed):
            yield norms

    def close(self) -> None:
        """Stops DeepSpeed's threads and removes its hooks, once all ranks have finished."""
        dist.barrier()
        self.deepspeed.destroy()

    def _to_device(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}


def _counts(batch: Batch) -> torch.Tensor:
    """(labels,) How many labels of each kind count in a micro-batch."""
    none = batch["labels"].new_zeros(())  # where the batch is, which may be the accelerator by now
    return torch.stack([(batch[name] != IGNORE_INDEX).sum() if name in batch else none for name in LABELS])


def _count(counted: dict[str, Count], name: str) -> Count:
    """The number of labels that a loss is averaged over: those of its name, or else the targets."""
    return counted.get(name, counted["labels"])


def _dropout_seed(seed: int, step: int, first: int) -> int:
    digest = hashlib.blake2b(f"{seed}/dropout/{step}/{first}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
