"""muP: equal to the standard model at the base width; deviations, rates and logits by width; exports."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from data_pipeline.base.errors import UserError
from pretrain import models
from pretrain.engine import optimizers
from pretrain.engine.optimizers.groups import kinds, parameter_groups
from pretrain.export import hf_model_of
from pretrain.export.export import without_mup
from pretrain.models.layers import Embedding, Linear
from tests.support.exported import randomise
from tests.support.small_models import ids, logits_of
from tests.support.small_runs import run_config
from tests.support.tables import each

BASE, WIDE = 32, 128  # m = 4, whose root and inverse are exact
M = WIDE // BASE
STACKS = {"num_encoder_layers": 2, "num_decoder_layers": 2}
LEARNED = {"max_positions": 40}
T5 = {"family": "t5", **STACKS, "d_kv": 16}
BART = {"family": "bart", **STACKS, **LEARNED}
DECODER = {"family": "decoder_only", "num_layers": 2}
MODERN = {"family": "modern", "encoder": {"num_layers": 2}, "decoder": {"num_layers": 2}}
SCALED = {"tie_embeddings": "none", "scale_embedding": True, "positions": "learned", "cross_rotation": False}
NORMS = {"norm": "rms_around_one", "norm_after": True, "activation": "geglu", "biases": False}
LOSS = {"bias": True, "subtract_positions": "with_norm", "embedding_loss": {"kind": "mse"}}
FAMILIES = {
    "t5": T5,
    "t5-tied": {**T5, "tie_embeddings": True},
    "bart": BART,
    "bart, scaled": {**BART, "scale_embedding": True},
    "vanilla": {"family": "vanilla", **STACKS},
    "autoregressive": {"family": "autoregressive", **STACKS, **LEARNED, **LOSS},
    "decoder_only": {**DECODER, **LEARNED},
    "encoder_only": {"family": "encoder_only", "num_layers": 2, **LEARNED},
    "modern": MODERN,
    "modern, scaled": {**MODERN, **SCALED, **LEARNED},
    "t5gemma": {**MODERN, "family": "t5gemma", "output_softcap": None},
    "t5gemma2": {"family": "t5gemma2", "num_layers": 2},
    "double_decoder": {"family": "double_decoder", **STACKS},
    "gemma": {**DECODER, **NORMS, "positions": "rotary", "scale_embedding": True},
}
OPTIMIZERS = {
    "adamw": ({}, 1.0),
    "adamw_scale": ({}, 0.5),
    "adafactor": ({}, 0.5),
    "adafactor without scale": ({"multiply_by_parameter_scale": False}, 1.0),
    "muon": ({}, 0.5),
    "muon original": ({"adjust_lr_fn": "original", "adamw_learning_rate": 1e-3}, 0.0),
}


def config(family, width, base=None, **changes):
    """The family at `width`: heads of 16 and layers of 2 · d_model. `base`: the base width of muP; None: without."""
    widths = {"d_model": width, "num_heads": width // 16, "d_ff": 2 * width}
    values = {"dropout_rate": 0.0, **FAMILIES[family], "vocab_size": 90, "mup": base and {"base_width": base}}
    if "encoder" in values:
        values |= {stack: {**values[stack], **widths} for stack in ("encoder", "decoder")}
        return models.parse({**values, **changes})
    return models.parse({**values, **widths, **changes})


def built(family, width, base=None, **changes):
    torch.manual_seed(0)
    return models.build(config(family, width, base, **changes))


def batch():
    row = ids(3, 12, vocabulary=90)
    return {"encoder_input_ids": row, "labels": row.roll(-1, 1)}


@each("family", FAMILIES)
def test_at_the_base_width_it_is_the_standard_model_to_the_bit(family):
    standard, same = built(family, BASE), built(family, BASE, BASE)
    for (name, one), other in zip(standard.state_dict().items(), same.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    settings = run_config(optimizer={"learning_rate": 1e-2, "weight_decay": 0.1}).optimizer
    losses = []
    for model in (standard, same):
        optimizer = optimizers.build(model, settings)
        for _ in range(2):
            found = model(**batch())
            loss = sum(values.sum() for values in found.values())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == losses[1]


def is_hidden(name):
    """Whether a parameter is a matrix between layers, by its name."""
    inner = r"(attention\.[qkvo]|feed_forward\.w\w+|bridge\.linear|transform)\.weight$"
    return re.search(inner, name) is not None


@each("family", FAMILIES)
def test_deviations_follow_the_table(family):
    wide, base = built(family, WIDE, BASE), dict(built(family, BASE).named_modules())
    checked = 0
    for path, module in wide.named_modules():
        if not isinstance(module, Linear | Embedding):
            continue
        hidden = is_hidden(f"{path}.weight")
        expected = base[path].std * (M**-0.5 if hidden else 1)
        assert module.std == pytest.approx(expected), path
        drawn = module.weight.numel()
        assert module.weight.std().item() == pytest.approx(expected, rel=5 / math.sqrt(drawn) + 0.02), path
        checked += hidden
    assert checked >= 12


@each("family, name", [*((family, "adamw") for family in FAMILIES), *(("t5", name) for name in OPTIMIZERS)][1:])
def test_every_parameter_is_in_one_group_with_the_exact_rate(family, name):
    changes, exponent = OPTIMIZERS[name]
    model = models.meta_model(config(family, WIDE, BASE))
    rule = {"match": ["embeddings"], "learning_rate": 0.25}
    given = {"name": name.split()[0], "learning_rate": 0.5, "weight_decay": 0.1, "groups": [rule], **changes}
    settings = run_config(optimizer=given).optimizer
    found = {}
    for group in parameter_groups(model, settings):
        for parameter, _ in group["params"]:
            assert parameter not in found, "in two groups"
            found[parameter] = group["base_rate"], group["weight_decay"]
    of_kind = kinds(model)
    for parameter, _ in model.named_parameters():
        vectors = changes.get("adamw_learning_rate", 0.5)
        rate = 0.5 * M**-exponent if is_hidden(parameter) else 0.25 if of_kind[parameter] == "embeddings" else vectors
        assert found[parameter] == (rate, 0.1), parameter


@each("family", FAMILIES)
def test_logits_are_divided_by_the_widening(family):
    """A tied T5 multiplies by d_model^-½ already; its base does so too, so that m^-½ is left."""
    with_mup, without = built(family, WIDE, BASE).eval(), built(family, WIDE).eval()
    without.load_state_dict(with_mup.state_dict())
    states = torch.randn(2, 5, WIDE, generator=torch.Generator().manual_seed(0))
    before = getattr(with_mup, "before_head", lambda x: x)
    power = -0.5 if family == "t5-tied" else -1.0
    assert torch.equal(with_mup.lm_head(before(states)), M**power * without.lm_head(before(states)))
    if family == "t5-tied":
        expected = F.linear(states * BASE**-0.5 / M, with_mup.lm_head.weight)
        assert torch.allclose(with_mup.lm_head(before(states)), expected, rtol=1e-5, atol=1e-6)


def test_a_width_may_be_any_multiple_of_whole_heads():
    assert config("decoder_only", 128, 48).widening == pytest.approx(8 / 3)  # 3 heads of 16 there, 8 here
    assert config("decoder_only", 16, 32).widening == 0.5  # also below the base


@each(
    "family, changes, said",
    [
        ("bart", {"num_heads": 2}, "mup: num_heads 2 would be 0.5 at base_width 32; heads keep their width"),
        ("t5", {"num_heads": 6}, "mup: num_heads 6 would be 1.5 at base_width 32"),
        ("decoder_only", {"d_ff": 130}, "mup: d_ff 130 would be 32.5 at base_width 32"),
        ("autoregressive", {"num_cross_heads": 2}, "mup: num_cross_heads 2 would be 0.5 at base_width 32"),
        (
            "t5gemma",
            {"encoder": {"d_model": 66, "num_heads": 6, "d_ff": 64, "num_layers": 1, "head_dim": 16}},
            "mup: encoder.d_model 66 would be 16.5 at base_width 32",
        ),
    ],
)
def test_a_base_without_whole_heads_is_refused_in_a_line(family, changes, said):
    with pytest.raises(ValidationError) as caught:
        config(family, 128, 32, **changes)
    (problem,) = caught.value.errors()
    assert said in problem["msg"]
    assert "\n" not in problem["msg"]


# Exports.


@each("family", FAMILIES)
def test_an_export_computes_the_same_without_mup(family):
    """In fp64, which also holds 1 + a weight of fp32 to the bit. m and its root are powers of two."""
    model, row = randomise(built(family, WIDE, BASE), std=0.2).double(), batch()["encoder_input_ids"]
    weights, plain = without_mup(hf_model_of(model.config), model.state_dict(), model.config)
    assert plain == model.config.model_copy(update={"mup": None})
    same = models.build(plain).eval().double()
    same.load_state_dict(weights)
    with torch.no_grad():
        assert torch.equal(logits_of(model, row, row), logits_of(same, row, row))


def test_what_transformers_cannot_express_is_refused_in_a_line():
    model = built("autoregressive", WIDE, BASE, subtract_positions="without_norm")
    with pytest.raises(UserError, match="mup: no norm directly before"):
        without_mup(hf_model_of(model.config), model.state_dict(), model.config)
