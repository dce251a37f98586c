"""The needs of a run on GPUs of one kind: the largest micro-batch that fits, the time at a stated MFU, and the cost."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from data_pipeline.config import CorpusConfig
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.manifest import corpus_file_of
from data_pipeline.foundation import paths
from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.stages.tokenizer import expected
from pretrain import models
from pretrain.config import RunConfig
from pretrain.config.batch import BatchPlan
from pretrain.config.models import EncoderOnlyConfig
from pretrain.hardware.devices import CPU, Gpu
from pretrain.models.flops import Sizes, flops_by_part
from pretrain.tools.plan.activations import Rows, activations
from pretrain.tools.plan.zero_memory import Offload, Parameters, Setting, States, states
from pretrain.trainer.validate import with_tokenizer_ids
from pretrain.zero.memory import SAFE

GIB = 2**30
RESERVED = 1.5 * GIB  # of a GPU, for CUDA, its libraries' workspaces and NCCL's buffers
_MASKED = 0.15  # the share of tokens that BERT predicts


def resolve_rows(
    config: RunConfig, path: Path, inputs: int | None, targets: int | None
) -> tuple[RunConfig, Rows, str | None]:
    """`config` with the vocabulary of its model, one of its rows at full length, and the corpus file they are from, if
    they are from one.

    Lengths come from the options `inputs` and `targets`, else from the run file's objective, else from its first corpus
    if that is a local directory, else from the corpus file that builds it. Raises UserError for what none of them says.
    """
    directory, model, taken = Path(config.data.train[0].corpus), config.model, None
    corpus = open_corpus(str(directory)) if directory.is_dir() else None
    source = None if corpus else corpus_file_of(directory, [path.parent])
    planned = load(paths.config(source), [], CorpusConfig) if source else None
    objective = config.data.objective or (corpus.objective if corpus else planned and planned.rows.objective)
    problems: list[str] = []
    if corpus:
        model, problems = with_tokenizer_ids(model, corpus)
    elif model.vocab_size is None and planned and planned.tokenizer.path is None:
        model, taken = model.model_copy(update={"vocab_size": expected(planned.tokenizer).size}), source
    elif model.vocab_size is None:
        problems.append(f"model.vocab_size: not set, and {directory} isn't there to take it from; set it")
    if config.data.objective is None and not (inputs and targets):
        taken = taken or source
    shape = objective.shape if objective else (None, None)
    inputs, targets = inputs or shape[0], targets or shape[1]
    if "span_corruption" not in models.FAMILIES[model.family].objectives:
        targets = inputs
    if inputs is None or targets is None:
        problems.append(
            f"data.objective: not set, and {directory} isn't there to take it from; "
            "give --inputs and --targets, the tokens of a row (T5's are 512 and 114)"
        )
    elif model.longest_sequence is not None and max(inputs, targets) > model.longest_sequence:
        problems.append(f"model: takes sequences of {model.longest_sequence} tokens at most, got {inputs}, {targets}")
    if problems or inputs is None or targets is None:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    share = getattr(objective, "mask_ratio", _MASKED) if isinstance(model, EncoderOnlyConfig) else 1
    return config.model_copy(update={"model": model}), Rows(1, inputs, targets, math.ceil(share * targets)), taken


@dataclass(frozen=True)
class Option:
    """A setting on a number of GPUs. `rows` is the largest micro-batch that fits; 0: not even one row does. `one_row`
    and `peak` are bytes, of a row's activations and of all; `seconds` are those of a step in which no GPU waits."""

    setting: Setting
    states: States
    one_row: int
    rows: int
    peak: int
    seconds: float
    hours: float
    cost: float


@dataclass
class Planner:
    """Finds what fits on GPUs of one kind, how long a run takes there, and what it costs.

    - `rows`: one row of the run. `price`: dollars for a GPU and an hour.
    - `mfu`: the share of its peak that a GPU reaches.
    - `corpus_file`: the one that row or vocabulary are from, if the corpus isn't built.
    """

    config: RunConfig
    rows: Rows
    gpu_name: str
    gpu: Gpu
    mfu: float
    price: float
    corpus_file: str | None = None

    def __post_init__(self) -> None:
        batch = self.config.batch.model_copy(update={"micro_batch_size": None})  # a plan looks for the largest
        self.config = self.config.model_copy(update={"batch": batch})
        model, row = models.outline(self.config.model), self.rows
        self.parameters = Parameters.of(model, self.config)
        self.flops = flops_by_part(
            model, Sizes.of_example(row.inputs, row.targets if model.decoder_reads_targets else row.predicted)
        )
        self.usable = SAFE * (self.gpu.memory * GIB - RESERVED)
        self.on_cpu = self.gpu_name == CPU

    def options(self, gpus: int) -> list[Option]:
        """Every stage with and without recomputing, on `gpus` GPUs; each offloads what the run file offloads. Raises
        UserError if the GPUs can't share the run's batches."""
        if problems := BatchPlan(self.config.batch, gpus).problems():
            raise UserError("\n".join(f"--gpus: {problem}; choose {self._near(gpus)}" for problem in problems))
        zero = self.config.deepspeed.zero_optimization
        moved = {*zero.offloaded_to("cpu"), *zero.offloaded_to("nvme")}
        sharded: Offload = "optimizer and weights" if "offload_param" in moved else "optimizer"
        offload: dict[int, Offload] = {1: "optimizer", 2: "optimizer", 3: sharded} if moved else {}
        return [
            self._option(Setting(stage, offload.get(stage, "none"), checkpointing), gpus)
            for stage in (1, 2, 3)
            for checkpointing in (False, True)
        ]

    def own(self, options: list[Option]) -> Option:
        """The setting of the run file."""
        own = self.config.zero_stage, self.config.compute.activation_checkpointing
        return next(one for one in options if (one.setting.stage, one.setting.checkpointing) == own)

    def activations(self, rows: int, checkpointing: bool) -> int:
        """Bytes at the peak of a pass over a micro-batch of `rows`."""
        compute, on_gpu, batch = self.config.compute, not self.on_cpu, replace(self.rows, count=rows)
        model, precision = self.config.model, self.config.precision
        return activations(model, batch, precision, checkpointing, on_gpu, on_gpu, compute.attention).peak

    def _option(self, setting: Setting, gpus: int) -> Option:
        config, checkpointing = self.config, setting.checkpointing
        held = states(self.parameters, setting, gpus, config.precision, config.deepspeed.zero_optimization)
        share = BatchPlan(config.batch, gpus).micro_batch

        def peak(rows: int) -> int:
            return held.peak(self.activations(rows, checkpointing))

        sizes = (rows for rows in range(share, 0, -1) if share % rows == 0)
        rows = next((rows for rows in sizes if peak(rows) <= self.usable), 0)
        of_row = sum(self.flops.values()) + checkpointing * (sum(self.flops.values()) - self.flops["head"]) / 3
        rate = gpus * self.mfu * self.gpu.flops("bf16" if config.precision == "bf16" else "fp32")
        seconds = config.batch.global_batch_size * of_row / rate
        hours = self._steps() * seconds / 3600
        one_row = self.activations(1, checkpointing)
        return Option(setting, held, one_row, rows, peak(rows or 1), seconds, hours, hours * gpus * self.price)

    def _steps(self) -> float:
        """The run's steps, as steps of its full batch."""
        batch, steps = self.config.batch, self.config.run.max_steps
        last = min(batch.ramp_up[-1].until_step if batch.ramp_up else 0, steps)
        return sum(batch.rows(number) for number in range(last)) / batch.global_batch_size + steps - last

    def _near(self, gpus: int) -> str:
        """The nearest numbers of GPUs that can share the batches."""
        batch = self.config.batch
        sharing = [one for one in range(1, batch.global_batch_size + 1) if not BatchPlan(batch, one).problems()]
        below = [one for one in sharing if one < gpus][-1:]
        return " or ".join(map(str, below + [one for one in sharing if one > gpus][:1]))
