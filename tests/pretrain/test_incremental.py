"""The fast step of decoding, compared with the models' own code."""

import itertools
import random

import torch
import torch.nn.functional as F

from pretrain.generation.decoders import start
from pretrain.generation.incremental import PackedModel
from pretrain.generation.packed_linear import can_pack, packed_linear
from pretrain.generation.paged_cache import PAGE
from pretrain.models import build, parse
from pretrain.models.layers import Linear
from tests.slow import slow
from tests.tables import each

SIZES = {"vocab_size": 90, "pad_vocab_to_multiple_of": 64, "d_model": 32, "d_ff": 48, "num_heads": 4}
STACKS = {"num_encoder_layers": 2, "num_decoder_layers": 2}
STACK = {"d_model": 32, "d_ff": 48, "num_heads": 4, "num_key_value_heads": 2, "num_layers": 2}
DECODER = {"family": "decoder_only", "num_layers": 2}
OTHER_LAYERS = {"norm": "rms_around_one", "activation": "geglu", "biases": False, "tie_embeddings": False}
OTHER_SCALES = {"head_dim": 10, "query_pre_attn_scalar": 5, "scale_embedding": True}
WINDOWS = {"num_layers": 3, "sliding_window": 4, "full_attention_every": 3, "window_rope_base": 100.0}
OTHER_NORMS = {"num_key_value_heads": 2, "qk_norm": True, "norm_after": True, "output_softcap": 30.0}
TIED = {"tie_embeddings": "output"}
KINDS = {
    **{
        f"t5 {positions}": {"family": "t5", **STACKS, "d_kv": 6, "positions": positions}
        for positions in ("relative", "rotary", "alibi", "sinusoidal", "learned")
    },
    "t5 v1.0": {"family": "t5", **STACKS, "d_kv": 6, "feed_forward": "relu", "tie_embeddings": True},
    "bart": {"family": "bart", **STACKS, "scale_embedding": True},
    "vanilla": {"family": "vanilla", **STACKS},
    **{f"decoder_only {one}": {**DECODER, "positions": one} for one in ("learned", "rotary", "alibi", "sinusoidal")},
    "decoder_only of another form": {**DECODER, "positions": "rotary", **OTHER_LAYERS, **OTHER_SCALES},
    "decoder_only with windows": {**DECODER, "positions": "rotary", **WINDOWS, **OTHER_NORMS},
    "decoder_only learned and subtracted": {**DECODER, "positions": "learned", "subtract_positions": "with_norm"},
    "modern": {"family": "modern", "encoder": {**STACK, "d_model": 48}, "decoder": STACK, "sliding_window": 4, **TIED},
    "t5gemma": {"family": "t5gemma", "encoder": STACK, "decoder": STACK, "sliding_window": 4, "attention_softcap": 5.0},
}


FIRST = ("t5 relative", "t5 alibi", "bart", "decoder_only rotary", "decoder_only learned and subtracted", "t5gemma")


def model_of(kind):
    values = {**SIZES, **KINDS[kind]}
    if "encoder" in values:
        values = {name: value for name, value in values.items() if name not in ("d_model", "d_ff", "num_heads")}
    if "learned" in kind or values["family"] == "bart":
        values["max_positions"] = 100
    built = build(parse(values))
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in (*built.parameters(), *built.buffers()):
            tensor.add_(torch.randn_like(tensor), alpha=0.3)
    return built.double().eval()


@each(
    "kind, padded",
    [
        *((kind, True) for kind in FIRST),
        *slow(*((kind, True) for kind in KINDS if kind not in FIRST)),
        *slow(*((kind, False) for kind in ("t5 relative", "decoder_only rotary", "t5gemma"))),
    ],
)
@torch.no_grad()
def test_each_step_equals_the_models_own_code(kind, padded):
    """Hypotheses change places at random for three pages of steps, and examples leave."""
    model = model_of(kind)
    ids = torch.randint(3, 90, (4, 20), generator=torch.Generator().manual_seed(0))
    mask = None
    if padded:
        mask = (torch.arange(20) < torch.tensor([20, 3, 11, 15])[:, None]).long()
        mask = mask.flip(1) if model.config.family == "decoder_only" else mask
        ids = ids.masked_fill(mask == 0, 0)
    draws = random.Random(0)
    fast, plain = start(model, ids, mask), start(model, ids, mask, plain=True)
    tokens, examples, width = fast.prompt, 4, 1
    for step in range(75):
        found, expected = fast.step(tokens), plain.step(tokens)
        torch.testing.assert_close(found, expected[:, :90], rtol=1e-9, atol=1e-9)
        if step > 2:
            origin = torch.tensor([[draws.randrange(width) for _ in range(3)] for _ in range(examples)])
            fast.branch(origin)
            plain.branch(origin)
            width = 3
        if step in (10, 50):
            stay = torch.tensor({10: [0, 2, 3], 50: [1]}[step])
            fast.keep(stay)
            plain.keep(stay)
            examples = len(stay)
        tokens = torch.tensor([[draws.randrange(3, 90)] for _ in range(examples * width)])


@torch.no_grad()
def test_what_no_hypothesis_sees_is_dropped():
    model = build(parse({**SIZES, **KINDS["t5 relative"]})).eval()
    decoder = start(model, torch.full((2, 5), 7), None)
    decoder.step(decoder.prompt)
    for _ in range(10 * PAGE):  # all four hypotheses go on from the third
        decoder.branch(torch.full((2, 4), min(2, decoder.cache.seen.size(1) - 1)))
        decoder.step(torch.full((8, 1), 9))
    assert decoder.cache.used <= 10 * PAGE + 4 * PAGE  # one entry a token, and a page
    assert (decoder.cache.seen.sum(dim=2) == 10 * PAGE + 1).all()


def test_weights_that_zero_3_holds_elsewhere_are_not_copied():
    model = build(parse({**SIZES, **KINDS["bart"]}))
    assert PackedModel.of(model) is not None
    model.decoder.layers[0].feed_forward.wi.weight.data = torch.empty(0)
    assert PackedModel.of(model) is None


TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float64: 0}
SMALL, LARGE = (64, 96), (1100, 1000)


@each("sizes, rows, bias, dtype", itertools.product((SMALL, LARGE), (1, 3, 32), (False, True), TOLERANCES))
@torch.no_grad()
def test_products_are_those_of_linear_layers(sizes, rows, bias, dtype):
    (inputs, outputs), tolerance = sizes, TOLERANCES[dtype]
    torch.manual_seed(0)
    first = Linear(inputs, outputs, inputs**-0.5, bias).to(dtype)
    if bias:
        first.bias.normal_()
    x = torch.randn(rows, inputs, dtype=dtype)
    found = packed_linear(first.weight, first.bias)(x)
    if dtype == torch.bfloat16 and not can_pack(dtype):  # PyTorch's own product, which may round more often
        assert torch.equal(found, F.linear(x, first.weight, first.bias))
        return
    expected = F.linear(x.double(), first.weight.double(), None if first.bias is None else first.bias.double())
    # the sum is rounded once; it is about 1, and up to 5
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance + 1e-12)
