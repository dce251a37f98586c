"""Fingerprints of weights: parts add up, and a changed bit shows."""

import torch

from pretrain.engine.checkpoint import engine_state
from tests.support import tables
from tests.support.small_runs import flip


@tables.each("dtype", [torch.float32, torch.bfloat16])
def test_the_sums_of_parts_are_those_of_the_whole(dtype):
    values = torch.randn(2_100_003, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = engine_state.fingerprint(values)
    parts = [(0, 7), (7, 1_500_000), (1_500_000, len(values))]
    assert torch.equal(sum(engine_state.fingerprint(values[first:last], first) for first, last in parts), whole)
    for bit in range(8 * values.element_size()):
        flipped = values.clone()
        flip(flipped, 2_100_001, bit)
        assert not torch.equal(engine_state.fingerprint(flipped), whole), bit
    swapped = values.clone()
    swapped[[5, 6]] = values[[6, 5]]
    assert not torch.equal(engine_state.fingerprint(swapped), whole)
