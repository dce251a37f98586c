"""The block-based double decoder: who sees whom, generation from caches, boundaries and FLOPs."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from data_pipeline.loading.batch_layout import BatchLayout
from pretrain.models.double_decoder import visible_in_blocks
from pretrain.models.flops import Sizes, count_flops, matrices
from tests.pretrain.rank_processes import each as each_on_ranks
from tests.pretrain.rank_processes import on_ranks
from tests.pretrain.small_models import MODELS, as_at_the_start, ids, made
from tests.pretrain.small_runs import engine_of, micro_batches, run_config
from tests.tables import each

NAME = "double_decoder"


def test_who_sees_whom_worked_by_hand():
    """Six tokens, blocks 0 0 1 1 2 2. The first token's state is a sink."""
    row = made(NAME).row(ids(1, 6), boundaries=torch.tensor([[2, 4]]))
    assert row.blocks.tolist() == [[0, 0, 1, 1, 2, 2]]
    own, across = ([query.nonzero().flatten().tolist() for query in mask[0, 0]] for mask in visible_in_blocks(row))
    assert own == [[0], [0, 1], [2], [2, 3], [4], [4, 5]]
    assert across == [[0], [0], [0, 1], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]


@torch.no_grad()
@each("prompt", [1, 2, 7])
def test_a_cache_changes_no_logits_and_the_encoder_reads_a_block_once_it_is_full(prompt):
    model, row = made(NAME, block_length=3, num_key_value_heads=2, activation="swiglu"), ids(2, 18)
    boundaries = torch.arange(prompt - 1, 18, 3).expand(2, -1)
    expected = model.decode(row, boundaries=boundaries)[:, prompt - 1 :]
    read = []
    model.encoder.register_forward_pre_hook(lambda _, given: read.append(given[0].size(1)))
    cache = model.new_cache()
    pieces = [model.decode(row[:, :prompt], cache), model.decode(row[:, prompt : prompt + 4], cache)]
    pieces += [model.decode(row[:, place : place + 1], cache) for place in range(prompt + 4, 18)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=0, atol=1e-10)
    closed = (18 - prompt) // 3
    # a prompt at once, the rest of its block, blocks
    assert read == [prompt, 2, *[3] * (closed - 1)]


def test_boundaries_follow_from_seed_and_step_and_each_texts_length():
    model = made(NAME).train()
    counts, places = set(), set()
    for step in range(300):
        model.begin_step(5, step)
        first = model.row(ids(1, 40)).blocks[0]
        counts.add(len(model._drawn))
        places |= {place for place in range(1, 40) if first[place] != first[place - 1]}
        assert first[-1] <= 7
    assert counts == set(range(2, 8))
    assert places == set(range(2, 39))
    drawn = model._drawn
    model.begin_step(6, 299)
    assert model._drawn != drawn
    model.begin_step(5, 299)
    assert model._drawn == drawn
    mask = (torch.arange(40) < torch.tensor([[40], [11], [3]])).long()
    together = model.row(ids(3, 40), mask).blocks
    for number, length in enumerate((40, 11, 3)):
        assert torch.equal(together[number, :length], model.row(ids(1, length)).blocks[0])
    blocks = model.eval().row(ids(1, 23)).blocks[0]
    assert torch.bincount(blocks).tolist() == [6, 4, 4, 4, 5]  # at equal distances: 4 is the mean of 2 to 7, rounded


def test_flops_are_those_of_products_and_of_pairs_that_a_mask_shows():
    """torch's products are over all pairs, twice as many as the convention counts in the decoder."""
    model = as_at_the_start(NAME)
    row = ids(1, 20)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(row, row)["labels"].sum().backward()
    hidden = 12 * 32 * 2 * 20**2
    assert counter.get_total_flops() - count_flops(model, Sizes.of_example(20, 20)) == hidden
    of_products = sum(6 * 20 * weight.numel() for _, rows, weight in matrices(model) if rows in ("inputs", "targets"))
    assert count_flops(model, Sizes.of_example(20, 20)) - of_products == 12 * 32 * 4 * 20**2  # the pairs of four layers
    seen = model.row(row)
    first = int((seen.blocks == 0).sum())  # those see the first token and its state
    assert sum(int(mask.sum()) for mask in visible_in_blocks(seen)) == 20 * 21 // 2 + first


def losses_of_steps(stage, micro_batch):
    config = run_config(stage, {**MODELS[NAME], "vocab_size": 100})
    layout = BatchLayout(dist.get_rank(), dist.get_world_size(), micro_batch, 8 // dist.get_world_size() // micro_batch)
    engine = engine_of(config)
    return [engine.step(step, 0, micro_batches(layout, step, 16, 16)).loss for step in range(4)]


@pytest.mark.slow
def test_every_zero_stage_and_micro_batch_has_the_same_boundaries():
    """Losses, half of them of rows of two lengths. Other boundaries would change them by more."""
    first, *others = on_ranks(2, each_on_ranks, losses_of_steps, [(1, 2), (2, 4), (3, 2)])[0]
    assert all(other == pytest.approx(first, abs=1e-6) for other in others)
