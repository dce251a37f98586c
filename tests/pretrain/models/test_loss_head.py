"""The loss of each target: with its logits in hand, and of states in chunks as GPUs compute it."""

import itertools
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.prefetch import with_target_indices
from pretrain.config.model_config import ModelConfig
from pretrain.models.functional import arithmetic
from pretrain.models.functional.arithmetic import CrossEntropy, chunked_cross_entropy, soft_capped, token_losses
from pretrain.models.model import Head, shift_right
from tests.support.large_tensors import LargeTensors
from tests.support.tables import each

SETTINGS = [(0.0, 0.0), (0.05, 0.0), (0.0, 0.1), (0.05, 0.1)]


MOST = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.5e-2}


@each(
    "dtype, z_loss, smoothing, softcap, compiled, added",
    [
        *((dtype, *settings, None, False, 0) for dtype in MOST for settings in SETTINGS),
        *((dtype, 0.05, 0.1, 3.0, False, added) for dtype in (torch.float64, torch.float32) for added in (0, 4)),
        *((torch.float64, *settings, None, True, 4) for settings in SETTINGS),
        (torch.float32, *SETTINGS[-1], None, True, 4),
    ],
)
def test_chunks_give_the_losses_and_gradients_of_all_logits(
    dtype, z_loss, smoothing, softcap, compiled, added, monkeypatch
):
    """9 targets in chunks of 4, and some that are `added` and don't count. Compiled is what the compiler is given; the
    code that it makes is its own."""
    torch._dynamo.reset()
    graphs = cache(partial(torch.compile, fullgraph=True, backend="aot_eager"))
    monkeypatch.setattr(arithmetic, "_compiled", graphs)
    monkeypatch.setattr(arithmetic, "LOGITS_PER_CHUNK", 4 * 5000)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    inputs = draw(3, 5, 24), draw(5000, 24), draw(5000)
    labels = torch.randint(0, 5000, (3, 5), generator=generator)
    labels[0, 2:] = labels[2, :3] = IGNORE_INDEX
    along = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    indices = torch.cat([(labels.flatten() != IGNORE_INDEX).nonzero()[:, 0], torch.full((added,), 2)])
    settings = CrossEntropy(z_loss, smoothing, softcap, compiled)
    found = chunked_cross_entropy(*inputs, labels, settings, indices if added else None)
    assert not found[labels == IGNORE_INDEX].any()
    exact = [one.detach().double().requires_grad_() for one in inputs]
    logits = F.linear(*exact)
    defined = token_losses(logits if softcap is None else soft_capped(logits, softcap), labels, z_loss, smoothing)
    assert (found.double() - defined).norm() / defined.norm() < MOST[dtype]
    for losses_to_sum in (lambda losses: 0.3 * losses.sum(), lambda losses: (losses * along).sum()):
        gradients, expected = (
            torch.autograd.grad(losses_to_sum(losses), of, retain_graph=True)
            for losses, of in ((found, inputs), (defined, exact))
        )
        for one, other in zip(gradients, expected, strict=True):
            assert (one.double() - other).norm() / other.norm() < MOST[dtype]


def test_compiled_losses_know_the_vocabulary_and_the_settings_but_not_the_rows(monkeypatch):
    """For variables a GPU's kernel would divide by the vocabulary for each logit, and compute with settings in fp64."""
    given: list[list[Any]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        given.append(inputs)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    losses_of = arithmetic._compiled.__wrapped__(arithmetic._losses)
    for rows in (4, 6, 7, 9):
        losses_of(torch.randn(rows, 50), torch.arange(rows), 0.05, 0.1)
    first, *others = given
    assert len(others) == 1
    assert not any(isinstance(one, torch.SymInt) for one in first)
    (rows,) = (one for one in others[0] if not torch.is_tensor(one))
    (logits,) = (one for one in others[0] if torch.is_tensor(one) and one.dim() == 2)
    assert (logits.size(0), logits.size(1)) == (rows, 50)
    assert isinstance(rows, torch.SymInt)


class Products(TorchDispatchMode):
    """Counts the products of matrices."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


def test_the_gradient_of_a_sum_multiplies_no_logits_again():
    """It has three products: logits, and the gradients of states and matrix. Losses alone have one."""
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(100, 4, requires_grad=True)
    labels = torch.arange(6)

    def losses() -> torch.Tensor:
        return chunked_cross_entropy(x, weight, None, labels, CrossEntropy())

    with Products() as products:
        torch.autograd.grad(losses().sum() / 7, (x, weight))
    assert products.count == 3
    with Products() as products, torch.no_grad():
        losses()
    assert products.count == 1


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


def test_a_batch_knows_the_places_of_its_targets_before_it_is_on_the_device():
    labels = torch.tensor([[5, IGNORE_INDEX, 6], [IGNORE_INDEX, IGNORE_INDEX, 7]])
    assert with_target_indices({"labels": labels})["target_indices"].tolist() == [0, 2, 5]


# The loss of each target, compared with PyTorch's cross-entropy


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Makes even small batches take several parts, of four targets; the last is not full."""
    monkeypatch.setattr(arithmetic, "_rows_at_a_time", lambda logits: 4)


def batch(rows=3, length=5, vocabulary=17, dtype=torch.float32, scale=3.0, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(rows, length, vocabulary, generator=generator)).to(device, dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows, length), generator=generator).to(device)
    labels[0, 3:] = IGNORE_INDEX
    labels[2, 0] = IGNORE_INDEX
    return logits, labels


@each(
    "dtype, most, rounding, z_loss, smoothing",
    [
        (*dtype, *settings)
        for dtype in [(torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 1e-6), (torch.bfloat16, 1e-5, 2**-8)]
        for settings in SETTINGS
    ],
)
def test_losses_and_gradients_are_pytorchs(dtype, most, rounding, z_loss, smoothing, device):
    """The gradient is of a weighted sum over targets; in bf16 only the gradient itself is rounded."""
    logits, labels = batch(dtype=dtype, device=device)
    losses, exact = token_losses(logits, labels, z_loss, smoothing), logits.double()
    expected = F.cross_entropy(exact.transpose(1, 2), labels, reduction="none", label_smoothing=smoothing)
    expected = expected + (z_loss * exact.logsumexp(dim=-1).square()).masked_fill(labels == IGNORE_INDEX, 0.0)
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


def test_no_tensor_holds_the_logits_of_more_than_a_few_targets(monkeypatch):
    """Of 64 targets, forward and backward."""
    monkeypatch.setattr(arithmetic, "LOGITS_PER_CHUNK", 8 * 1000)
    x, weight = torch.randn(64, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with LargeTensors(1) as watched:
        chunked_cross_entropy(x, weight, None, torch.arange(64), CrossEntropy()).sum().backward()
    assert max(one.numel() for one in watched.made.values()) == 8 * 1000
