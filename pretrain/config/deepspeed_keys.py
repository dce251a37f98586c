"""The keys of DeepSpeed's config that a run file may set under `deepspeed`.

Keys that DeepSpeed understands are passed on. Refused are keys that contradict the rest of the run file, keys that
DeepSpeed accepts but ignores, and keys that it gets wrong. This module doesn't import DeepSpeed, which takes seconds.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_serializer, model_validator
from pydantic import SerializerFunctionWrapHandler as Serializer

from data_pipeline.foundation.config_file import LocalPath, Section

Options = dict[str, Any] | None
_NEED_LOG = {"comms_logger", "dump_state", "memory_breakdown", "wall_clock_breakdown"}
_SILENCED = "goes to DeepSpeed's log, which shows only errors; set log_level: info as well"
_BY_REASON = {
    "set batch.global_batch_size and batch.micro_batch_size instead":
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation",
    "set optimizer.gradient_clipping instead": "gradient_clipping",
    "set optimizer instead": "optimizer zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    "set schedule instead": "scheduler",
    "set precision instead": "bf16 bfloat16 torch_autocast amp",
    "not supported: T5 diverges in fp16; set precision: bf16": "fp16",
    "gradients are always accumulated and reduced in fp32": "data_types communication_data_type",
    "every rank runs all layers of the model; shard it with zero_optimization":
        "sequence_parallel_size seq_parallel_communication_data_type tensor_parallel pipeline expert_parallel "
        "use_data_before_expert_parallelism",
    "a step's loss is the mean over all its tokens, which determines how gradients are scaled":
        "prescale_gradients gradient_predivide_factor gradient_allreduce_op",
    "DeepSpeed ignores it; set zero_optimization.allgather_partitions": "disable_allgather",
    "set tracking.log_every_steps instead": "steps_per_print",
    "set compute.activation_checkpointing instead": "activation_checkpointing",
    "set compute.compile instead": "compile",
    "set checkpoint instead": "checkpoint datastates_ckpt nebula",
    "set data instead": "dataloader_drop_last data_efficiency curriculum_learning",
    "set batch.micro_batch_size: auto instead": "autotuning",
    "set model.vocab_size instead": "vocabulary_size",
    "isn't for pretraining": "hybrid_engine weight_quantization",
    "DeepSpeed has removed it": "elasticity compression_training eigenvalue graph_harvesting progressive_layer_drop "
        "quantize_training sparse_attention sparse_gradients",
}  # fmt: skip
_ZERO_BY_REASON = {
    "DeepSpeed's map of fragments is wrong with it": "round_robin_gradients",
    "the section checkpoint decides how checkpoints are written": "elastic_checkpoint load_from_fp32_weights "
        "pipeline_loading_checkpoint stage3_gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save",
    "DeepSpeed ignores it": "legacy_stage1",
    "a parameter without a gradient in a step always counts as having a zero gradient": "ignore_unused_parameters",
    "without the norm of the gradient no step with a non-finite one would be skipped": "compute_grad_norm",
    "set offload_optimizer or offload_param instead": "cpu_offload cpu_offload_param cpu_offload_use_pin_memory",
    "is for optimizers of DeepSpeed's own": "zenflow save_muon_momentum_buffer_in_memory",
    "follows from compute.compile, with which each layer is gathered as one": "leaf_module",
    "gradients are always reduced in fp32": "zero_quantized_gradients",
    "all weights are trained": "zero_quantized_nontrainable_weights",
    "DeepSpeed has removed it; set zero_hpz_partition_size": "mics_shard_size mics_hierarchical_params_gather",
    "DeepSpeed has removed it": "zeropp_loco_param",
}  # fmt: skip
_OFFLOAD_BY_REASON = {
    "DeepSpeed updates what isn't offloaded with an AdamW of its own": "ratio",
    "works only with DeepSpeed's own Adam": "super_offload cpuadam_cores_perc",
}


def _by_key(keys_by_reason: Mapping[str, str]) -> dict[str, str]:
    return {key: reason for reason, keys in keys_by_reason.items() for key in keys.split()}


class PassedOn(Section):
    """A section that is passed on to DeepSpeed. It is dumped with ZeRO's stage and the keys that the run file sets."""

    @model_serializer(mode="wrap")
    def _given(self, serialize: Serializer) -> dict[str, Any]:
        given = self.model_fields_set | {"zero_optimization", "stage"}
        return {key: value for key, value in serialize(self).items() if key in given}


class OffloadSection(PassedOn):
    """State that is kept elsewhere than on the device."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Where to: none, cpu or nvme (stage 3 only)."""
    nvme_path: LocalPath | None = None
    """A directory on the NVMe drive."""
    pin_memory: bool = True
    """Use page-locked memory, which GPUs copy faster and which can't be swapped out."""

    @model_validator(mode="after")
    def _names_a_drive(self) -> Self:
        if self.device == "nvme" and not self.nvme_path:
            raise ValueError("nvme_path: missing; set a directory on the NVMe drive")
        return self


class OptimizerOffloadSection(OffloadSection):
    """Where the optimizer's state is kept."""

    refused: ClassVar[Mapping[str, str]] = _by_key(_OFFLOAD_BY_REASON)

    buffer_count: NonNegativeInt = 4
    """NVMe: buffers; at least the number of tensors that the optimizer has for a parameter."""
    pipeline_read: bool = False
    """NVMe: read the next tensors during an update."""
    pipeline_write: bool = False
    """NVMe: write the last tensors during an update."""
    fast_init: bool = False
    """NVMe: start faster."""


class ParameterOffloadSection(OffloadSection):
    """Where parameters are kept."""

    buffer_count: NonNegativeInt = 5
    """NVMe: buffers."""
    buffer_size: NonNegativeInt = 100_000_000
    """NVMe: elements of a buffer."""
    max_in_cpu: NonNegativeInt = 1_000_000_000
    """NVMe: elements that stay in the CPU's memory."""


def _stage(stage: int) -> int:
    if stage == 0:
        raise ValueError(
            "0 is refused: with it, DeepSpeed gives no gradient norm and doesn't skip a step with a non-finite "
            "gradient; set 1, which costs no more, even on one rank"
        )
    if stage not in (1, 2, 3):
        raise ValueError(f"expected 1, 2 or 3, got {stage!r}")
    return stage


class ZeroSection(PassedOn):
    """How ZeRO shards the state of training. The defaults are DeepSpeed's, but for the stage."""

    refused: ClassVar[Mapping[str, str]] = _by_key(_ZERO_BY_REASON)

    stage: Annotated[int, Field(strict=True), AfterValidator(_stage)] = 2
    """The tensors that are sharded. 1: the optimizer's state. 2: gradients too. 3: parameters too; on one rank, if
    nothing is offloaded, 3 is 2."""
    allgather_bucket_size: NonNegativeInt = 500_000_000
    """Stages 1 and 2: elements gathered at a time."""
    allgather_partitions: bool = True
    """Gather updated parameters in one collective. false: by broadcasts."""
    contiguous_gradients: bool = True
    """Copy gradients to one buffer as they are made, against fragmented memory."""
    enable_sanity_checks: bool = False
    """DeepSpeed's internal checks, for debugging."""
    log_trace_cache_warnings: bool = False
    """Stage 3: log when the recorded order of layers no longer holds."""
    memory_efficient_linear: bool = True
    """Stage 3: use linear layers that keep less memory."""
    offload_optimizer: OptimizerOffloadSection | None = None
    """Where the optimizer's state is kept; it is then also updated on the CPU."""
    offload_param: ParameterOffloadSection | None = None
    """Stage 3: where parameters are kept."""
    overlap_comm: bool | None = None
    """Reduce gradients during the backward pass. Default: true on several GPUs, and on one that offloads at stage 3."""
    override_module_apply: bool = True
    """Stage 3: gather parameters in torch's Module.apply."""
    parameter_alignment: bool = False
    """Stages 1 and 2: begin each parameter at a multiple of 16 bytes, which takes more memory."""
    reduce_bucket_size: PositiveInt = 500_000_000
    """Elements reduced at a time; stage 3 keeps a buffer of 4 bytes for each. Default on GPUs: 50,000,000; on CPUs: a
    size for the cache."""
    reduce_scatter: bool = True
    """Reduce gradients to the ranks that own them. false: all-reduce them. Default: true at stage 3 on GPUs."""
    stage3_allgather_sequential: bool = False
    """Gather parameters one by one, which takes less memory."""
    stage3_max_live_parameters: NonNegativeInt = 1_000_000_000
    """The most gathered elements on a rank before some are released."""
    stage3_max_reuse_distance: NonNegativeInt = 1_000_000_000
    """A parameter that is needed again within this many elements isn't released."""
    stage3_model_persistence_threshold: NonNegativeInt = 9_223_372_036_854_775_807
    """The most elements that may stay whole on every rank."""
    stage3_module_granularity_threshold: NonNegativeInt = 0
    """Modules with fewer elements per submodule are gathered whole. 0 turns it off."""
    stage3_param_persistence_threshold: NonNegativeInt = 100_000
    """Parameters of fewer elements stay whole on every rank."""
    stage3_prefetch_bucket_size: NonNegativeInt = 50_000_000
    """Elements gathered ahead of their use."""
    stage3_use_all_reduce_for_fetch_params: bool = False
    """Gather parameters by all-reduce."""
    sub_group_size: NonNegativeInt = 1_000_000_000
    """Stage 3: elements updated at a time."""
    use_multi_rank_bucket_allreduce: bool = True
    """Stages 1 and 2: reduce the buckets of several ranks in one collective."""
    zero_hpz_partition_size: NonNegativeInt = 1
    """ZeRO++, stage 3: ranks of a group that keeps a second copy of the weights. 1 turns it off."""
    zero_quantized_weights: bool = False
    """ZeRO++, stage 3: gather weights quantized."""

    def offloaded_to(self, device: str) -> list[str]:
        """The keys of what is offloaded to `device`."""
        sections = {"offload_optimizer": self.offload_optimizer, "offload_param": self.offload_param}
        return [key for key, section in sections.items() if section is not None and section.device == device]

    @model_validator(mode="after")
    def _stage_allows_offloading(self) -> Self:
        problems = [
            f"{key}.device: nvme needs stage 3, got stage {self.stage}; set cpu" for key in self.offloaded_to("nvme")
        ]
        if "offload_param" in self.offloaded_to("cpu"):
            problems.append(
                f"offload_param: only stage 3 shards parameters; at stage {self.stage} they stay where they are"
            )
        if problems and self.stage != 3:
            raise ValueError("\n".join(problems))
        return self


class DeepSpeedSection(PassedOn):
    """Keys that are passed on to DeepSpeed, whose [documentation](https://www.deepspeed.ai/docs/config-json/) says
    more. Its other keys are refused with the reason: the rest of the run file decides them, or DeepSpeed ignores them
    or gets them wrong."""

    refused: ClassVar[Mapping[str, str]] = _by_key(_BY_REASON)

    zero_optimization: ZeroSection = ZeroSection()
    """How ZeRO shards the state of training over the ranks."""
    aio: Options = None
    """How files are read and written when state is offloaded to NVMe: block_size, queue_depth and others."""
    comet: Options = None
    """Report DeepSpeed's own metrics to Comet."""
    csv_monitor: Options = None
    """Write DeepSpeed's own metrics to CSV files."""
    disable_python_gc: bool = False
    """Turn Python's garbage collector off during training."""
    flops_profiler: Options = None
    """Profile one step: enabled, profile_step, module_depth and others."""
    log_level: str | None = None
    """The level of DeepSpeed's log; null shows only errors."""
    tensorboard: Options = None
    """Write DeepSpeed's own metrics for TensorBoard."""
    timers: Options = None
    """DeepSpeed's timer of throughput: {throughput: {enabled, synchronized}}; null turns it off."""
    wandb: Options = None
    """Report DeepSpeed's own metrics to Weights & Biases."""
    comms_logger: Options = None
    """Log collective operations and their sizes; needs log_level: info."""
    dump_state: bool = False
    """Log the engine's settings at the start; needs log_level: info."""
    memory_breakdown: bool = False
    """Log the memory that is used; needs log_level: info."""
    wall_clock_breakdown: bool = False
    """Log the time of each part of a step; needs log_level: info."""

    @model_validator(mode="after")
    def _log_is_shown(self) -> Self:
        silenced = sorted(self.model_fields_set & _NEED_LOG)
        if silenced and self.log_level not in ("debug", "info"):
            raise ValueError("\n".join(f"{key}: {_SILENCED}" for key in silenced))
        return self


def zero_defaults(stage: int, device: str) -> dict[str, int]:
    """Settings of ZeRO that suit the device better than DeepSpeed's own defaults."""
    if device == "cpu":
        # Small buckets stay in the cache; stages 1 and 2 reduce larger gradients where they are. Gloo can't scatter.
        return {"reduce_bucket_size": 1 << (21 if stage == 3 else 17), "reduce_scatter": False}
    # Stages 1 and 2 "scatter" by reducing a copy of the bucket to all ranks; without it they reduce the bucket itself.
    return {"reduce_bucket_size": 50_000_000, "overlap_comm": True, "reduce_scatter": stage == 3}
