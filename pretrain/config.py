"""The schema of a run file (YAML). Doesn't import torch: the launcher checks a run file before it starts anything."""

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from data_pipeline.foundation import paths
from data_pipeline.foundation.config_file import LocalPath, Location, Section
from data_pipeline.loading import mixing
from data_pipeline.objectives import AnyObjective
from pretrain import deepspeed_keys
from pretrain.models import AnyModelConfig
from pretrain.optimizers import schedules
from pretrain.optimizers.config import AnyOptimizer, AnySchedule, CosineSchedule


class RunSection(Section):
    """Name, place, seed and length of a run.

    `max_hours`: the run saves and stops when this time has passed since its latest start. `cpu_threads`: threads of
    each rank on a CPU (null: cores ÷ ranks); sums depend on it in their last bit, so fix it for bit-equal runs.
    """

    name: str
    directory: LocalPath
    seed: int = 0
    max_steps: PositiveInt
    max_hours: PositiveFloat | None = None
    cpu_threads: PositiveInt | None = None


class TrainingCorpus(Section):
    corpus: Location
    weight: Annotated[PositiveFloat, Field(allow_inf_nan=False)] = 1.0


class ValidationCorpus(Section):
    """A held-out corpus. `name` appears in the names of its metrics (null: the corpus's own name)."""

    corpus: Location
    name: Annotated[str, Field(min_length=1)] | None = None


class CacheSection(Section):
    """The cache for blocks of remote corpora. All ranks of a machine share `directory` (null: encdec-pretrain under
    $XDG_CACHE_HOME or ~/.cache). `gigabytes` is its maximum size."""

    directory: LocalPath | None = None
    gigabytes: PositiveFloat = 100.0


class DataSection(Section):
    """The training and validation data. A corpus is a directory or an fsspec URL.

    `objective` replaces the corpora's own objective; they must have been built with `apply_at: load`. Each rank has
    `workers` loader processes, and each of these prepares `prefetch` micro-batches ahead. At a damaged block
    `on_damage: stop` ends the run, and `skip` gives its rows weight 0.
    """

    train: Annotated[list[TrainingCorpus], Field(min_length=1)]
    validation: list[ValidationCorpus] = []
    objective: AnyObjective | None = None
    lanes: PositiveInt = 64
    workers: NonNegativeInt = 2
    prefetch: PositiveInt = 4
    on_damage: Literal["stop", "skip"] = "stop"
    cache: CacheSection = CacheSection()

    @field_validator("train")
    @classmethod
    def _every_corpus_gets_rows(cls, train: list[TrainingCorpus]) -> list[TrainingCorpus]:
        weights = [entry.weight for entry in train]
        if light := mixing.too_light(weights):
            too_light = ", ".join(f"{weights[number]:g} for {train[number].corpus}" for number in light)
            raise ValueError(
                f"weight: {too_light}, out of {sum(weights):g} in total, gives less than one row in a million; "
                "leave the corpus out"
            )
        return train


class RampUp(Section):
    """Each step before `until_step` takes `global_batch_size` rows."""

    until_step: PositiveInt
    global_batch_size: PositiveInt


class BatchSection(Section):
    """Batch sizes in rows: `global_batch_size` per step over all ranks, `micro_batch_size` per forward pass on a rank.

    `micro_batch_size` may also be `auto`, the largest that fits into memory, or null, a rank's whole share.
    `ramp_up` lists smaller global batches for the first steps, in order.
    """

    global_batch_size: PositiveInt
    micro_batch_size: PositiveInt | Literal["auto"] | None = None
    ramp_up: list[RampUp] = []

    def rows(self, step: int) -> int:
        """Rows of step `step` (from 0) over all ranks."""
        for ramp in self.ramp_up:
            if step < ramp.until_step:
                return ramp.global_batch_size
        return self.global_batch_size

    @model_validator(mode="after")
    def _ramp_goes_up(self) -> "BatchSection":
        steps = [ramp.until_step for ramp in self.ramp_up]
        sizes = [*(ramp.global_batch_size for ramp in self.ramp_up), self.global_batch_size]
        if steps != sorted(set(steps)) or sizes != sorted(sizes):
            raise ValueError("ramp_up: until_step and global_batch_size must grow from one entry to the next")
        return self


class ZeroSection(Section):
    """DeepSpeed's `zero_optimization`: the stage, and any other of its keys that pretrain/deepspeed_keys.py allows."""

    model_config = ConfigDict(extra="allow")

    stage: Annotated[int, Field(strict=True)] = 2


class DeepSpeedSection(Section):
    """Any key of DeepSpeed's config that pretrain/deepspeed_keys.py allows."""

    model_config = ConfigDict(extra="allow")

    zero_optimization: ZeroSection = ZeroSection()

    @model_validator(mode="after")
    def _agrees(self) -> "DeepSpeedSection":
        if found := deepspeed_keys.problems({**dict(self), "zero_optimization": dict(self.zero_optimization)}):
            raise ValueError("\n".join(found))
        return self


class ComputeSection(Section):
    """`compile` applies torch.compile to each layer. `activation_checkpointing` keeps only the inputs of layers for the
    backward pass and recomputes the rest: about a third more arithmetic, far less memory."""

    compile: bool = False
    activation_checkpointing: bool = False


class CheckpointSection(Section):
    """A run saves a checkpoint every `every_steps` steps and at its end.

    It keeps the last `keep_last` checkpoints and those of every `keep_every_steps` steps. When a save fails, on a full
    disk for instance, `on_failure: go_on` trains on until the next save, and `stop` ends the run. A new run starts from
    the weights in `init_from`: a checkpoint, a run, or the output of `pretrain import` (null: random weights).
    """

    every_steps: PositiveInt = 1000
    keep_last: PositiveInt = 3
    keep_every_steps: PositiveInt | None = None
    on_failure: Literal["go_on", "stop"] = "go_on"
    init_from: LocalPath | None = None


class SpikeSection(Section):
    """A loss is a spike if it exceeds the mean of the last `window` steps by more than `threshold` standard deviations.

    `action: warn` only prints a warning. `rewind` restores the latest checkpoint and continues with the rows after
    the spike, at most `max_rewinds` times in a run.
    """

    threshold: PositiveFloat = 6.0
    window: Annotated[int, Field(ge=8)] = 128
    action: Literal["warn", "rewind"] = "warn"
    max_rewinds: PositiveInt = 3


class FaultsSection(Section):
    """When a run counts as broken.

    `max_skipped_steps` steps in a row without a finite gradient end the run. `spikes: null` turns the detection of
    spikes off. A rank that makes no progress for `hang_seconds` ends the run; while it starts, up to the end of its
    first step, or compiles, the limit is `start_seconds`. After one rank has died, the others are killed after
    `dead_rank_seconds`.
    """

    max_skipped_steps: PositiveInt = 20
    spikes: SpikeSection | None = SpikeSection()
    hang_seconds: PositiveFloat = 1800.0
    start_seconds: PositiveFloat = 3600.0
    dead_rank_seconds: PositiveFloat = 30.0


class ValidationLossHook(Section):
    hook: Literal["validation_loss"]
    every_steps: PositiveInt = 500


class MlflowSection(Section):
    uri: Annotated[str, AfterValidator(paths.mlflow_uri)] = "sqlite:///runs/mlflow.db"
    experiment: str = "encdec-pretrain"


class TrackingSection(Section):
    """Metrics always go to the run's metrics.jsonl, and to MLflow unless `mlflow` is null."""

    mlflow: MlflowSection | None = MlflowSection()
    log_every_steps: PositiveInt = 10


class RunConfig(Section):
    run: RunSection
    model: AnyModelConfig
    data: DataSection
    batch: BatchSection
    optimizer: AnyOptimizer
    schedule: AnySchedule = CosineSchedule()
    precision: Literal["bf16", "fp32"] = "bf16"
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    compute: ComputeSection = ComputeSection()
    faults: FaultsSection = FaultsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: list[ValidationLossHook] = []
    tracking: TrackingSection = TrackingSection()

    def rate_factor(self, step: int) -> float:
        """The learning rate of step `step` (from 0) relative to its peak."""
        return schedules.factor(self.optimizer, self.schedule, self.run.max_steps, step)

    def learning_rate(self, step: int) -> float:
        """The learning rate of step `step` (from 0), for parameters whose group doesn't set its own."""
        return self.optimizer.learning_rate * self.rate_factor(step)

    @property
    def zero_stage(self) -> int:
        return self.deepspeed.zero_optimization.stage

    @model_validator(mode="after")
    def _validation_has_data(self) -> "RunConfig":
        if self.evaluation and not self.data.validation:
            raise ValueError("evaluation: data.validation names no corpus")
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> "RunConfig":
        if problems := self.schedule.problems(self.run.max_steps):
            raise ValueError("; ".join(f"schedule: {problem}" for problem in problems))
        return self
