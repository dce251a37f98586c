"""The schema of a run file (YAML). Doesn't import torch: the launcher checks a run file before it starts anything."""

import os
import sys
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from data_pipeline.foundation import paths, stores
from data_pipeline.foundation.config_file import LocalPath, Location, Section
from data_pipeline.objectives.objective import Objective
from data_pipeline.objectives.registry import TrainingObjective
from pretrain.config.batch import BatchSection, Steps
from pretrain.config.deepspeed_keys import DeepSpeedSection
from pretrain.config.evaluation import AnyHookSettings
from pretrain.config.models import AnyModelConfig
from pretrain.config.optimizers import AnyOptimizer, AnySchedule, CosineSchedule

_LONGEST_WAIT = 1e9  # s, 30 years: timers of the system overflow at some hundreds
Seconds = Annotated[float, Field(gt=0, le=_LONGEST_WAIT)]
MLFLOW_FILE = "sqlite:///runs/mlflow.db"
_MOST_WORKERS = 2**10  # threads or processes of a rank: more than a machine has cores


class RunSection(Section):
    """Name, place, seed and length of a run."""

    name: str
    """The run's name in MLflow."""
    directory: LocalPath
    """The run's directory, with its checkpoints, metrics and logs."""
    seed: int = 0
    """Seed of every random choice: weights, dropout, the order of rows, the noise."""
    max_steps: Steps
    """Optimizer steps of the whole run."""
    max_hours: PositiveFloat | None = None
    """Hours since the latest start after which the run saves and stops. null: no limit."""
    expected_hours: PositiveFloat | None = None
    """Hours that all steps are expected to take, as `launch init` estimates them. If the first steps are faster or
    slower by more than half, the run says so. null: no estimate."""
    cpu_threads: Annotated[int, Field(gt=0, le=_MOST_WORKERS)] | None = None
    """Threads of each rank on a CPU. null: OMP_NUM_THREADS, or else cores ÷ ranks. Sums depend on their number in the
    last bit, so fix it for bit-equal runs. Threads that wait spin for a moment: `launch` sets GOMP_SPINCOUNT=1000,
    unless the environment has it or OMP_WAIT_POLICY."""
    bind_cores: bool = True
    """Bind each rank to the cores nearest to its GPU, whose memory is nearest, too. If Linux doesn't know them, or the
    rank may not use them, nothing is bound. No effect on CPU ranks."""


class TrainingCorpus(Section):
    """A corpus to train on."""

    corpus: Location
    """A finished corpus: its directory or fsspec URL."""
    weight: Annotated[PositiveFloat, Field(allow_inf_nan=False)] = 1.0
    """The corpus's part of the rows (or tokens: `weights_of`), relative to the other weights."""


class ValidationCorpus(Section):
    """A held-out corpus."""

    corpus: Location
    """A finished corpus, of which the held-out rows are used: its directory or fsspec URL."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """The corpus's name in the names of its metrics. null: its own name."""
    objective: TrainingObjective | None = None
    """Replaces its objective where it is evaluated, though the run trains with another; the corpus must have been built
    with `apply_at: load`. null: `data.objective`, or else the corpus's own."""


class MixingSection(Section):
    """How large each corpus's part is, by the corpora's sizes (Raffel et al. 2020, section 3.5.2)."""

    limit: PositiveInt | None = None
    """The most rows (or tokens) that a corpus counts for, so that a large one doesn't crowd out the others. null: no
    limit."""
    temperature: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 1.0
    """Parts are proportional to size^(1 / temperature). 1: to the sizes. The higher, the more equal are the parts."""


class CacheSection(Section):
    """The cache for blocks of remote corpora."""

    directory: LocalPath | None = None
    """The directory, which all ranks of a machine share; best on a disk of its own. null: encdec-pretrain-UID under
    $SLURM_TMPDIR, $TMPDIR or /tmp."""
    gigabytes: Annotated[float, Field(gt=0, le=1e9)] = 100.0
    """The largest size of the cache, in gigabytes. 5 % of its disk stay free in any case."""
    wait_seconds: Annotated[float, Field(ge=0, le=_LONGEST_WAIT)] = stores.WAIT_SECONDS
    """Seconds to wait for a store that doesn't answer. Then the run saves and stops with exit code 75."""


class CurriculumStage(Section):
    """The objective of the first steps."""

    until_step: Steps
    """The first step that is no longer part of this entry; steps count from 0."""
    objective: TrainingObjective
    """Replaces the corpora's, which must have been built with `apply_at: load`. If its rows are shorter, and divide the
    corpora's, each row is cut into several: sequences are short at first, and a step has as many tokens."""


class DataSection(Section):
    """The training and validation data."""

    train: Annotated[list[TrainingCorpus], Field(min_length=1)]
    """The corpora to train on."""
    mixing: MixingSection | None = None
    """Multiplies each corpus's weight by its size for training, within a limit and at a temperature. null: the weights
    alone decide."""
    weights_of: Literal["rows", "tokens"] = "rows"
    """The unit that weights divide and sizes are counted in. `rows`: the rows. `tokens`: the tokens, so that a corpus
    of short rows is drawn more often."""
    validation: list[ValidationCorpus] = []
    """The corpora whose held-out rows are evaluated."""
    objective: TrainingObjective | None = None
    """Replaces the objective of the corpora, which must have been built with `apply_at: load`. null: their own."""
    curriculum: list[CurriculumStage] = []
    """Other objectives for the first steps, in order. Held-out rows keep theirs."""
    lanes: Annotated[int, Field(gt=0, le=2**20)] = 64
    """Interleaved readers of an epoch, each of an equal part. More of them shuffle better, and take more memory: each
    loader process caches one block for each."""
    pack: PositiveInt = 1
    """Average number of examples packed into one row; attention doesn't cross examples. More than 1 saves padding where
    lengths differ (UL2, denoising), best on GPUs, whose attention skips other examples. 1: no packing."""
    workers: Annotated[int, Field(ge=0, le=_MOST_WORKERS)] = 2
    """Loader processes of each rank. 0: the rank loads its rows itself."""
    prefetch: Annotated[int, Field(gt=0, le=2**10)] = 4
    """Micro-batches that each loader process prepares ahead."""
    on_damage: Literal["stop", "skip"] = "stop"
    """The reaction to a damaged block. `stop`: the run ends. `skip`: the block's rows get weight 0."""
    cache: CacheSection = CacheSection()
    """The cache for blocks of remote corpora."""

    @model_validator(mode="after")
    def _curriculum_advances(self) -> Self:
        steps = [stage.until_step for stage in self.curriculum]
        if steps != sorted(set(steps)):
            raise ValueError("curriculum: until_step must grow from one entry to the next")
        return self

    def held_out_objective(self, entry: ValidationCorpus) -> Objective | None:
        """The objective with which the rows of `entry` are evaluated; None: their corpus's own."""
        return entry.objective or self.objective

    @property
    def remote(self) -> bool:
        """True if any corpus is at a URL."""
        corpora = [entry.corpus for entry in self.train] + [entry.corpus for entry in self.validation]
        return any("://" in corpus for corpus in corpora)


class ComputeSection(Section):
    """How layers are computed."""

    compile: bool | None = None
    """Apply torch.compile to each layer. null: on GPUs."""
    cuda_graphs: bool = False
    """Capture the forward and backward pass of a micro-batch as a CUDA graph, for each of the first 8 shapes. Widths
    become multiples of 64, so that shapes are few. No GPU has run this yet; `make gpu` compares steps with and without.
    On a CPU it only fills tensors that stay where they are."""
    attention: Literal["auto", "sdpa", "triton", "eager"] = "auto"
    """The kernels of attention. `sdpa`: PyTorch's kernels, with biases and masks as their mask. `triton`: this
    project's kernels, on GPUs. `eager`: two products with a softmax between them. `auto`: on a GPU `triton`, if a check
    at the start finds the results of PyTorch's, else `sdpa`; on a CPU the faster of `sdpa` and `eager`."""
    activation_checkpointing: bool = False
    """Keep only the inputs of layers for the backward pass and recompute the rest: about a third more arithmetic, far
    less memory."""
    tf32: bool = False
    """Round the factors of fp32 matmuls to TF32 on GPUs: 10 bits of mantissa instead of 23, several times as fast."""
    deterministic: bool = False
    """Repeat a run on GPUs to the bit, also after a resume, with slower kernels. A CPU always repeats."""
    kernel_cache: LocalPath | None = None
    """Where Triton and torch.compile keep compiled kernels: a directory on the node's own disk. null: one in the
    system's temporary directory. TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR in the environment come before it."""


def _new_name(policy: Any) -> Any:
    """`go_on`, the name of `continue` in earlier run files, is taken as well."""
    if policy != "go_on":
        return policy
    _tell_new_name()
    return "continue"


@cache
def _tell_new_name() -> None:
    if "RANK" not in os.environ:  # `launch` has told it before its ranks start
        print("warning: checkpoint.on_failure: go_on is called continue now", file=sys.stderr)


class CheckpointSection(Section):
    """When checkpoints are saved, which are kept, and where a new run's weights come from."""

    every_steps: Steps = 1000
    """Steps from one checkpoint to the next. A run also saves at its end."""
    keep_last: PositiveInt = 3
    """How many of the latest checkpoints are kept."""
    keep_every_steps: PositiveInt | None = None
    """Checkpoints of multiples of this many steps are kept as well. null: only the latest are kept."""
    memory_every_steps: PositiveInt | Literal["auto"] | None = "auto"
    """Steps from one checkpoint in the nodes' memory to the next, from which `launch` resumes after a failure. `auto`:
    as few as cost less than 0.2 % of the time, 1000 at most. null: off."""
    on_failure: Annotated[Literal["continue", "stop"], BeforeValidator(_new_name)] = "continue"
    """The reaction to a save that fails, for instance on a full disk. `continue`: training continues until the next
    save. `stop`: the run ends."""
    init_from: LocalPath | None = None
    """Where a new run's weights come from: a checkpoint, a run, or the output of `pretrain import`. null: random
    weights."""


class DistillationSection(Section):
    """A decoder-only model that an encoder-decoder learns prefix LM from, besides the text (Hinton et al. 2015; Zhang
    et al. 2025, T5Gemma).

    At each token of a text, the loss is (1 − w) · cross-entropy + w · T² · KL(p ‖ q), with w the weight and T the
    temperature. p and q are the softmaxes of the teacher's and the model's logits, divided by T. At an EOS token that
    prefix LM has added to a target, the loss is the cross-entropy alone.
    """

    name: Literal["distillation"]
    """The wrapper."""
    teacher: LocalPath
    """The teacher, a decoder_only model with the corpus's tokenizer: a checkpoint, a run, or the output of `pretrain
    import`. Its weights stay as they are."""
    weight: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """The weight of the divergence from the teacher; cross-entropy has the rest. 1: cross-entropy counts at EOS tokens
    alone."""
    temperature: Annotated[PositiveFloat, Field(allow_inf_nan=False)] = 1.0
    """The divisor of the logits of both. Above 1, unlikely ids count for more."""
    top_k: PositiveInt | None = None
    """How many of the teacher's likeliest ids keep their probabilities, which then sum to 1; those of all others become
    0. null: all ids."""


class SpikeSection(Section):
    """Detection of loss spikes."""

    threshold: PositiveFloat = 6.0
    """A loss is a spike if it exceeds the mean of the last steps by more than this many standard deviations."""
    window: Annotated[int, Field(ge=8, le=2**16)] = 128
    """Steps whose losses the mean and the standard deviation are taken from."""
    action: Literal["warn", "rewind"] = "warn"
    """The reaction to a spike. `warn`: the run prints a warning. `rewind`: it restores the latest checkpoint and
    continues with the rows after the spike."""
    max_rewinds: PositiveInt = 3
    """The most rewinds of a run."""


class FaultsSection(Section):
    """When a run counts as broken, and what follows."""

    restarts: NonNegativeInt = 3
    """How often within an hour `launch` starts the ranks again after a failure. It doesn't where that can't help: a
    wrong run file, a full disk, a step that fails again and again."""
    max_skipped_steps: PositiveInt = 20
    """Steps in a row without a finite gradient that end the run."""
    spikes: SpikeSection | None = SpikeSection()
    """Detection of loss spikes. null: off."""
    hang_seconds: Seconds | None = None
    """Seconds without progress of a rank that end the run. null: as long as 20 steps usually take, and at least 120.
    Remote corpora add `data.cache.wait_seconds`."""
    start_seconds: Seconds = 3600.0
    """The same, in seconds, while a rank starts (up to the end of its first step), loads, or any rank compiles. Also
    while it saves or evaluates, if `hang_seconds` is null."""
    dead_rank_seconds: Seconds = 30.0
    """Seconds after one rank has died or failed at which the others are killed."""
    replay_every_steps: PositiveInt | Literal["auto"] | None = "auto"
    """How often a step is recomputed to detect faulty hardware, in steps. `auto`: as often as adds at most 0.2 % to the
    forward and backward passes. null: never."""
    checksum_every_steps: PositiveInt | Literal["auto"] | None = "auto"
    """How often checksums of weights and optimizer state are verified between updates, in steps, to detect memory
    corruption. `auto`: as often as takes at most 0.1 % of the time. null: never, for instance since a callback changes
    weights."""
    straggler_factor: Annotated[float, Field(gt=1.0, allow_inf_nan=False)] | None = 1.3
    """A rank is a straggler if it computes this many times as long as the others. So is one that makes a step as much
    longer by waiting for data. Stragglers are reported within 20 steps. null: off."""


class MlflowSection(Section):
    """Where MLflow stores the run."""

    uri: Annotated[str, AfterValidator(paths.mlflow_uri)] | None = None
    """MLflow's tracking URI. null: `sqlite:///runs/mlflow.db` on one machine; none on several nodes or under SLURM,
    since SQLite needs locks that a common disk may lack."""
    experiment: Annotated[str, Field(min_length=1, max_length=500)] = "encdec-pretrain"
    """The experiment that the run belongs to."""
    parent: Annotated[str, Field(min_length=1)] | None = None
    """The name of a run that MLflow shows this run under, as one of several; created if there is none. null: the run
    stands by itself."""


class AlertsSection(Section):
    """Who is told when something happens to the run."""

    command: Annotated[str, Field(min_length=1)] | None = None
    """A command for the shell. It gets ALERT_RUN, ALERT_EVENT and ALERT_TEXT in its environment. null: none."""
    webhook: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None
    """The environment variable with a URL that gets a POST of JSON with `text`, `run` and `event`, as Slack and
    Mattermost read it. The URL is a secret, and is recorded nowhere. null: none."""
    events: list[Literal["failed", "restarted", "spike", "slow", "disk"]] = [
        "failed", "restarted", "spike", "slow", "disk",
    ]  # fmt: skip
    """The events that are sent: the run has failed for good, its ranks start again after a failure, its loss spikes, it
    is slow, its disk fills."""
    slow_below: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """The share of the usual tokens/s (the median of the last 20 lines of metrics) below which a run is slow."""
    disk_gigabytes: Annotated[float, Field(ge=0, le=1e9)] = 10.0
    """Free gigabytes of the run directory's disk below which the disk fills."""


class TrackingSection(Section):
    """Where metrics go, besides the run's metrics.jsonl."""

    mlflow: MlflowSection | None = MlflowSection()
    """Where MLflow stores the run. null: it isn't sent to MLflow."""
    log_every_steps: PositiveInt = 10
    """Steps from one line of metrics to the next."""
    alerts: AlertsSection | None = None
    """Alerts by a command or a webhook. null: off."""
    system_metrics_seconds: Seconds | None = 10.0
    """Seconds from one sample of each machine's CPU, memory, GPUs, network and disk to the next. null: they aren't
    sampled."""


class TrainerSection(Section):
    """The trainer's work besides training."""

    profile: bool = False
    """Record the operators and kernels of steps 10 to 13 of a start in RUN/profile, for Perfetto. Those of the latest
    start are kept."""


class CallbackSection(Section):
    """A callback of one's own. Further keys are its arguments."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """The class, as package.module:Class."""


class RunConfig(Section):
    """A run file: which model is trained, on which corpora, and how."""

    other_files = {"sources": "this is a corpus file, not a run file; build it with data-pipeline build {}"}

    run: RunSection
    """Name, place, seed and length of the run."""
    model: AnyModelConfig
    """The model."""
    data: DataSection
    """The training and validation data."""
    batch: BatchSection
    """Batch sizes, in rows."""
    optimizer: AnyOptimizer
    """The optimizer and its peak learning rate."""
    schedule: AnySchedule = CosineSchedule()
    """The learning rate over the steps of the run."""
    wrapper: DistillationSection | None = None
    """A wrapper of the model that changes its loss in training. null: off."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """The dtype that the model computes in. The optimizer's parameters and moments are fp32 in any case."""
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    """Keys for DeepSpeed."""
    compute: ComputeSection = ComputeSection()
    """How layers are computed."""
    faults: FaultsSection = FaultsSection()
    """When the run counts as broken."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When checkpoints are saved, which are kept, and where a new run's weights come from."""
    evaluation: list[AnyHookSettings] = []
    """Evaluations during the run, by hooks."""
    trainer: TrainerSection = TrainerSection()
    """The trainer's work besides training."""
    callbacks: list[CallbackSection] = []
    """Callbacks of one's own, called around each step."""
    tracking: TrackingSection = TrackingSection()
    """Where metrics go."""

    def rate_factor(self, step: int) -> float:
        """The learning rate of step `step` (from 0) relative to its peak."""
        return self.schedule.factor(step, self.run.max_steps, self.optimizer.learning_rate)

    @property
    def zero_stage(self) -> int:
        return self.deepspeed.zero_optimization.stage

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        problems = [f"schedule: {problem}" for problem in self.schedule.problems(self.run.max_steps)]
        if any(hook.needs_corpus for hook in self.evaluation) and not self.data.validation:
            problems.append("evaluation: data.validation names no corpus")
        on_nvme = self.deepspeed.zero_optimization.offloaded_to("nvme")
        if self.optimizer.ema_decay is not None and "offload_optimizer" in on_nvme:
            problems.append("optimizer.ema_decay: DeepSpeed keeps no further states on NVMe; set device to cpu or none")
        if problems:
            raise ValueError("\n".join(problems))
        return self
