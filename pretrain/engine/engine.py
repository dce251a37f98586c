"""The DeepSpeed engine: one optimizer step over a global batch.

The loss of a step is the mean over the valid target tokens of the global batch, however the batch is split. A
micro-batch contributes its sum of losses divided by the number of valid tokens of the global batch, and gradients are
summed over micro-batches and ranks.
"""

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.optim import Optimizer

from data_pipeline.corpus.objectives.randomness import hashed
from data_pipeline.loading.batch_layout import LABELS
from data_pipeline.loading.batches import Batch
from data_pipeline.loading.prefetch import COUNTS, count_of, to_device
from pretrain.config import RunConfig
from pretrain.engine import deepspeed_private, optimizers
from pretrain.engine.construction import (
    compiles,
    deepspeed_config,
    gathered_at_once,
    refuse_untrained,
    whole_copy,
)
from pretrain.engine.deepspeed_private import check_layout
from pretrain.engine.gradients import Gradients, LocalGradients, ReducedByDeepSpeed
from pretrain.engine.graphs import graphed
from pretrain.engine.optimizers.flat_buffers import FlatBuffer, Fragment, Sharded
from pretrain.engine.optimizers.groups import kinds
from pretrain.engine.ranks import min_over_ranks
from pretrain.engine.same_use import SameUse
from pretrain.engine.sharding import Sharding, ways_to_add_locally
from pretrain.models.model import Losses, Model
from pretrain.run import watchdog
from pretrain.run.world import World

Value = TypeVar("Value", float, Tensor)
_DISABLED = "TORCHDYNAMO_DISABLE"  # PyTorch reads it whenever something is compiled


class Outcome(NamedTuple):
    """The outcome of a step, the same on all ranks.

    Attributes:
        loss: the mean over the valid targets of the global batch, in nats; the step follows the gradient of this loss.
        applied: False if the gradient was not finite and the update was skipped.
        votes: for the name of each vote, True if any rank voted True.
        losses: by the name of each loss, its sum over the global batch, and the number of labels that its mean is over.
    """

    loss: float
    applied: bool
    votes: dict[str, bool]
    losses: dict[str, tuple[float, int]]


class Timer(Protocol):
    """Times the parts of a step in which this rank computes without waiting for other ranks."""

    def begin(self) -> None:
        """Called when such a part begins."""

    def end(self) -> None:
        """Called when it ends."""


class Totals:
    """Tables of scalars, by title and name, summed over the ranks in one collective.

    `totals["losses"]`: the sums of a table, on the device. `read`: the sums of all tables, on the host; only `read`
    waits for the device.
    """

    def __init__(self, names: Mapping[str, list[str]], sums: Tensor):
        self._names, self._sums = names, sums
        self._on_host = sums.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if sums.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    @classmethod
    def reduce(cls, **tables: Mapping[str, Tensor]) -> "Totals":
        """Sums `tables` over the ranks. All ranks call this together, with the same names and one dtype."""
        names = {title: list(table) for title, table in tables.items()}
        sums = torch.stack([value for table in tables.values() for value in table.values()])
        dist.all_reduce(sums)
        return cls(names, sums)

    def __getitem__(self, title: str) -> dict[str, Tensor]:
        return self._named(self._sums.unbind())[title]

    def read(self) -> dict[str, dict[str, float]]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._named(self._on_host.tolist())

    def _named(self, values: Sequence[Value]) -> dict[str, dict[str, Value]]:
        named, first = {}, 0
        for title, names in self._names.items():
            named[title] = dict(zip(names, values[first : first + len(names)], strict=True))
            first += len(names)
        return named


class Engine:
    """A model under DeepSpeed. `step` trains on one global batch; `losses` returns losses without gradients."""

    @classmethod
    def initialize(
        cls,
        model: nn.Module,
        config: RunConfig,
        sharding: Sharding,
        optimizer: Optimizer | None = None,
        wrapper: Callable[[nn.Module], nn.Module] | None = None,
        warn: Callable[[str], None] = print,
    ) -> "Engine":
        """The engine of a model. All ranks call this together.

        `sharding`: as the model was built with. `optimizer` replaces the optimizer of `config`. `wrapper` wraps the
        model in the module whose losses are trained. None: the model's own losses are trained. `warn` gets lines about
        what doesn't run as configured. Raises FailedError if DeepSpeed doesn't keep weights where they are read, and
        UserError for a parameter that takes no gradient.
        """
        refuse_untrained(model)
        largest = max(one.numel() for one in model.parameters())
        # With gradients DeepSpeed would record how it joins the weights, and keep autograd's nodes of all parameters on
        # the stream of this moment, which a CUDA graph can't capture.
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            optimizer = optimizer or optimizers.build(model, config.optimizer)
            with _without_compiler():
                engine, *_ = deepspeed.initialize(
                    model=model,
                    optimizer=optimizer,
                    config=deepspeed_config(config, sharding, largest),
                )
        for buffer in engine.module.buffers():  # DeepSpeed broadcasts only parameters
            dist.broadcast(buffer, src=0)
        if isinstance(own := deepspeed_private.wrapped(engine), Sharded):
            own.attach(deepspeed_private.flat_buffers(engine), dist.group.WORLD, engine.device)
        check_layout(engine)
        return cls(engine, config, sharding, wrapper or (lambda model: model), warn)

    def __init__(
        self,
        engine: DeepSpeedEngine,
        config: RunConfig,
        sharding: Sharding,
        wrapper: Callable[[nn.Module], nn.Module],
        warn: Callable[[str], None],
    ):
        self.deepspeed = engine
        self._wrapped = wrapper
        self.config = config
        self.sharding, self._local = sharding, sharding.local
        self.device: torch.device = engine.device
        self.accelerator = deepspeed.accelerator.get_accelerator()
        self.module = cast(Model, engine.module)
        self._sharded = engine.zero_optimization_partition_weights()
        self._same_use: SameUse | None = None
        if not sharding.local and sharding.ranks > 1:
            gathered = gathered_at_once(self.module, config.compute) if self._sharded else []
            self._same_use = SameUse(self.module, gathered, sharding.ranks, ways_to_add_locally(config))
        self._gradients: Gradients = (
            LocalGradients(engine, config.optimizer.gradient_clipping)
            if sharding.local
            else ReducedByDeepSpeed(engine, self._same_use)
        )
        self._trained_model = self._wrapped(self._gradients.model)
        self._graphs = graphed(self._computed, self.module, config, sharding, self.device, warn)
        self._pass: Callable[..., dict[str, Tensor]] = self._graphs or self._computed
        self._trained: set[str] = set()  # names of the losses that have a gradient
        self.learning_rate = 0.0
        """The learning rate of the last step, of parameter groups that don't set their own."""
        self.applied = False
        """True if the last step changed the weights: a step without a finite gradient is skipped."""

    def step(
        self,
        step: int,
        row_offsets: Sequence[int],
        batches: list[Batch],
        votes: Mapping[str, bool] | None = None,
        before_update: Callable[[], None] | None = None,
    ) -> Outcome:
        """Trains on this rank's micro-batches of `step`. `row_offsets`: the positions of their first rows in the
        stream. `before_update`: called once all gradients are reduced, before the weights change.

        Dropout is keyed by (seed, step, first row of the micro-batch): a resumed run draws the same masks, even with
        its micro-batches on other ranks.
        """
        watchdog.mark(step + 1)
        agreed = self._agreed(batches, votes or {})
        counted = agreed["labels"]
        self.learning_rate = set_rates(self.deepspeed.optimizer, self.config, step)
        self.module.begin_step(self.config.run.seed, step)
        sums: dict[str, Tensor] = {}
        for number, (first, batch) in enumerate(zip(row_offsets, batches, strict=True)):
            self._seed_dropout(step, first)
            losses = self._pass(self._inputs(batch), counted, number == 0, number + 1 == len(batches))
            watchdog.mark()
            for name, total in losses.items():
                sums[name] = sums.get(name, 0) + total
        self._gradients.reduce()
        totals = Totals.reduce(losses=sums, used=self._same_use.taken(self.device) if self._same_use else {})
        if before_update:
            before_update()
        self.applied = self._gradients.update()
        watchdog.mark()
        numbers = agreed.read()
        summed = totals.read()
        if self._same_use:
            self._same_use.check(summed["used"])
        of_step = {name: (total, int(_count(numbers["labels"], name))) for name, total in summed["losses"].items()}
        loss = sum(total / max(labels, 1) for name, (total, labels) in of_step.items() if name in self._trained)
        return Outcome(loss, self.applied, {name: ranks > 0 for name, ranks in numbers["votes"].items()}, of_step)

    def counted(self, batches: list[Batch]) -> dict[str, Tensor]:
        """How many labels of each kind count in the global batch, on the device. All ranks call this together."""
        return self._agreed(batches, {})["labels"]

    def replay(self, step: int, first: int, batch: Batch, counted: dict[str, Tensor]) -> None:
        """Computes the gradient of a micro-batch of `step` again, for this rank or another.

        Only hooks on parameters see the gradient, which is neither added to the step's gradient nor reduced. Weights,
        random numbers and times of the step stay as they are. All ranks call this together, between steps. `first`: the
        position of the first row. `counted`: from the method of this name.
        """
        watchdog.mark()
        self._release_graphs()
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            self._seed_dropout(step, first)
            self.module.begin_step(self.config.run.seed, step)
            losses = _summed(self._wrapped(self.module)(**self._inputs(batch)))
            # unlike `backward`, this runs none of DeepSpeed's hooks on accumulated gradients
            torch.autograd.grad(self._loss(losses, counted), [*self.module.parameters()], allow_unused=True)

    def measure(self, batch: Batch) -> None:
        """Computes the gradient of a micro-batch, with the time and the memory that it takes in a step, and discards
        it. All ranks call this together, between steps."""
        self._discard(batch, self.counted([batch]))

    def compile(self, batch: Batch, world: World) -> None:
        """Compiles the layers for micro-batches like `batch` on one rank of each node. The other ranks wait, then find
        the compiled code in the node's cache. All ranks call this together, before the first step.

        Does nothing if layers aren't compiled, or if DeepSpeed reduces gradients: the ranks' passes then meet in
        collectives.
        """
        if not (self._local and compiles(self.config.compute)) or len(world.nodes) == world.size:
            return
        counted = self.counted([batch])
        if world.local_rank == 0:
            self._discard(batch, counted)
        dist.barrier()

    def _discard(self, batch: Batch, counted: dict[str, Tensor]) -> None:
        self._gradients.discard(self._loss(_summed(self.training_losses(self._inputs(batch))), counted))

    def training_losses(self, inputs: Batch) -> Losses:
        """The model's losses in training, with dropout and its wrapper. `inputs`: a micro-batch on the device."""
        return self._trained_model(**inputs)

    @property
    def in_few_shapes(self) -> bool:
        """True if micro-batches should come in few shapes: each shape takes a CUDA graph."""
        return self._graphs is not None

    @torch.no_grad()
    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """The model's losses, fp32, without dropout and wrapper. All ranks must call this together."""
        self._release_graphs()
        with in_evaluation(self.module):
            return self.module(**self._inputs(batch))

    def has_finite_loss(self, batch: Batch) -> bool:
        """True if the losses of a micro-batch are finite on every rank. All ranks must call this together."""
        return bool(min_over_ranks(all(bool(values.isfinite().all()) for values in self.losses(batch).values())))

    @contextlib.contextmanager
    def whole(self) -> Iterator[Model]:
        """Within the block, the model in evaluation mode with all its weights on each rank: the model itself or, at
        stage 3, a copy that shares its gathered weights and has none of DeepSpeed's hooks.

        All ranks enter together. Within the block each rank may run the model by itself, and must not change it.
        """
        self._release_graphs()
        with in_evaluation(self.module):
            if not self._sharded:
                yield self.module
                return
            parameters = list(self.module.parameters())
            with deepspeed.zero.GatheredParameters(parameters, enabled=deepspeed_private.any_is_sharded(parameters)):
                yield whole_copy(self.module)

    @property
    def gradient_norm(self) -> float:
        """L2 norm of the last step's gradient before clipping; infinite if that step was skipped."""
        return self._gradients.norm

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that DeepSpeed's wraps. Its state is by flat buffer."""
        return deepspeed_private.wrapped(self.deepspeed)

    @property
    def own_elements(self) -> int:
        """The number of fp32 weights that this rank updates."""
        buffers = deepspeed_private.flat_buffers(self.deepspeed)
        return sum(fragment.size for buffer in buffers for fragment in buffer.fragments)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state on this rank after a step, with the moving average if there is one."""
        optimizer, kind_of, total = self.config.optimizer, kinds(self.module), 0
        for buffer in deepspeed_private.flat_buffers(self.deepspeed):
            for fragment in buffer.fragments:
                parameter = kind_of[fragment.name], fragment.shape
                total += optimizer.sharded_bytes(*parameter) * fragment.size // math.prod(fragment.shape)
                total += optimizer.whole_state_bytes(*parameter)
        return total

    def flat_buffers(self) -> list[FlatBuffer] | None:
        """The flat fp32 buffers that the optimizer updates on this rank; None if some are on NVMe."""
        buffers = deepspeed_private.flat_buffers(self.deepspeed)
        on_nvme = any(deepspeed_private.swapped(self.deepspeed, number) for number in range(len(buffers)))
        return None if on_nvme else buffers

    def fragments(self) -> Iterator[Fragment]:
        """This rank's fragments of the fp32 weights. A flat buffer on NVMe is loaded while its own are yielded."""
        return deepspeed_private.fragments(self.deepspeed)

    def local_weights(self) -> Iterator[tuple[Tensor, int, bool]] | None:
        """This rank's part of each parameter that the model computes with, in the order of their names: the elements
        (n,), the position of the first of them in the flattened parameter, and whether they are all of it. None if
        some are on NVMe."""
        return deepspeed_private.local_weights(self.deepspeed)

    def time_steps(self, timer: Timer) -> None:
        """Calls `timer` around each part of a step in which this rank computes without waiting for others, from now on.

        These parts are the passes of a micro-batch; if DeepSpeed reduces gradients during the backward pass, the
        forward pass; at stage 3, the forward passes of the modules whose weights are gathered at once.
        """
        if self._local:
            work = self._pass

            def timed(*arguments: Any) -> dict[str, Tensor]:
                timer.begin()
                sums = work(*arguments)
                timer.end()
                return sums

            self._pass = timed
            return
        alone = gathered_at_once(self.module, self.config.compute) if self._sharded else [self._trained_model]
        for module in alone:
            # DeepSpeed's hooks, which wait for a module's weights, run before the first and after the second
            module.register_forward_pre_hook(lambda *_: timer.begin())
            module.register_forward_hook(lambda *_: timer.end(), prepend=True)

    def close(self) -> None:
        """Stops DeepSpeed's threads and removes its hooks, once all ranks have finished."""
        dist.barrier()
        self.deepspeed.destroy()

    def _computed(self, inputs: Batch, counted: dict[str, Tensor], first: bool, last: bool) -> dict[str, Tensor]:
        """Adds the gradient of a micro-batch's part of the loss to the step's gradient; returns the micro-batch's sums
        of losses. Captured, if there are graphs."""
        losses = _summed(self.training_losses(inputs))
        self._trained |= {name for name, total in losses.items() if total.requires_grad}
        self._gradients.add(self._loss(losses, counted), first, last)
        return {name: total.detach().double() for name, total in losses.items()}

    def _release_graphs(self) -> None:
        """Frees the memory of CUDA graphs, for passes without graphs."""
        if self._graphs:
            self._graphs.release()

    def _agreed(self, batches: list[Batch], votes: Mapping[str, bool]) -> Totals:
        """In the table "labels", the number of labels of each kind that count in the global batch; in "votes", the
        number of ranks that give each vote."""
        counts = torch.stack([count_of("label_counts", batch) for batch in batches]).sum(dim=0).to(self.device)
        numbers = to_device(list(votes.values()), self.device, counts.dtype)
        labels = dict(zip(LABELS, counts.unbind(), strict=True))
        return Totals.reduce(labels=labels, votes=dict(zip(votes, numbers.unbind(), strict=True)))

    def _seed_dropout(self, step: int, first: int) -> None:
        """Seeds the dropout of the micro-batch of `step` whose rows begin at the position `first`."""
        torch.manual_seed(hashed(f"{self.config.run.seed}/dropout/{step}/{first}") >> 1)

    def _loss(self, losses: dict[str, Tensor], counted: dict[str, Tensor]) -> Tensor:
        """The micro-batch's part of the loss of the step, from its sums of `losses`, scaled for its gradient."""
        shares = [total / _count(counted, name).clamp(min=1) for name, total in losses.items() if total.requires_grad]
        share = torch.stack(shares).sum()
        # A loss that is not finite can have a finite gradient. NaN makes the gradient NaN, so that all ranks skip it.
        return share * torch.where(torch.isfinite(share), self._gradients.scale, math.nan)

    def _inputs(self, batch: Batch) -> Batch:
        """The tensors of a batch that the model reads, on the device."""
        read = {name: tensor for name, tensor in batch.items() if name not in COUNTS}
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in read.items()}


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Within the block, `torch.compile` returns functions as they are. DeepSpeed imports its own Muon there, which no
    run uses, with functions that `torch.compile` decorates. The decorator would import TorchInductor, in 2 s."""
    before = os.environ.get(_DISABLED)
    os.environ[_DISABLED] = "1"
    try:
        yield
    finally:
        del os.environ[_DISABLED]
        if before is not None:
            os.environ[_DISABLED] = before


@contextlib.contextmanager
def in_evaluation(module: nn.Module) -> Iterator[None]:
    """Within the block, the module in evaluation mode; then each of its parts is in the mode that it was in."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _summed(losses: Losses) -> dict[str, Tensor]:
    return {name: values.sum() for name, values in losses.items()}


def _count(counted: dict[str, Value], name: str) -> Value:
    """The number of labels that a loss is averaged over: the labels of the loss's name, or else the targets."""
    return counted.get(name, counted["labels"])


def set_rates(optimizer: Optimizer, config: RunConfig, step: int) -> float:
    """Sets the learning rate of each parameter group for `step` (from 0); 0 while the group is frozen. Returns the rate
    of groups that don't set their own."""
    factor = config.schedule.factor(step, config.run.max_steps, config.optimizer.learning_rate)
    for group in optimizer.param_groups:
        group["lr"] = group["base_rate"] * factor if step >= group["frozen_until"] else 0.0
    return config.optimizer.learning_rate * factor
