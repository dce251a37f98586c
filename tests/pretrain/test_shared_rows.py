"""Examples that share rows cost what they cost in rows of their own: the same losses and gradients."""

import numpy as np
import torch

from data_pipeline.loading.batches import as_batch
from data_pipeline.objectives.objective import Examples, Padded
from data_pipeline.packing.examples import balanced
from tests.pretrain.small_models import ENCODER_DECODERS, VOCABULARY, gradients, made
from tests.tables import each

LENGTHS = [(30, 8), (12, 20), (25, 3), (7, 7), (18, 12)]


def examples(encoder_only: bool) -> Examples:
    generator = np.random.default_rng(0)
    inputs, targets = (np.array(side) for side in zip(*LENGTHS, strict=True))
    targets = inputs if encoder_only else targets
    sides = [Padded(generator.integers(5, VOCABULARY, (5, n.max())).astype(np.uint16), n) for n in (inputs, targets)]
    return Examples(*sides, predicted=generator.random(sides[1].values.shape) < 0.3 if encoder_only else None)


@each("name", [*ENCODER_DECODERS, "roberta"])
def test_losses_and_gradients_are_those_of_rows_of_their_own(name):
    model = made(name)
    apart = examples(name == "roberta")
    shared = balanced(apart, 3)
    assert len(shared.inputs.lengths) == 2
    found = []
    for given in (apart, shared):
        batch = as_batch(given, pad=model.config.pad_id)
        losses = model(**batch)["labels"]
        found.append([losses[batch["labels"] != -100].sort().values, *gradients(model, losses.sum()).values()])
    for own, together in zip(*found, strict=True):
        torch.testing.assert_close(together, own, rtol=1e-9, atol=1e-10)
