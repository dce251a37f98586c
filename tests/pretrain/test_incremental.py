"""Decoding with caches, compared with recomputation of all tokens."""

import random

import torch

from pretrain.generation.decoding import Decoder
from pretrain.models import build, parse
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
    "autoregressive": {"family": "autoregressive", **STACKS, "max_positions": 100},
    "t5gemma": {"family": "t5gemma", "encoder": STACK, "decoder": STACK, "sliding_window": 4, "attention_softcap": 5.0},
}


FIRST = (
    "t5 relative",
    "t5 alibi",
    "bart",
    "decoder_only rotary",
    "decoder_only learned and subtracted",
    "t5gemma",
    "autoregressive",
)


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
def test_each_step_equals_recomputation(kind, padded):
    """Hypotheses change places at random, and examples leave."""
    model = model_of(kind)
    ids = torch.randint(3, 90, (4, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padded:
        mask = (torch.arange(20) < torch.tensor([20, 3, 11, 15])[:, None]).long()
        mask = mask if hasattr(model, "encode") else mask.flip(1)
        ids = ids.masked_fill(mask == 0, 0)
    draws = random.Random(0)
    decoder = Decoder(model, ids, mask if padded else None)
    tokens = decoder.prompt
    texts, rows = tokens, torch.arange(4)  # all tokens of each hypothesis, and its example
    for step in range(15):
        found = decoder.step(tokens)
        if hasattr(model, "encode"):
            expected = model.decode(texts, model.encode(ids[rows], mask[rows]), mask[rows])
        else:
            new = torch.ones(len(rows), texts.size(1) - 20, dtype=torch.long)
            expected = model.decode(texts, attention_mask=torch.cat([mask[rows], new], dim=1))
        torch.testing.assert_close(found, expected[:, -1], rtol=1e-9, atol=1e-9)
        if step == 2:  # three hypotheses for each example
            origin = torch.arange(4).repeat_interleave(3)
        elif step in (6, 10):
            origin = (rows[:, None] == torch.tensor({6: [0, 2, 3], 10: [2]}[step])).any(dim=1).nonzero()[:, 0]
        elif step > 2:
            origin = torch.tensor([row - row % 3 + draws.randrange(3) for row in range(len(rows))])
        else:
            origin = torch.arange(4)
        decoder.select(origin)
        tokens = torch.tensor([[draws.randrange(3, 90)] for _ in origin])
        texts, rows = torch.cat([texts[origin], tokens], dim=1), rows[origin]
