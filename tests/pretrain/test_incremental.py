"""Decoding with caches, compared with recomputation of all tokens."""

import random

import torch

from pretrain.generation.decoding import Decoder
from tests.pretrain.small_models import DECODERS, ENCODER_DECODERS, made
from tests.tables import each


@each("kind, padded", [*((kind, True) for kind in (*ENCODER_DECODERS, *DECODERS)), ("t5", False), ("gemma 3", False)])
@torch.no_grad()
def test_each_step_equals_recomputation(kind, padded):
    """Over more tokens than a window holds. Hypotheses change places at random, and examples leave."""
    model = made(kind)
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
        before = [layer[1].entries for layer in decoder._cache] if kind == "t5" else []
        decoder.select(origin)
        if len(origin) == len(rows):  # the input's keys and values stay in place while hypotheses move
            assert all(layer[1].entries is one for layer, one in zip(decoder._cache, before, strict=False))
        tokens = torch.tensor([[draws.randrange(3, 90)] for _ in origin])
        texts, rows = torch.cat([texts[origin], tokens], dim=1), rows[origin]
