"""Which of DeepSpeed's keys a run file may set under `deepspeed`.

Keys that DeepSpeed understands are passed on. Refused are keys that contradict the rest of the run file, keys that
DeepSpeed accepts but ignores, and keys that it gets wrong. This module doesn't import DeepSpeed, which takes seconds.
"""

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from data_pipeline.foundation import paths


class Key(NamedTuple):
    """A key that is passed on: DeepSpeed's default (None: it has none) and the meaning."""

    default: Any
    meaning: str


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

# The defaults are DeepSpeed's, but for ZeRO's stage.
PASSED_ON = {
    _ZERO: Key({}, "How ZeRO shards the state of training over the ranks."),
    "aio": Key(
        None, "How files are read and written when state is offloaded to NVMe: block_size, queue_depth and others."
    ),
    "comet": Key(None, "Report DeepSpeed's own metrics to Comet."),
    "csv_monitor": Key(None, "Write DeepSpeed's own metrics to CSV files."),
    "disable_python_gc": Key(False, "Turn Python's garbage collector off during training."),
    "flops_profiler": Key(None, "Profile one step: enabled, profile_step, module_depth and others."),
    "log_level": Key(None, "The level of DeepSpeed's log; null shows only errors."),
    "tensorboard": Key(None, "Write DeepSpeed's own metrics for TensorBoard."),
    "timers": Key(None, "DeepSpeed's timer of throughput: {throughput: {enabled, synchronized}}; null turns it off."),
    "wandb": Key(None, "Report DeepSpeed's own metrics to Weights & Biases."),
}
NEEDS_LOG = {
    "comms_logger": Key(None, "Log collective operations and their sizes; needs log_level: info."),
    "dump_state": Key(False, "Log the engine's settings at the start; needs log_level: info."),
    "memory_breakdown": Key(False, "Log the memory that is used; needs log_level: info."),
    "wall_clock_breakdown": Key(False, "Log the time of each part of a step; needs log_level: info."),
}
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

ZERO_PASSED_ON = {
    "stage": Key(2, "What is sharded. 1: the optimizer's state. 2: gradients too. 3: parameters too."),
    "allgather_bucket_size": Key(500_000_000, "Stages 1 and 2: elements gathered at a time."),
    "allgather_partitions": Key(True, "Gather updated parameters in one collective. false: by broadcasts."),
    "contiguous_gradients": Key(True, "Copy gradients to one buffer as they are made, against fragmented memory."),
    "enable_sanity_checks": Key(False, "DeepSpeed's internal checks, for debugging."),
    "log_trace_cache_warnings": Key(False, "Stage 3: log when the recorded order of layers no longer holds."),
    "memory_efficient_linear": Key(
        True, "Stage 3: use linear layers that keep less memory. Default on one rank, if nothing is offloaded: false."
    ),
    "offload_optimizer": Key(None, "Where the optimizer's state is kept; it is then also updated on the CPU."),
    "offload_param": Key(None, "Stage 3: where parameters are kept."),
    "overlap_comm": Key(None, "Reduce gradients during the backward pass. Default on GPUs: true."),
    "override_module_apply": Key(True, "Stage 3: gather parameters in torch's Module.apply."),
    "parameter_alignment": Key(
        False, "Stages 1 and 2: begin each parameter at a multiple of 16 bytes, which takes more memory."
    ),
    "reduce_bucket_size": Key(
        500_000_000,
        "Elements reduced at a time; stage 3 keeps a buffer of 4 bytes for each. Default on GPUs: 50,000,000; on CPUs: "
        "a size for the cache.",
    ),
    "reduce_scatter": Key(
        True, "Reduce gradients to the ranks that own them. false: all-reduce them. Default: true at stage 3 on GPUs."
    ),
    "stage3_allgather_sequential": Key(False, "Gather parameters one by one, which takes less memory."),
    "stage3_max_live_parameters": Key(1_000_000_000, "The most gathered elements on a rank before some are released."),
    "stage3_max_reuse_distance": Key(
        1_000_000_000, "A parameter that is needed again within this many elements isn't released."
    ),
    "stage3_model_persistence_threshold": Key(
        9223372036854775807, "The most elements that may stay whole on every rank."
    ),
    "stage3_module_granularity_threshold": Key(
        0, "Modules with fewer elements per submodule are gathered whole. 0 turns it off."
    ),
    "stage3_param_persistence_threshold": Key(100_000, "Parameters of fewer elements stay whole on every rank."),
    "stage3_prefetch_bucket_size": Key(50_000_000, "Elements gathered ahead of their use."),
    "stage3_use_all_reduce_for_fetch_params": Key(False, "Gather parameters by all-reduce."),
    "sub_group_size": Key(1_000_000_000, "Stage 3: elements updated at a time."),
    "use_multi_rank_bucket_allreduce": Key(
        True, "Stages 1 and 2: reduce the buckets of several ranks in one collective."
    ),
    "zero_hpz_partition_size": Key(
        1, "ZeRO++, stage 3: ranks of a group that keeps a second copy of the weights. 1 turns it off."
    ),
    "zero_quantized_weights": Key(False, "ZeRO++, stage 3: gather weights quantized."),
}
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
_DEVICE = Key("none", "Where to: none, cpu or nvme (stage 3 only).")
_NVME_PATH = Key(None, "A directory on the NVMe drive.")
_PIN_MEMORY = Key(True, "Use page-locked memory, which GPUs copy faster and which can't be swapped out.")
OFFLOAD = {
    "offload_optimizer": {
        "device": _DEVICE,
        "nvme_path": _NVME_PATH,
        "buffer_count": Key(4, "NVMe: buffers; at least the number of tensors that the optimizer has for a parameter."),
        "pin_memory": _PIN_MEMORY,
        "pipeline_read": Key(False, "NVMe: read the next tensors during an update."),
        "pipeline_write": Key(False, "NVMe: write the last tensors during an update."),
        "fast_init": Key(False, "NVMe: start faster."),
    },
    "offload_param": {
        "device": _DEVICE,
        "nvme_path": _NVME_PATH,
        "buffer_count": Key(5, "NVMe: buffers."),
        "buffer_size": Key(100_000_000, "NVMe: elements of a buffer."),
        "max_in_cpu": Key(1_000_000_000, "NVMe: elements that stay in the CPU's memory."),
        "pin_memory": _PIN_MEMORY,
    },
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


def zero_defaults(stage: int, device: str) -> dict[str, Any]:
    """Settings of ZeRO that suit the device better than DeepSpeed's own defaults."""
    if device == "cpu":
        # Small buckets stay in the cache; stages 1 and 2 reduce larger gradients where they are. Gloo can't scatter.
        return {"reduce_bucket_size": 1 << (21 if stage == 3 else 17), "reduce_scatter": False}
    # Stages 1 and 2 "scatter" by reducing a copy of the bucket to all ranks; without it they reduce the bucket itself.
    return {"reduce_bucket_size": 50_000_000, "overlap_comm": True, "reduce_scatter": stage == 3}
