"""Examples that share rows cost what they cost in rows of their own: the same losses and gradients."""

import numpy as np
import pytest
import torch

from data_pipeline.loading.batches import as_batch
from data_pipeline.objectives import Examples, Padded
from data_pipeline.packing.examples import balanced
from pretrain import models

STACKS = {"num_heads": 2, "d_ff": 32, "num_encoder_layers": 1, "num_decoder_layers": 1}
STACK = {"d_model": 16, "num_heads": 2, "d_ff": 32, "num_layers": 2}
MODELS = {
    "t5": {**STACKS, "d_kv": 8},
    "t5 with rotations": {**STACKS, "d_kv": 8, "positions": "rotary"},
    "bart": {**STACKS, "max_positions": 40},
    "vanilla": STACKS,
    "modern": {"encoder": STACK, "decoder": {**STACK, "num_layers": 1}},
    "t5gemma": {"encoder": {**STACK, "d_model": 20}, "decoder": STACK, "sliding_window": 6},
    "t5gemma2 with windows": {
        "num_heads": 2,
        "d_ff": 32,
        "num_layers": 2,
        "sliding_window": 6,
        "full_attention_every": 2,
    },
    "encoder_only": {
        "num_heads": 2,
        "d_ff": 32,
        "num_layers": 1,
        "max_positions": 40,
        "next_sentence": False,
        "num_token_types": 0,
    },
}
LENGTHS = [(30, 8), (12, 20), (25, 3), (7, 7), (18, 12)]


def examples(family: str) -> Examples:
    generator = np.random.default_rng(0)
    inputs, targets = (np.array(side) for side in zip(*LENGTHS, strict=True))
    targets = inputs if family == "encoder_only" else targets
    sides = [Padded(generator.integers(5, 50, (5, n.max())).astype(np.uint16), n) for n in (inputs, targets)]
    predicted = generator.random(sides[1].values.shape) < 0.3 if family == "encoder_only" else None
    return Examples(*sides, predicted=predicted)


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_rows_of_their_own(name):
    family, *_ = name.split()
    torch.manual_seed(0)
    width = {} if "encoder" in MODELS[name] else {"d_model": 16}
    settings = {"family": family, "vocab_size": 50, **width, "dropout_rate": 0.0, **MODELS[name]}
    model = models.build(models.parse(settings)).double()
    apart = examples(family)
    shared = balanced(apart, 3)
    assert len(shared.inputs.lengths) == 2
    found = []
    for given in (apart, shared):
        batch = as_batch(given, pad=0)
        losses = model(**batch)["labels"]
        model.zero_grad()
        losses.sum().backward()
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        found.append([losses[batch["labels"] != -100].sort().values, *gradients])
    for own, together in zip(*found, strict=True):
        torch.testing.assert_close(together, own, rtol=1e-9, atol=1e-10)
