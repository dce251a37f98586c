"""The keys of DeepSpeed's config that a run file may set under `deepspeed`.

Keys that DeepSpeed understands are passed on. Keys that contradict the rest of the run file are refused, and so are
keys that DeepSpeed ignores or gets wrong. This module doesn't import DeepSpeed, which takes seconds.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, model_serializer, model_validator
from pydantic import SerializerFunctionWrapHandler as Serializer

from data_pipeline.base.config_file import LocalPath, Section

# keys that DeepSpeed alone reads: here their names and types are checked
_THEIRS = Field(description="DeepSpeed's documentation explains it.")
Flag = Annotated[bool, _THEIRS]
Count = Annotated[NonNegativeInt, _THEIRS]

_REFUSED = {
    "set batch instead": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
    "managed_gradient_accumulation autotuning",
    "set optimizer instead": "optimizer gradient_clipping zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    "set schedule instead": "scheduler",
    "set precision instead": "bf16 bfloat16 torch_autocast amp",
    "not supported: T5 diverges in fp16; set precision: bf16": "fp16",
    "set compute instead": "activation_checkpointing compile leaf_module",
    "set checkpoint instead": "checkpoint datastates_ckpt nebula elastic_checkpoint load_from_fp32_weights "
    "pipeline_loading_checkpoint stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
    "set data instead": "dataloader_drop_last data_efficiency curriculum_learning",
    "set model.vocab_size instead": "vocabulary_size",
    "set tracking.log_every_steps instead": "steps_per_print",
    "set tracking or callbacks instead": "comet csv_monitor tensorboard wandb",
    "set trainer.profile instead": "comms_logger dump_state flops_profiler log_level memory_breakdown timers "
    "wall_clock_breakdown",
    "set zero_optimization.allgather_partitions instead": "disable_allgather",
    "set zero_optimization.offload_optimizer or offload_param instead": "cpu_offload cpu_offload_param "
    "cpu_offload_use_pin_memory",
    "every rank runs all layers of the model; shard it with zero_optimization": "sequence_parallel_size "
    "seq_parallel_communication_data_type tensor_parallel pipeline expert_parallel use_data_before_expert_parallelism",
    "a step needs the fp32 gradient of every parameter, scaled by the step's tokens": "data_types "
    "communication_data_type prescale_gradients gradient_predivide_factor gradient_allreduce_op "
    "ignore_unused_parameters compute_grad_norm zero_quantized_gradients",
    "the stage and the device decide how gradients are reduced; remove this key": "overlap_comm reduce_bucket_size "
    "reduce_scatter contiguous_gradients use_multi_rank_bucket_allreduce",
    "DeepSpeed maps fragments to the wrong parameters with it": "round_robin_gradients",
    "works only with optimizers of DeepSpeed's own": "zenflow save_muon_momentum_buffer_in_memory ratio super_offload "
    "cpuadam_cores_perc",
    "isn't for pretraining": "hybrid_engine weight_quantization zero_quantized_nontrainable_weights",
    "DeepSpeed ignores this key, or has removed it": "elasticity compression_training eigenvalue graph_harvesting "
    "progressive_layer_drop quantize_training sparse_attention sparse_gradients legacy_stage1 mics_shard_size "
    "mics_hierarchical_params_gather zeropp_loco_param",
}


class PassedOn(Section):
    """A section that is passed on to DeepSpeed: ZeRO's stage and the keys that the run file sets."""

    refused = {key: reason for reason, keys in _REFUSED.items() for key in keys.split()}

    @model_serializer(mode="wrap")
    def _only_set_keys(self, serialize: Serializer) -> dict[str, Any]:
        keys = self.model_fields_set | {"zero_optimization", "stage"}
        return {key: value for key, value in serialize(self).items() if key in keys}


class OffloadSection(PassedOn):
    """State that is offloaded from the device."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """The place to offload to: none, cpu or nvme (stage 3 only)."""
    nvme_path: LocalPath | None = None
    """A directory on the NVMe drive."""
    pin_memory: Flag = True

    @model_validator(mode="after")
    def _names_a_drive(self) -> Self:
        if self.device == "nvme" and not self.nvme_path:
            raise ValueError("nvme_path: missing; set a directory on the NVMe drive")
        return self


class OptimizerOffloadSection(OffloadSection):
    """Where the optimizer state is kept."""

    buffer_count: Count = 4
    pipeline_read: Flag = False
    pipeline_write: Flag = False
    fast_init: Flag = False


class ParameterOffloadSection(OffloadSection):
    """Where parameters are kept."""

    buffer_count: Count = 5
    buffer_size: Count = 100_000_000
    max_in_cpu: Count = 1_000_000_000


class ZeroSection(PassedOn):
    """How ZeRO shards parameters, gradients and optimizer state over the ranks. Apart from `stage`, the defaults are
    DeepSpeed's."""

    stage: Annotated[int, Field(strict=True, ge=1, le=3)] = 1
    """The ZeRO stage. 1, the fastest: optimizer state is sharded; each rank keeps 4 bytes of gradient per parameter,
    and gradients are reduced once a step. 2: gradients are sharded too, and reduced after each micro-batch; in fp32, or
    on one rank, stage 2 is stage 1. 3: parameters are sharded too; on one rank without offloading, stage 3 is stage 1.
    Stage 0 isn't supported."""
    offload_optimizer: OptimizerOffloadSection | None = None
    """Where the optimizer state is kept. Offloaded state is also updated on the CPU."""
    offload_param: ParameterOffloadSection | None = None
    """Stage 3: where parameters are kept."""
    allgather_bucket_size: NonNegativeInt = 500_000_000
    """Stages 1 and 2: elements gathered at a time."""
    sub_group_size: NonNegativeInt = 1_000_000_000
    """Stage 3: elements updated at a time."""
    stage3_max_live_parameters: NonNegativeInt = 1_000_000_000
    """Maximum number of gathered elements on a rank; above it, some are released."""
    stage3_param_persistence_threshold: NonNegativeInt = 100_000
    """Parameters with fewer elements stay unsharded on every rank."""
    stage3_prefetch_bucket_size: NonNegativeInt = 50_000_000
    """Elements that are gathered before they are needed."""
    zero_quantized_weights: bool = False
    """ZeRO++, stage 3: gather quantized weights."""

    allgather_partitions: Flag = True
    enable_sanity_checks: Flag = False
    log_trace_cache_warnings: Flag = False
    memory_efficient_linear: Flag = True
    override_module_apply: Flag = True
    parameter_alignment: Flag = False
    stage3_allgather_sequential: Flag = False
    stage3_max_reuse_distance: Count = 1_000_000_000
    stage3_model_persistence_threshold: Count = 9_223_372_036_854_775_807
    stage3_module_granularity_threshold: Count = 0
    stage3_use_all_reduce_for_fetch_params: Flag = False
    zero_hpz_partition_size: Count = 1

    def offloaded_to(self, device: str) -> list[str]:
        """The keys of the sections that offload to `device`."""
        sections = {"offload_optimizer": self.offload_optimizer, "offload_param": self.offload_param}
        return [key for key, section in sections.items() if section is not None and section.device == device]

    @property
    def offloads(self) -> bool:
        return bool(self.offloaded_to("cpu") or self.offloaded_to("nvme"))

    @model_validator(mode="after")
    def _stage_allows_offloading(self) -> Self:
        sharded = [f"{key}.device: nvme" for key in self.offloaded_to("nvme")]
        if "offload_param" in self.offloaded_to("cpu"):
            sharded.append("offload_param.device: cpu")
        if sharded and self.stage < 3:
            raise ValueError("\n".join(f"{one} needs stage 3, got stage {self.stage}" for one in sharded))
        return self


class DeepSpeedSection(PassedOn):
    """Keys that are passed on to DeepSpeed; its [documentation](https://www.deepspeed.ai/docs/config-json/) says more.
    DeepSpeed's other keys are refused with the reason: the rest of the run file decides them, or DeepSpeed ignores them
    or gets them wrong."""

    zero_optimization: ZeroSection = ZeroSection()
    """How ZeRO shards parameters, gradients and optimizer state over the ranks."""
    aio: Annotated[dict[str, Any] | None, _THEIRS] = None
    disable_python_gc: Flag = False


def reductions(stage: int, device: str) -> dict[str, int]:
    """How DeepSpeed reduces gradients on this kind of device, where it does: its buckets, in elements, and whether it
    scatters, and reduces during the backward pass."""
    if device == "cpu":
        # Small buckets stay in the cache; stages 1 and 2 reduce larger gradients where they are. Gloo can't scatter.
        return {
            "reduce_bucket_size": 1 << (21 if stage == 3 else 17),
            "overlap_comm": stage == 3,
            "reduce_scatter": False,
        }
    # Stages 1 and 2 "scatter" by reducing a copy of the bucket to all ranks; without it they reduce the bucket itself.
    return {"reduce_bucket_size": 50_000_000, "overlap_comm": True, "reduce_scatter": stage == 3}
