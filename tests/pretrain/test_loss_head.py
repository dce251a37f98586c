"""The loss of states in chunks, as GPUs compute it."""

import itertools
from functools import cache, partial

import torch
from torch.utils.flop_counter import FlopCounterMode

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.prefetch import with_target_indices
from pretrain.config.models import ModelConfig
from pretrain.functional import chunked_cross_entropy
from pretrain.functional.cross_entropy import indices_of_targets, token_losses
from pretrain.models.model import Head
from tests.pretrain import loss_cases
from tests.tables import each

SETTINGS = [(0.0, 0.0), (0.05, 0.0), (0.0, 0.1), (0.05, 0.1)]


MOST = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.5e-2}


@each(
    "dtype, z_loss, smoothing, softcap",
    [
        *((dtype, *settings, None) for dtype in MOST for settings in SETTINGS),
        *((dtype, 0.05, 0.1, 3.0) for dtype in (torch.float64, torch.float32)),
    ],
)
def test_chunks_give_the_losses_and_gradients_of_all_logits(dtype, z_loss, smoothing, softcap):
    assert max(loss_cases.errors("cpu", dtype, z_loss, smoothing, False, softcap)) < MOST[dtype]


@each("z_loss, smoothing", SETTINGS)
def test_compiled_chunks_give_the_losses_and_gradients_of_all_logits(z_loss, smoothing, monkeypatch):
    """What the compiler is given; the code that it makes is its own."""
    graphs = cache(partial(torch.compile, dynamic=True, fullgraph=True, backend="aot_eager"))
    monkeypatch.setattr(chunked_cross_entropy, "_compiled", graphs)
    torch._dynamo.reset()
    for dtype in (torch.float64, torch.float32):
        assert max(loss_cases.errors("cpu", dtype, z_loss, smoothing, True)) < MOST[dtype]


@each("counted, softcap", itertools.product((0, 2, 11, 12), (None, 3.0)))
def test_positions_without_a_target_change_no_loss_and_no_gradient(counted, softcap):
    """Some are left out, and few are computed for nothing; both give what `token_losses` does."""
    generator = torch.Generator().manual_seed(0)
    head = Head(8, 50, std=1.0, bias=True, softcap=softcap).double()
    x = torch.randn(3, 4, 8, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(50, (12,), generator=generator)
    labels[torch.randperm(12, generator=generator)[counted:]] = IGNORE_INDEX
    config = ModelConfig(family="none", z_loss=0.05, label_smoothing=0.1)
    losses = head(x, labels.view(3, 4), config)
    expected = token_losses(head(x), labels.view(3, 4), 0.05, 0.1)
    torch.testing.assert_close(losses, expected)
    weights = torch.randn(3, 4, generator=generator)
    inputs = (x, head.weight, head.bias)
    for found, same in zip(
        *(torch.autograd.grad((of * weights).sum(), inputs) for of in (losses, expected)), strict=True
    ):
        torch.testing.assert_close(found, same)


def test_positions_without_a_target_take_no_time_in_the_output_matrix():
    x, labels = torch.randn(1, 40, 8), torch.full((1, 40), IGNORE_INDEX)
    labels[0, :10] = 1
    head = Head(8, 50, std=1.0)
    with FlopCounterMode(display=False) as counted:
        head(x, labels, ModelConfig(family="none"))
    assert counted.get_total_flops() == 2 * 10 * 8 * 50


def test_no_tensor_holds_the_logits_of_more_than_a_chunk():
    assert loss_cases.largest_tensor("cpu") == 8 * 1000


def test_a_batch_knows_the_places_of_its_targets_before_it_is_on_the_device():
    labels = torch.tensor([[5, IGNORE_INDEX, 6], [IGNORE_INDEX, IGNORE_INDEX, 7]])
    assert with_target_indices({"labels": labels})["target_indices"].tolist() == [0, 2, 5]
    assert indices_of_targets(labels).tolist() == [0, 2, 5]
