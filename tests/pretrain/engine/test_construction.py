"""Models built under ZeRO-3: the same weights, a share of the memory."""

from pathlib import Path

import pytest
import torch

from data_pipeline.corpus import open_corpus
from pretrain import models
from pretrain.engine.checkpoint.trained import save_weights
from pretrain.models.flops import Sizes, count_flops
from pretrain.models.layers import Layer
from pretrain.models.model import Model
from pretrain.tools.plan_memory import LiveMemory
from tests.support.rank_processes import each, on_ranks
from tests.support.small_models import MODELS
from tests.support.small_runs import engine_of, micro_batches, own_layout, own_sharding, row_offsets, run_config

SIZES = {"vocab_size": 100, "d_model": 32, "d_ff": 64, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2}
STACK = {"d_model": 32, "d_ff": 64, "num_heads": 4, "num_key_value_heads": 2, "num_layers": 2}
FAMILIES = {
    "t5": {"tie_embeddings": True},
    "t5 v1.1": {"tie_embeddings": False, "feed_forward": "gated-gelu", "positions": "learned", "max_positions": 64},
    "bart": {"family": "bart", "max_positions": 32, "dropout_rate": 0.0, **SIZES},
    "t5gemma": {"family": "t5gemma", "vocab_size": 100, "encoder": STACK, "decoder": {**STACK, "d_model": 48}},
    "t5gemma2": {"family": "t5gemma2", "vocab_size": 100, **STACK},
}


def whole(model: Model) -> dict[str, torch.Tensor]:
    """Every whole parameter of a sharded model."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters(remove_duplicate=False)}


def constructed(precision: str, changes: dict) -> tuple:
    from pretrain.engine.construction import construct

    config = run_config(3, changes, precision=precision)
    model = construct(config, config.model, own_sharding(config))
    held = sum(parameter.ds_tensor.numel() for parameter in model.parameters())
    own = sum(parameter.numel() for parameter in model.parameters())
    meta_model = models.meta_model(config.model)
    return whole(model), held, own, meta_model.num_parameters(), count_flops(meta_model, Sizes.of_example(512, 114))


CONSTRUCTED = ("t5", "t5 v1.1", "t5gemma")


def test_a_sharded_model_starts_with_the_same_values_of_which_a_rank_holds_its_share():
    cases = [(precision, FAMILIES[family]) for precision in ("fp32", "bf16") for family in CONSTRUCTED]
    for found in on_ranks(2, each, constructed, cases):
        for case, (values, held, own, num_parameters, flops) in zip(cases, found, strict=True):
            precision, changes = case
            config = run_config(3, changes)
            torch.manual_seed(config.run.seed)
            plain = models.build(config.model)
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            expected = {name: value.to(dtype) for name, value in plain.named_parameters(remove_duplicate=False)}
            assert values.keys() == expected.keys(), case
            assert all(torch.equal(values[name], expected[name]) for name in expected), case
            assert num_parameters == plain.num_parameters()
            assert flops == count_flops(plain, Sizes.of_example(512, 114))
            assert own == 0
            assert held - num_parameters / 2 < len(expected)  # each parameter is padded to a multiple of the ranks


def loaded(checkpoint: Path, precision: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights that a model computes with, and this rank's fragments of the fp32 ones, by name."""
    from pretrain.engine.checkpoint.engine_state import restore
    from pretrain.engine.deepspeed_private import fragments

    engine = engine_of(run_config(3, precision=precision))
    restore(engine, checkpoint, weights_only=True)
    own = {one.name: one.view(one.buffer.data).clone() for one in fragments(engine.deepspeed)}
    return whole(engine.deepspeed.module), own


def test_a_sharded_model_takes_the_weights_of_a_checkpoint(small_corpus, tmp_path):
    config = run_config(3).model
    state = models.build(config).state_dict()
    save_weights(config, state, open_corpus(small_corpus).tokenizer, tmp_path / "checkpoint")
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        (values, first), (others, second) = on_ranks(2, loaded, tmp_path / "checkpoint", precision)
        assert len(values) == len(others) == len(state)
        for name, expected in state.items():
            assert torch.equal(values[name], expected.to(dtype))
            assert torch.equal(others[name], expected.to(dtype))
            if name in first | second:  # a name that a tied matrix has too isn't
                parts = [one[name] for one in (first, second) if name in one]
                assert torch.equal(torch.cat(parts), expected.flatten())


def trained(
    stage: int, changes: dict, precision: str, zero: dict | None = None, optimizer: str = "adamw"
) -> tuple[list[float], bool, list]:
    """The losses of a constructed model, whether its tied matrices are one, and its buffers."""
    settings = {"name": optimizer, "learning_rate": 1e-2, "gradient_clipping": 0.5, "weight_decay": 0.1}
    settings |= {"newton_schulz_dtype": "fp32"} if optimizer == "muon" else {}
    layout = own_layout()
    engine = engine_of(run_config(stage, changes, zero, precision=precision, optimizer=settings))
    model = engine.deepspeed.module
    losses = [engine.step(step, row_offsets(layout, step), micro_batches(layout, step)).loss for step in range(3)]
    tied = model.lm_head.weight is model.embedding.weight
    buffers = [(name, buffer.dtype) for name, buffer in model.named_buffers()]
    engine.close()
    return losses, tied, buffers


@pytest.mark.slow
def test_every_stage_learns_the_same_from_the_same_weights():
    """Muon too, which takes matrices alone: sharded parameters have no dimensions."""
    ways = [*((family, "fp32", "adamw") for family in FAMILIES), ("t5", "bf16", "adamw"), ("t5gemma2", "bf16", "adamw")]
    cases = [(way, stage) for way in [*ways, ("bart", "fp32", "muon")] for stage in (1, 2, 3)]
    cases = [case for case in cases if case[1] != 2 or case[0] == ways[0]]  # built as at stage 1
    given = [(stage, FAMILIES[family], precision, None, name) for (family, precision, name), stage in cases]
    found = dict(zip(cases, on_ranks(2, each, trained, given, seconds=600)[0], strict=True))
    for (way, stage), (others, *same) in found.items():
        losses, tied, buffers = found[way, 1]
        assert tied == (way[0] in ("t5", "bart", "t5gemma2"))
        assert others == pytest.approx(losses, abs=1e-5 if way[1] == "fp32" else 2e-3), (way, stage)
        assert same == [tied, buffers], (way, stage)


@pytest.mark.slow
def test_secondary_shards_change_no_bit():
    """ZeRO++ with two pairs of ranks, each with a whole copy for the backward pass."""
    cases = [(3, {}, "bf16"), (3, {}, "bf16", {"zero_hpz_partition_size": 2})]
    plain, secondary = on_ranks(4, each, trained, cases)[0]
    assert plain == secondary


def tensors_of_building(stage: int) -> tuple[float, float]:
    """The peak bytes of this rank's tensors while a model is built, per parameter; the share of its largest one."""
    from pretrain.engine.construction import construct

    config = run_config(stage, {"vocab_size": 1024, "d_model": 64, "d_ff": 1024}, precision="bf16")
    sizes = [parameter.numel() for parameter in models.meta_model(config.model).parameters()]
    with LiveMemory("cpu") as memory:
        construct(config, config.model, own_sharding(config))
    return memory.peak / sum(sizes), max(sizes) / sum(sizes)


def test_no_rank_ever_has_the_tensors_of_a_whole_copy():
    """2 bytes ÷ 2 ranks, and 10 bytes for the largest parameter while it is made."""
    for bytes_of_one, largest in on_ranks(2, tensors_of_building, 3):
        assert bytes_of_one < 2 / 2 + 10 * largest + 0.1
    assert on_ranks(1, tensors_of_building, 2)[0][0] > 2


def test_layers_are_layers_in_every_family():
    """Whatever else a stack keeps for each layer, such as umT5's biases, is in no list of modules."""
    from pretrain.engine.construction import layers

    for name, settings in MODELS.items():
        model = models.meta_model(models.parse({"vocab_size": 100, **settings}))
        assert all(isinstance(layer, Layer) for layer in layers(model).values()), name
