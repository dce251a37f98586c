"""The schema of a run file (YAML). Doesn't import torch: the launcher checks a run file before it starts anything."""

from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from data_pipeline.base import paths, stores
from data_pipeline.base.config_file import LocalPath, Location, Section
from data_pipeline.corpus.objectives.objective import Objective, TrainingObjective
from pretrain.config.batch import BatchSection, Steps
from pretrain.config.deepspeed_keys import DeepSpeedSection
from pretrain.config.evaluation import AnyHookSettings
from pretrain.config.models import AnyModelConfig
from pretrain.config.optimizers import AnyOptimizer
from pretrain.config.schedules import AnySchedule, CosineSchedule
from pretrain.config.wrappers import WrapperSettings, offered_wrapper

_LONGEST_WAIT = 1e9  # seconds, 30 years; timers of the system overflow after some centuries
Seconds = Annotated[float, Field(gt=0, le=_LONGEST_WAIT)]
MLFLOW_FILE = "sqlite:///runs/mlflow.db"
_MOST_WORKERS = 2**10  # threads or processes of a rank; no machine has more cores


class RunSection(Section):
    """Name, directory, seed and length of the run."""

    gone = {"bind_cores": ([True], "gone; leave it out: a rank is bound to cores that `taskset` leaves to it alone")}

    name: str
    """The run's name in MLflow."""
    directory: LocalPath
    """The directory that the run writes: checkpoints, metrics, logs. It is new, empty, or a run's."""
    seed: int = 0
    """Seed of initial weights, dropout and the order of rows. The noise of objectives, such as masked spans, is seeded
    by the corpus's `seed`."""
    max_steps: Steps
    """Number of optimizer steps of the whole run."""
    max_hours: PositiveFloat | None = None
    """The run saves and stops this many hours after its latest start. null: no limit."""
    expected_hours: PositiveFloat | None = None
    """Expected duration of all steps, in hours; `launch init` writes its estimate here. The run prints a line if its
    first steps are faster or slower than that by more than half. null: no estimate."""
    cpu_threads: Annotated[int, Field(gt=0, le=_MOST_WORKERS)] | None = None
    """PyTorch's CPU threads on each rank. null: OMP_NUM_THREADS, or else cores ÷ ranks. The number of threads changes
    sums in the last bit, so fix it for bit-equal runs. Without GPUs, the spinning of OpenMP's threads is
    limited (GOMP_SPINCOUNT=1000), unless the environment sets GOMP_SPINCOUNT or OMP_WAIT_POLICY."""


class TrainingCorpus(Section):
    """A corpus to train on."""

    corpus: Location
    """A finished corpus: its directory or fsspec URL."""
    weight: Annotated[PositiveFloat, Field(allow_inf_nan=False)] = 1.0
    """The corpus's share of the training rows, relative to the other weights."""


class ValidationCorpus(Section):
    """A corpus whose held-out rows are evaluated."""

    corpus: Location
    """A finished corpus: its directory or fsspec URL. Only its held-out rows are read."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """The corpus's name in metrics. null: the name in its corpus file."""
    objective: TrainingObjective | None = None
    """Evaluate this corpus with another objective. A corpus may be listed once for each of several objectives, under
    different names. The corpus must have been built with `apply_at: load`. null:
    `data.objective`, or else the corpus's own objective."""


class MixingSection(Section):
    """Mixing rates from the sizes of the corpora (Raffel et al. 2020, section 3.5.2)."""

    limit: PositiveInt | None = None
    """Cap on a corpus's size, in rows, when mixing rates are computed (T5's K). null: no cap."""
    temperature: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 1.0
    """A corpus's rate is proportional to size^(1 / temperature). 1: to its size. Higher: more equal rates."""


class CacheSection(Section):
    """The cache for blocks of remote corpora."""

    directory: LocalPath | None = None
    """Where blocks are cached; all ranks of a machine share this directory. Best on a disk of its own. null:
    encdec-pretrain-UID under $SLURM_TMPDIR, $TMPDIR or /tmp."""
    gigabytes: Annotated[float, Field(gt=0, le=1e9)] = 100.0
    """Maximum size of the cache, in gigabytes. At least 5 % of its disk stay free in any case."""
    wait_seconds: Annotated[float, Field(ge=0, le=_LONGEST_WAIT)] = stores.WAIT_SECONDS
    """How long to wait for an object store that doesn't answer, in seconds. After that the run saves and stops with
    exit code 75."""


class CurriculumStage(Section):
    """Another objective for the first steps."""

    until_step: Steps
    """The first step after this entry; steps count from 0."""
    objective: TrainingObjective
    """The objective until then. The corpora must have been built with `apply_at: load`. If this objective has shorter
    rows, and their length divides the corpora's, each row is cut into several: sequences are short at first, and a step
    has as many tokens."""


class DataSection(Section):
    """The training and validation data."""

    gone = {
        "weights_of": (
            ["rows"],
            "gone; weights are shares of the rows: divide a share of the tokens by the corpus's mean tokens per row",
        )
    }

    train: Annotated[list[TrainingCorpus], Field(min_length=1)]
    """The corpora to train on."""
    mixing: MixingSection | None = None
    """Multiply each weight by a rate that follows from the corpus's size. null: the weights alone decide."""
    validation: list[ValidationCorpus] = []
    """The corpora whose held-out rows are evaluated."""
    objective: TrainingObjective | None = None
    """The training objective. It replaces the objectives of the corpora, which must have been built with `apply_at:
    load`. null: the objective of each corpus."""
    curriculum: list[CurriculumStage] = []
    """Other objectives for the first steps, in order. Evaluation doesn't use them."""
    lanes: Annotated[int, Field(gt=0, le=2**20)] = 64
    """Number of interleaved readers of an epoch; each reads an equal part. More lanes shuffle better and take more
    memory: a loader process caches one block per lane."""
    packing_ratio: PositiveInt = 1
    """Average number of examples packed into one row; attention doesn't cross examples. More than 1 saves padding where
    lengths differ (UL2, denoising), best on GPUs, whose attention skips other examples. 1: no packing. Earlier name:
    `pack`."""
    workers: Annotated[int, Field(ge=0, le=_MOST_WORKERS)] = 2
    """Loader processes per rank. 0: the rank loads its rows itself."""
    prefetch_factor: Annotated[int, Field(gt=0, le=2**10)] = 4
    """Micro-batches that each loader process prepares in advance. Earlier name: `prefetch`."""
    on_damage: Literal["stop", "skip"] = "stop"
    """What happens at a damaged block. `stop`: the run ends. `skip`: the rows of the block get weight 0."""
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

    gone = {"kernel_cache": ([None], "gone; set TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR for the ranks")}

    compile: bool | None = None
    """Compile each layer with torch.compile. null: on GPUs only."""
    cuda_graphs: bool = False
    """Capture the forward and backward pass of a micro-batch as a CUDA graph, one for each of the first 8 shapes.
    Widths are padded to multiples of 64, so that shapes are few. One H200 has run this: a step of T5 v1.1 base took 2 %
    less time. On a CPU no graph is captured: inputs are only copied into static tensors."""
    attention: Literal["auto", "sdpa", "triton", "eager"] = "auto"
    """The attention backend. `sdpa`: PyTorch's scaled_dot_product_attention, with biases and masks as its mask.
    `triton`: this project's kernels, on GPUs. `eager`: two matmuls with a softmax between them. `auto`: on a GPU
    `triton` if its results agree with PyTorch's at the start, else `sdpa`; on a CPU the faster of `sdpa` and
    `eager`."""
    activation_checkpointing: bool = False
    """Keep only the inputs of layers for the backward pass and recompute the rest: about a third more arithmetic, far
    less memory."""
    tf32: bool = False
    """Run fp32 matmuls in TF32 on GPUs: 10 bits of mantissa instead of 23, several times as fast."""
    deterministic: bool = False
    """Make runs on GPUs repeat to the bit, also after a resume, with slower kernels. Runs on CPUs always repeat."""


class CheckpointSection(Section):
    """When checkpoints are saved, which are kept, and where a new run's weights come from."""

    gone = {
        "memory_every_steps": (
            ["auto", None],
            "gone; leave it out: `launch` resumes from the latest checkpoint on disk (checkpoint.every_steps)",
        )
    }

    every_steps: Steps = 1000
    """Steps between checkpoints. A run also saves at its end."""
    keep_last: PositiveInt = 3
    """Number of the latest checkpoints to keep."""
    keep_every_steps: PositiveInt | None = None
    """Also keep the checkpoints at multiples of this many steps. null: keep the latest only."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What happens when a save fails, for instance on a full disk. `continue`: training continues until the next save.
    `stop`: the run ends. Without memory for a copy of its state, a run ends in both cases."""
    init_from: LocalPath | None = None
    """Where a new run's weights come from: a checkpoint, a run, or the output of `pretrain import`. null: random
    initialization."""


class SpikeSection(Section):
    """Detection of loss spikes."""

    threshold: PositiveFloat = 6.0
    """A loss is a spike if it exceeds the mean of the last steps by more than this many standard deviations."""
    window: Annotated[int, Field(ge=8, le=2**16)] = 128
    """Number of steps that the mean and the standard deviation are taken over. A loss that stays high for as many steps
    is the new level. Each stage of `data.curriculum` begins a window of its own."""
    action: Literal["warn", "rewind"] = "warn"
    """What happens at a spike. `warn`: the run prints a warning. `rewind`: the run also restores the latest checkpoint
    and continues with the rows after the spike."""
    max_rewinds: PositiveInt = 3
    """Maximum number of rewinds in a run; at further spikes the run only warns."""


_IN_FAULT_HUNTING = "gone; leave it out, or name the callback fault_hunting:{} (examples/fault_hunting)"


class FaultsSection(Section):
    """When a run counts as failed, and what follows."""

    gone = {
        "replay_every_steps": (["auto", None], _IN_FAULT_HUNTING.format("Replay")),
        "checksum_every_steps": (["auto", None], _IN_FAULT_HUNTING.format("MemoryChecksums")),
        "straggler_factor": ([1.3, None], _IN_FAULT_HUNTING.format("Stragglers")),
    }

    max_restarts: NonNegativeInt = 3
    """How often within an hour `launch` restarts the ranks after a failure. `launch` doesn't restart them where that
    can't help: a wrong run file, a full disk, a step that fails again and again. 0: never. Earlier name: `restarts`."""
    max_skipped_steps: PositiveInt = 20
    """The run ends after this many steps in a row with a non-finite gradient. DeepSpeed skips the update of such a
    step."""
    spikes: SpikeSection | None = SpikeSection()
    """Detection of loss spikes. null: off."""
    hang_timeout_seconds: Seconds | None = None
    """The run ends if a rank makes no progress for this many seconds. null: 20 times the median time of a step, at
    least 120 s. Remote corpora add `data.cache.wait_seconds`. Earlier name: `hang_seconds`."""
    start_timeout_seconds: Seconds = 3600.0
    """The timeout in seconds while a rank starts (up to the end of its first step), loads, or any rank compiles. If
    `hang_timeout_seconds` is null, also until 20 steps are timed, and while the rank saves or evaluates. Earlier name:
    `start_seconds`."""
    dead_rank_seconds: Seconds = 30.0
    """After one rank has died or failed, the others are killed after this many seconds."""


class MlflowSection(Section):
    """Where MLflow stores the run."""

    gone = {"parent": ([None], "gone; runs are grouped by tracking.mlflow.experiment")}

    uri: Annotated[str, AfterValidator(paths.mlflow_uri)] | None = None
    """MLflow's tracking URI. null: `sqlite:///runs/mlflow.db` on one machine. On several nodes or under SLURM null
    turns MLflow off: SQLite needs locks that a shared disk may lack."""
    experiment: Annotated[str, Field(min_length=1, max_length=500)] = "encdec-pretrain"
    """The run's experiment in MLflow."""
    log_system_metrics: bool = True
    """MLflow samples each machine's CPU, memory, GPUs, network and disk every 10 s. false: off."""


class TrackingSection(Section):
    """Where metrics go, besides the run's metrics.jsonl."""

    gone = {
        "system_metrics_seconds": ([10.0], "gone; tracking.mlflow.log_system_metrics: false turns system metrics off"),
        "alerts": ([None], 'gone; callbacks: [{name: "alerts:Alerts", …}] takes its keys (examples/alerts)'),
    }

    mlflow: MlflowSection | None = MlflowSection()
    """Where MLflow stores the run. null: MLflow is off."""
    log_every_steps: PositiveInt = 10
    """Steps between log lines."""


class TrainerSection(Section):
    """Further options of the trainer."""

    profile: bool = False
    """Profile steps 10 to 13 after each start, and write a trace of operators and kernels to RUN/profile, for Perfetto.
    Only the traces of the latest start are kept."""


class CallbackSection(Section):
    """A callback of your own. Further keys are its arguments."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """The callback's class, as package.module:Class."""


class RunConfig(Section):
    """A run file: which model is trained, on which corpora, and how."""

    renamed = {
        "checkpoint.on_failure: go_on": "continue",
        "data.pack": "packing_ratio",
        "data.prefetch": "prefetch_factor",
        "faults.hang_seconds": "hang_timeout_seconds",
        "faults.restarts": "max_restarts",
        "faults.start_seconds": "start_timeout_seconds",
    }
    elsewhere = {
        "batch_size": "batch.global_batch_size",
        "lr": "optimizer.learning_rate",
        "max_grad_norm": "optimizer.gradient_clipping",
        "num_workers": "data.workers",
        "output_dir": "run.directory",
        "per_device_train_batch_size": "batch.micro_batch_size",
        "steps": "run.max_steps",
        "total_steps": "run.max_steps",
        "train_batch_size": "batch.global_batch_size",
    }
    other_files = {"sources": "this is a corpus file, not a run file; build it with data-pipeline build {}"}

    run: RunSection
    """Name, directory, seed and length of the run."""
    model: AnyModelConfig
    """The model."""
    data: DataSection
    """The training and validation data."""
    batch: BatchSection
    """Batch sizes, in rows."""
    optimizer: AnyOptimizer
    """The optimizer and its peak learning rate."""
    schedule: AnySchedule = CosineSchedule()
    """The learning rate schedule."""
    wrapper: Annotated[SerializeAsAny[WrapperSettings], BeforeValidator(offered_wrapper)] | None = None
    """A wrapper of the model, of an installed package, that changes the training loss. null: off."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """The dtype that the model computes in; fp32 on a CPU that doesn't multiply bf16. The optimizer keeps fp32 master
    weights and fp32 moments in any case."""
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    """Keys that are passed on to DeepSpeed."""
    compute: ComputeSection = ComputeSection()
    """How layers are computed."""
    faults: FaultsSection = FaultsSection()
    """When the run counts as failed, and what follows."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When checkpoints are saved, which are kept, and where a new run's weights come from."""
    evaluation: list[AnyHookSettings] = []
    """Evaluations during the run, each by a hook."""
    trainer: TrainerSection = TrainerSection()
    """Further options of the trainer."""
    callbacks: list[CallbackSection] = []
    """Callbacks of your own, which are called around each step."""
    tracking: TrackingSection = TrackingSection()
    """Where metrics go, besides the run's metrics.jsonl."""

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
            problems.append(
                "optimizer.ema_decay: DeepSpeed can't keep the moving average on NVMe; set device to cpu or none"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self
