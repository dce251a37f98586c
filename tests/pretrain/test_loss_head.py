"""The loss of each target, with its logits in hand or of states in chunks, as GPUs compute it."""

import itertools
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.prefetch import with_target_indices
from pretrain.config.models import ModelConfig
from pretrain.functional import cross_entropy
from pretrain.functional.cross_entropy import indices_of_targets, token_losses
from pretrain.models.model import Head, shift_right
from tests.pretrain import loss_cases
from tests.pretrain.loss_cases import LargeTensors
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
    monkeypatch.setattr(cross_entropy, "_compiled", graphs)
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


# The loss of each target, compared with PyTorch's cross-entropy


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Makes even small batches take several parts, of which the last is not full."""
    monkeypatch.setattr(cross_entropy, "_rows_at_a_time", lambda logits: 4)


def batch(rows=3, length=5, vocabulary=17, dtype=torch.float32, scale=3.0, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(rows, length, vocabulary, generator=generator)).to(device, dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows, length), generator=generator).to(device)
    labels[0, 3:] = IGNORE_INDEX
    labels[2, 0] = IGNORE_INDEX
    return logits, labels


def reference(logits, labels, z_loss, smoothing):
    logits = logits.double()
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", label_smoothing=smoothing)
    return losses + (z_loss * logits.logsumexp(dim=-1).square()).masked_fill(labels == IGNORE_INDEX, 0.0)


@each(
    "dtype, most, rounding, z_loss, smoothing",
    [
        (*dtype, *settings)
        for dtype in [(torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 1e-6), (torch.bfloat16, 1e-5, 2**-8)]
        for settings in [(0.0, 0.0), (0.05, 0.0), (0.0, 0.1), (0.05, 0.1)]
    ],
)
def test_losses_and_gradients_are_pytorchs(dtype, most, rounding, z_loss, smoothing, device):
    """The gradient is of a weighted sum over targets; in bf16 only the gradient itself is rounded."""
    logits, labels = batch(dtype=dtype, device=device)
    losses, expected = token_losses(logits, labels, z_loss, smoothing), reference(logits, labels, z_loss, smoothing)
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(losses.double(), expected, rtol=0, atol=most)
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    wanted, found = (torch.autograd.grad((of * weights).sum(), logits)[0] for of in (expected, losses))
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=0 if dtype != torch.bfloat16 else rounding, atol=rounding)
    assert found[labels == IGNORE_INDEX].count_nonzero() == 0
    assert (found[labels != IGNORE_INDEX] != 0).any(dim=-1).all()


def test_large_logits_stay_finite(device):
    logits, labels = batch(scale=1e4, device=device)
    losses = token_losses(logits, labels, z_loss=1e-4)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logits.grad.isfinite().all()


def test_no_more_memory_than_the_logits_and_their_gradient():
    """In fp32, the whole softmax of bf16 logits would be twice as large as they are; no such tensor may exist."""
    logits, labels = batch(rows=8, length=16, vocabulary=64, dtype=torch.bfloat16)
    size = logits.untyped_storage().nbytes()
    with LargeTensors(size // 2) as forward:
        total = token_losses(logits, labels, 1e-4, 0.1).sum()
    assert forward.made == {}
    with LargeTensors(size // 2) as backward:
        total.backward()
    assert len(backward.made) == 1
    assert logits.grad.untyped_storage().data_ptr() in backward.made
    with LargeTensors(size // 2) as naive:
        F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
    assert naive.made


def test_each_example_of_a_packed_row_starts_anew():
    labels = torch.tensor([[5, 1, 6, 7, 1, IGNORE_INDEX]])
    segments = torch.tensor([[1, 1, 2, 2, 2, 0]])
    assert shift_right(labels, 0, segments).tolist() == [[0, 5, 0, 6, 7, 0]]
