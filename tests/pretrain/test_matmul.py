"""Products in bf16 where the CPU has no arithmetic for it: sums in fp32 that are rounded once."""

import pytest
import torch

from pretrain.config.models import Heads
from pretrain.engine.optimizers.muon import orthogonal
from pretrain.models.attention import Attention
from pretrain.models.functional import arithmetic
from pretrain.models.functional.attention import eager
from pretrain.models.layers import LayerConfig
from tests.tables import each

HALF_A_STEP = 2.0**-8  # of a bf16 number, relative to it


@pytest.fixture(autouse=True)
def _no_arithmetic_for_bf16(monkeypatch):
    """This CPU is taken for one that doesn't multiply bf16."""
    monkeypatch.setattr(arithmetic, "MULTIPLIES_BF16", False)


def draw(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(torch.bfloat16).requires_grad_()


def assert_rounded_once(function, exact, *inputs):
    """Outputs and gradients are those of `exact`, rounded to bf16 after a sum in fp32 of some terms."""

    def results(form, inputs, along):
        output = form(*inputs)
        return [output.detach(), *torch.autograd.grad(output, inputs, along)]

    along = draw(*function(*inputs).shape, seed=9).detach()
    wide = [one.detach().double().requires_grad_() for one in inputs]
    sizes = [one.detach().abs().double().requires_grad_() for one in inputs]
    expected, magnitudes = results(exact, wide, along.double()), results(exact, sizes, along.abs().double())
    for one, other, terms in zip(results(function, inputs, along), expected, magnitudes, strict=True):
        assert one.dtype == torch.bfloat16
        assert ((one.double() - other).abs() <= HALF_A_STEP * other.abs() + 2.0**-18 * terms).all()


def test_a_cpu_that_multiplies_bf16_does_so_by_itself(monkeypatch):
    monkeypatch.setattr(arithmetic, "MULTIPLIES_BF16", True)
    x, weight, bias, summand = draw(2, 8, 48, seed=0), draw(40, 48, seed=1), draw(40, seed=2), draw(2, 8, 40, seed=3)
    assert torch.equal(arithmetic.linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
    assert torch.equal(arithmetic.matmul(x, weight.T), x @ weight.T)
    right = weight.T.expand(2, -1, -1)
    with torch.no_grad():
        found = arithmetic.addmm(summand, x, right, 0.5, 2.0)
        assert torch.equal(found, torch.baddbmm(summand, x, right, beta=0.5, alpha=2.0))
        assert torch.equal(
            arithmetic.addmm(summand[0], x[0], weight.T, 0.5, 2.0),
            torch.addmm(summand[0], x[0], weight.T, beta=0.5, alpha=2.0),
        )


@each(
    "function, exact, inputs",
    [
        (arithmetic.linear, torch.nn.functional.linear, [draw(3, 70, 48, seed=0), draw(40, 48, seed=1)]),
        (
            arithmetic.linear,
            torch.nn.functional.linear,
            [draw(3, 70, 48, seed=0), draw(40, 48, seed=1), draw(40, seed=2)],
        ),
        (arithmetic.matmul, torch.matmul, [draw(2, 33, 3, 16, seed=0).transpose(1, 2), draw(2, 3, 16, 21, seed=1)]),
        # a matrix for all rows gets the sum of their gradients
        (arithmetic.matmul, torch.matmul, [draw(4, 5, 6, seed=0), draw(1, 6, 7, seed=1)]),
    ],
)
def test_outputs_and_gradients_of_products_are_rounded_once(function, exact, inputs):
    assert_rounded_once(function, exact, *inputs)


def test_models_and_muon_multiply_by_these_functions():
    """On a CPU without arithmetic for bf16, none of their products is left to PyTorch's bf16."""
    torch.manual_seed(0)
    with Multiplied() as dtypes:
        attention = Attention(
            LayerConfig(Heads(d_model=24, d_ff=1, head_dim=8, num_heads=3), "relu", "rms", 1e-6, biases=True)
        ).to(torch.bfloat16)
        attention(draw(2, 5, 24, seed=0), draw(2, 7, 24, seed=1)).sum().backward()
        queries, keys, values = (draw(2, 3, 9, 8, seed=seed) for seed in range(3))
        eager(queries, keys, values, None, True, 1.0, 0.1).sum().backward()
        orthogonal(draw(12, 8, seed=0).detach(), 5)
        orthogonal(draw(2, 8, 12, seed=0).detach(), 5)
    assert set(dtypes.found) == {torch.float32}
    assert len(dtypes.found) > 30


class Multiplied(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the dtypes of all products within its block."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.dtype] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm"):
            self.found.append(args[-1].dtype)
        return function(*args, **(kwargs or {}))


def test_orthogonal_matrices_are_near_to_those_in_fp32():
    matrix = draw(24, 16, seed=0).detach()
    found, precise = orthogonal(matrix, 5).float(), orthogonal(matrix.float(), 5)
    assert (found - precise).abs().max() < 0.05
