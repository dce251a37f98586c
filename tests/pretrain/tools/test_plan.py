"""`pretrain plan`: against what PyTorch saves, what DeepSpeed allocates, and a published run."""

import gc
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from data_pipeline.base.config_file import load
from data_pipeline.corpus import open_corpus
from pretrain import device_speed, models
from pretrain.config import RunConfig
from pretrain.config.run_config import ComputeSection
from pretrain.device_speed import GPUS, Gpu
from pretrain.engine.construction import layers, prepare_layers
from pretrain.engine.sharding import Sharding
from pretrain.hardware import threads_per_rank
from pretrain.models.functional.attention_backends import using
from pretrain.tools.plan import Plan, resolve_rows, text
from pretrain.tools.plan_memory import LiveMemory, Parameters, Rows, States, activations, states
from tests.support import tables
from tests.support.rank_processes import each, on_ranks
from tests.support.reductions import reducing
from tests.support.runs import run_file
from tests.support.slow import slow
from tests.support.small_families import FAMILIES
from tests.support.small_runs import engine_of, run_config

RUNS = Path(__file__).parents[3] / "configs/runs"
BASE, LARGEST = RUNS / "t5-v1.1-base-c4.yaml", RUNS / "t5-v1.0-11b-c4.yaml"

LLAMA = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "biases": False, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "t5": {**FAMILIES["t5"], "dropout_rate": 0.1},
    "t5 without bias": {**FAMILIES["t5"], "positions": "rotary", "feed_forward": "relu"},
    "decoder_only": {**FAMILIES["decoder_only"], **LLAMA, "max_positions": None},
}


def batch_of(family: str, rows: Rows) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 2000, (rows.count, rows.inputs))
    labels = torch.randint(3, 2000, (rows.count, rows.targets))
    if family == "encoder_only":
        labels[:, rows.predicted :] = -100
    return {"encoder_input_ids": ids, "labels": labels, "encoder_attention_mask": torch.ones_like(ids)}


def bytes_saved(config: models.ModelConfig, batch: dict[str, torch.Tensor], checkpointing: bool) -> int:
    """What autograd really keeps of a forward pass on a CPU: each storage once, parameters and inputs left out."""
    model = models.build(config).bfloat16().train()
    given = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *batch.values())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage  # held here, so that no other gets its address
        return tensor

    def hold(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """A layer that is computed again holds what it was called with, which passes by the hooks."""
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, torch.Tensor):
                keep(one)

    if checkpointing:
        prepare_layers(model, ComputeSection(activation_checkpointing=True), stage=1)
        for layer in layers(model).values():
            layer.register_forward_pre_hook(hold, with_kwargs=True)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**batch)
    return sum(storage.nbytes() for storage in kept.values())


CHECKED = [("t5", True), ("t5gemma2", False), ("autoregressive", False)]
CHECKED += slow(*((family, False) for family in MODELS if (family, False) not in CHECKED))


@tables.each("family, checkpointing", CHECKED)
def test_activations_are_those_that_autograd_saves(family, checkpointing):
    """T5's learned bias takes the plain formula on a CPU; elsewhere there is a fused kernel."""
    count, inputs, targets = 5, 96, 40
    config = models.parse({"vocab_size": 2048, **MODELS[family]})
    targets = targets if config.family in ("t5", "bart", "vanilla", "t5gemma", "t5gemma2") else inputs
    rows = Rows(count, inputs, targets, targets // 4 if family == "encoder_only" else targets)
    with using("sdpa"):
        saved = bytes_saved(config, batch_of(family, rows), checkpointing)
    _, planned = activations(config, rows, "bf16", checkpointing, "sdpa")
    assert planned == pytest.approx(saved, rel=0.1)


WIDE = {"vocab_size": 2048, "d_model": 128, "d_ff": 512, "d_kv": 32, "num_heads": 4}
ROWS, INPUTS, TARGETS, BUCKET = 4, 64, 32, 250_000
CASES = [
    *((stage, "bf16", "adamw", False, False) for stage in (1, 2, 3)),
    *((stage, "fp32", "adamw", False, False) for stage in (2, 3)),
    (2, "bf16", "muon", True, False),
    (3, "bf16", "adafactor", True, False),
    *((stage, "bf16", "adamw", False, True) for stage in (2, 3)),
]


def config_of(stage: int, precision: str, optimizer: str, checkpointing: bool, offload: bool) -> RunConfig:
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    return run_config(
        stage,
        WIDE,
        zero,
        precision=precision,
        optimizer={"name": optimizer, "learning_rate": 1e-3},
        compute={"activation_checkpointing": checkpointing},
    )


def allocated(*case: Any) -> dict[str, float]:
    """What DeepSpeed's tensors take on this rank, by kind, and the most that existed during a step."""
    from pretrain.engine.deepspeed_private import fragments
    from pretrain.engine.optimizers import flat_buffers

    flat_buffers.IN_PARTS = frozenset()  # as on a GPU
    batch = batch_of("t5", Rows(ROWS, INPUTS, TARGETS, TARGETS))
    stage = case[0]
    with LiveMemory("cpu") as memory, reducing(reduce_bucket_size=BUCKET, reduce_scatter=stage == 3):
        engine = engine_of(config_of(*case))
        for number in range(2):
            gc.collect()
            memory.peak = memory.allocated
            engine.step(number, [0, 1], [batch, batch])
    optimizer = engine.deepspeed.optimizer.optimizer
    parameters = list(engine.deepspeed.module.parameters())
    shards = [one.ds_tensor for one in parameters if hasattr(one, "ds_tensor")]  # at stage 3
    kinds = {
        "weights": [*parameters, *shards],
        "master weights": [one.buffer for one in fragments(engine.deepspeed)],
        "moments": [value for slots in optimizer.state.values() for value in slots.values() if value.dim()],
    }
    found: dict[str, float] = {"peak": memory.peak}
    counted_before: set[int] = set()
    for kind, tensors in kinds.items():
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        found[kind] = sum(nbytes for address, nbytes in storages.items() if address not in counted_before)
        counted_before |= set(storages)
    engine.close()
    return found


def planned(case: Any, ranks: int) -> tuple[States, int, int]:
    """Also what the step of an offloaded optimizer takes on the host: its copy of the gradients, and new weights."""
    stage, precision, _, checkpointing, offload = case
    config = config_of(*case)
    sizes = Parameters.of(models.meta_model(config.model), config)
    rows = Rows(ROWS, INPUTS, TARGETS, TARGETS)
    passing, _ = activations(config.model, rows, precision, checkpointing, "eager")
    with reducing(reduce_bucket_size=BUCKET, overlap_comm=stage == 3):  # as on CPUs
        held = states(sizes, Sharding.of(config, ranks), precision, config.deepspeed.zero_optimization)
    of_step = (4 + 2) * sizes.count // ranks if offload and stage < 3 else 0
    return held, held.peak(passing), of_step


@tables.each("largest, bucket", [(40_000_000, 50_000_000), (67_000_000, 67_000_000)])
def test_a_bucket_has_room_for_the_largest_parameter(largest, bucket):
    """Stage 2 on GPUs fills one of two buckets while it reduces the other, in bf16."""
    sizes = Parameters([largest, 1_000_000], moments=0, whole_moments=0, step_bytes=0)
    config = run_config(2, precision="bf16")
    assert states(sizes, Sharding.of(config, 8), "bf16", config.deepspeed.zero_optimization).buffers == 2 * 2 * bucket


@pytest.mark.slow
def test_memory_is_deepspeeds_own_on_two_ranks():
    """All stages and precisions, with and without checkpointing and offloading; two micro-batches a step.

    On CPU ranks, what is offloaded lies beside what isn't: only the sum can be compared."""
    for results in on_ranks(2, each, allocated, CASES, seconds=600):
        for case, found in zip(CASES, results, strict=True):
            held, peak, of_step = planned(case, 2)
            both = max(peak + held.host - of_step, held.lasting + held.buffers + held.host)
            assert both == pytest.approx(found["peak"], rel=0.1), (case, held, found)
            if case[-1]:
                continue
            assert held.weights == pytest.approx(found["weights"], rel=0.1), (case, held, found)
            assert held.master_weights == pytest.approx(found["master weights"], rel=0.01), (case, held, found)
            if case[2] != "adafactor":
                assert held.moments == pytest.approx(found["moments"], rel=0.01), (case, held, found)


def on_one(gpu: Gpu = GPUS["a100-80gb"]) -> Plan:
    """T5 v1.1 base, as nanoT5 trained it."""
    return Plan(load(BASE, [], RunConfig), Rows(1, 512, 114, 114), "a100-80gb", gpu, 1, 0.31, 2.0)


@pytest.mark.slow
def test_one_a100_takes_as_long_as_nanot5s():
    """0.56 s a step and 10.2 hours on one A100 80 GB, at 31 % MFU (its README; 128 rows of 512 and 114 tokens)."""
    best = on_one().options[0]
    assert best.seconds == pytest.approx(0.56, rel=0.02)
    assert best.hours == pytest.approx(10.2, rel=0.02)
    assert best.rows >= 64


@pytest.mark.slow
def test_the_largest_micro_batch_fits_and_the_next_does_not():
    """Of 128 rows on one GPU of 12 GiB. All of them fit only if layers are computed again."""
    one = on_one(replace(GPUS["a100-80gb"], memory=12))
    for option in one.options:
        assert 1 <= option.rows < 128 or option.recomputed
        assert option.peak <= one.usable
        if option.rows == 128:
            continue
        above = one.activations(2 * option.rows, option.recomputed)
        assert option.states.peak(above) > one.usable


@tables.each(
    "gpus, nodes, stage, passes, gradients, weights, speed",
    [
        (8, 1, 1, 1, 1, 1, 300),  # NVLink
        (16, 2, 1, 1, 1, 1, 200),  # eight adapters of 25 GB/s for what leaves a node
        (2, 2, 2, 4, 4, 1, 25),  # DeepSpeed reduces after each of four micro-batches
        (8, 1, 3, 4, 4, 8, 300),  # and gathers weights in each forward and backward pass
        (1, 1, 1, 1, 0, 0, 300),
    ],
)
def test_communication_is_what_links_carry(gpus, nodes, stage, passes, gradients, weights, speed):
    """4 bytes of gradient and 2 of weight for each of 247,577,856 parameters, of which a ring sends (n - 1)/n."""
    plan = replace(on_one(), gpus=gpus, nodes=nodes)
    sent = (4 * gradients + 2 * weights) * 247_577_856 * (gpus - 1) / gpus
    assert plan.communication(stage, passes) == pytest.approx(sent / (speed * 1e9))


def test_communication_and_the_room_for_checkpoints_are_said():
    """247,577,856 weights in fp32 with Adafactor, 990 MB, whose moments no rank shards; on two nodes half of them
    each."""
    shown = " ".join(text(replace(on_one(), gpus=64, nodes=8)).split())
    assert re.match(r"t5-v1.1-base-c4 on 64 × a100-80gb: \d+ min, \$\d+ \(stage 1, micro-batches of 2\)\. ", shown)
    assert "MFU in all" in shown
    assert "On disk a checkpoint takes 0.92 GiB; the run keeps the last 3" in shown
    assert "the run keeps the last 3 and every 10,000 steps: 9.22 GiB" in shown
    often = load(BASE, ["checkpoint.keep_every_steps=1500"], RunConfig)  # of the multiples of 1,000 that are saved
    assert "the last 3 and every 3,000 steps: 23.1 GiB" in " ".join(text(replace(on_one(), config=often)).split())
    on_nodes = [replace(on_one(), gpus=8, nodes=nodes).held_by_checkpoints for nodes in (1, 2)]
    assert on_nodes == [4 * 247_577_856, 2 * 247_577_856]
    assert "Communication" not in text(on_one())


def test_packed_rows_are_fewer_and_as_many_times_as_wide():
    one = on_one()
    packed = replace(one, config=load(BASE, ["data.packing_ratio=4"], RunConfig))
    wide = Rows(2, 4 * 512, 4 * 114, 4 * 114, examples=4)
    assert packed.activations(8, True) == activations(one.config.model, wide, "bf16", True, "triton")[0]


@pytest.mark.timing
def test_a_measured_cpu_computes_faster_than_a_tenth_and_slower_than_a_hundred_of_its_kind():
    assert 1e9 < device_speed.product_flops() / threads_per_rank(1) < 1e12


@tables.each(
    "name, overrides, row, taken",
    [
        ("t5-v1.1-base-c4", [], (512, 114), "configs:corpora/c4-t5.yaml"),
        ("quickstart", [], (42, 12), "configs:corpora/quickstart.yaml"),  # which has the vocabulary, too
        ("t5-v1.1-base-c4", ["data.objective={name: span_corruption, inputs_length: 256}"], (256, 58), None),
    ],
)
def test_without_its_corpus_a_run_is_planned_from_the_file_that_builds_it(
    name, overrides, row, taken, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = RUNS / f"{name}.yaml"
    config, rows, file = resolve_rows(load(path, overrides, RunConfig), path)
    assert ((rows.inputs, rows.targets), file) == (row, taken)
    assert config.model.vocab_size


def test_a_corpus_at_a_file_url_gives_a_plan_its_rows_and_vocabulary(small_corpus, tmp_path):
    path = run_file(tmp_path, f"file://{small_corpus}")
    config, rows, file = resolve_rows(load(path, [], RunConfig), path)
    corpus = open_corpus(small_corpus)
    assert ((rows.inputs, rows.targets), file) == (corpus.objective.shape, None)
    assert config.model.vocab_size == corpus.tokenizer.size
