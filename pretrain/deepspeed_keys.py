"""Which of DeepSpeed's keys a run file may set under `deepspeed`.

Keys that DeepSpeed understands are passed on. Refused are keys that contradict the rest of the run file, keys that
DeepSpeed accepts but ignores, and keys that it gets wrong. This module doesn't import DeepSpeed, which takes seconds.
"""

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from data_pipeline.foundation import paths


def problems(given: dict[str, Any]) -> list[str]:
    """The problems of a `deepspeed` section, one line each, beginning with the key. `given` names ZeRO's stage."""
    found = [f"{key}: {REFUSED[key]}" for key in given if key in REFUSED]
    found += _unknown(given, {*PASSED_ON, *NEEDS_LOG}, REFUSED, "")
    if given.get("log_level") not in ("debug", "info"):
        found += [f"{key}: {_SILENCED}" for key in given if key in NEEDS_LOG]
    return found + list(_zero_problems(given[_ZERO]))


def offloads_to(given: dict[str, Any], device: str) -> list[str]:
    """The keys below a `deepspeed` section that offload to `device`."""
    zero = given[_ZERO]
    return [f"{_ZERO}.{key}" for key in OFFLOAD if (zero.get(key) or {}).get("device") == device]


_ZERO = "zero_optimization"
_SILENCED = "goes to DeepSpeed's log, which shows only errors; set log_level: info as well"
_REMOVED = "DeepSpeed has removed it"
_OWN_DATA = "the section data decides the rows and their order"
_OWN_CHECKPOINTS = "the section checkpoint decides how checkpoints are written, not DeepSpeed"
_OWN_SCALE = "a step's loss is the mean over all its tokens, which determines how gradients are scaled"
_REPLICAS = "every rank runs all layers of the model; shard it with zero_optimization"

PASSED_ON = (
    _ZERO,
    "aio",
    "comet",
    "csv_monitor",
    "disable_python_gc",
    "flops_profiler",
    "log_level",
    "tensorboard",
    "timers",
    "wandb",
)
NEEDS_LOG = ("comms_logger", "dump_state", "memory_breakdown", "wall_clock_breakdown")
REFUSED = {
    "train_batch_size": "follows from batch.global_batch_size",
    "train_micro_batch_size_per_gpu": "follows from batch.micro_batch_size",
    "gradient_accumulation_steps": "follows from batch and the number of ranks",
    "managed_gradient_accumulation": "follows from batch and the number of ranks",
    "gradient_clipping": "set optimizer.gradient_clipping instead",
    "optimizer": "set optimizer instead",
    "zero_allow_untested_optimizer": "is always true: the optimizers are this project's",
    "zero_force_ds_cpu_optimizer": "is always false: the optimizers are this project's, offloaded or not",
    "scheduler": "set schedule instead",
    "bf16": "set precision instead",
    "bfloat16": "set precision instead",
    "fp16": "not supported: T5 diverges in fp16; set precision: bf16",
    "amp": f"{_REMOVED}; set precision: bf16",
    "torch_autocast": "set precision instead",
    "data_types": "gradients are always accumulated in fp32",
    "communication_data_type": "gradients are always reduced in fp32",
    "seq_parallel_communication_data_type": f"there is no sequence parallelism: {_REPLICAS}",
    "sequence_parallel_size": f"there is no sequence parallelism: {_REPLICAS}",
    "prescale_gradients": _OWN_SCALE,
    "gradient_predivide_factor": _OWN_SCALE,
    "gradient_allreduce_op": _OWN_SCALE,
    "disable_allgather": "DeepSpeed accepts it but ignores it; set zero_optimization.allgather_partitions",
    "steps_per_print": "set tracking.log_every_steps instead",
    "activation_checkpointing": "works for models that call DeepSpeed's own function; set "
    "compute.activation_checkpointing",
    "compile": "set compute.compile instead",
    "checkpoint": _OWN_CHECKPOINTS,
    "datastates_ckpt": _OWN_CHECKPOINTS,
    "nebula": f"{_REMOVED}; {_OWN_CHECKPOINTS}",
    "dataloader_drop_last": _OWN_DATA,
    "data_efficiency": _OWN_DATA,
    "curriculum_learning": _OWN_DATA,
    "elasticity": f"{_REMOVED}; the global batch is the same for any number of ranks",
    "autotuning": "starts runs of its own; set batch.micro_batch_size: auto",
    "pipeline": f"there are no pipeline stages: {_REPLICAS}",
    "tensor_parallel": f"there is no tensor parallelism: {_REPLICAS}",
    "expert_parallel": "there are no experts",
    "use_data_before_expert_parallelism": "there are no experts",
    "hybrid_engine": "is for reinforcement learning",
    "vocabulary_size": "set model.vocab_size instead",
    "weight_quantization": "training doesn't quantize weights",
    "compression_training": _REMOVED,
    "eigenvalue": _REMOVED,
    "graph_harvesting": _REMOVED,
    "progressive_layer_drop": _REMOVED,
    "quantize_training": _REMOVED,
    "sparse_attention": _REMOVED,
    "sparse_gradients": _REMOVED,
}

ZERO_PASSED_ON = (
    "stage",
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "enable_sanity_checks",
    "log_trace_cache_warnings",
    "memory_efficient_linear",
    "offload_optimizer",
    "offload_param",
    "overlap_comm",
    "override_module_apply",
    "parameter_alignment",
    "reduce_bucket_size",
    "reduce_scatter",
    "stage3_allgather_sequential",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_use_all_reduce_for_fetch_params",
    "sub_group_size",
    "use_multi_rank_bucket_allreduce",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
)
ZERO_REFUSED = {
    "round_robin_gradients": "DeepSpeed's map of fragments is wrong with it",
    "elastic_checkpoint": _OWN_CHECKPOINTS,
    "load_from_fp32_weights": _OWN_CHECKPOINTS,
    "pipeline_loading_checkpoint": _OWN_CHECKPOINTS,
    "stage3_gather_16bit_weights_on_model_save": _OWN_CHECKPOINTS,
    "stage3_gather_fp16_weights_on_model_save": _OWN_CHECKPOINTS,
    "legacy_stage1": "DeepSpeed accepts it but ignores it",
    "ignore_unused_parameters": "a parameter without a gradient in a step always counts as having a zero gradient",
    "compute_grad_norm": "without the norm of the gradient no step with a non-finite one would be skipped",
    "cpu_offload": "set offload_optimizer: {device: cpu}",
    "cpu_offload_param": "set offload_param: {device: cpu}",
    "cpu_offload_use_pin_memory": "set pin_memory under offload_optimizer or offload_param",
    "zenflow": "updates weights with an optimizer of its own",
    "save_muon_momentum_buffer_in_memory": "is for DeepSpeed's own Muon",
    "leaf_module": "follows from compute.compile, with which each layer is gathered as one",
    "zero_quantized_gradients": "gradients are always reduced in fp32",
    "zero_quantized_nontrainable_weights": "all weights are trained",
    "mics_shard_size": f"{_REMOVED}; set zero_hpz_partition_size",
    "mics_hierarchical_params_gather": _REMOVED,
    "zeropp_loco_param": _REMOVED,
}
OFFLOAD = {
    "offload_optimizer": (
        "device",
        "nvme_path",
        "buffer_count",
        "pin_memory",
        "pipeline_read",
        "pipeline_write",
        "fast_init",
    ),
    "offload_param": ("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory"),
}
OFFLOAD_REFUSED = {
    "ratio": "DeepSpeed updates what isn't offloaded with an AdamW of its own",
    "super_offload": "works only with DeepSpeed's own Adam",
    "cpuadam_cores_perc": "works only with DeepSpeed's own Adam",
}


def _zero_problems(zero: dict[str, Any]) -> Iterator[str]:
    stage = zero["stage"]
    if stage == 0:
        yield (
            f"{_ZERO}.stage: 0 is refused: with it, DeepSpeed gives no gradient norm and doesn't skip a step "
            "with a non-finite gradient; set 1, which costs no more, even on one rank"
        )
    elif stage not in (1, 2, 3):
        yield f"{_ZERO}.stage: expected 1, 2 or 3, got {stage!r}"
    yield from (f"{_ZERO}.{key}: {ZERO_REFUSED[key]}" for key in zero if key in ZERO_REFUSED)
    yield from _unknown(zero, ZERO_PASSED_ON, ZERO_REFUSED, f"{_ZERO}.")
    for key, known in OFFLOAD.items():
        yield from _offload_problems(f"{_ZERO}.{key}", zero.get(key), known, stage)


def _offload_problems(key: str, section: Any, known: Iterable[str], stage: int) -> Iterator[str]:
    if section is None:
        return
    if not isinstance(section, dict):
        yield f"{key}: expected keys and values, such as {{device: cpu}}"
        return
    yield from (f"{key}.{name}: {OFFLOAD_REFUSED[name]}" for name in section if name in OFFLOAD_REFUSED)
    yield from _unknown(section, known, OFFLOAD_REFUSED, f"{key}.")
    device = section.get("device", "none")
    if device not in ("none", "cpu", "nvme"):
        yield f"{key}.device: expected none, cpu or nvme, got {device!r}"
    if device != "none" and key.endswith("offload_param") and stage != 3:
        yield f"{key}: only stage 3 shards parameters; at stage {stage} DeepSpeed keeps them where they are"
    if device == "nvme" and stage != 3:
        yield f"{key}.device: nvme needs stage 3, got stage {stage}; set cpu"
    if device == "nvme" and not section.get("nvme_path"):
        yield f"{key}.nvme_path: missing; set a directory on the NVMe drive"
    if isinstance(path := section.get("nvme_path"), str) and path:
        try:
            section["nvme_path"] = paths.local(path)
        except ValueError as error:
            yield f"{key}.nvme_path: {error}"


def _unknown(given: Iterable[str], passed_on: Iterable[str], refused: Iterable[str], above: str) -> Iterator[str]:
    """One line for each key that DeepSpeed doesn't know. At the top level DeepSpeed itself ignores them silently."""
    known = [*passed_on, *refused]
    for key in given:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), list(passed_on), n=1, cutoff=0.5)
            yield f"{above}{key}: unknown key" + (f"; nearest valid key: {above}{nearest[0]}" if nearest else "")
