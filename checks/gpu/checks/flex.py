"""FlexAttention, cuDNN and FlashAttention of PyTorch beside this project's kernels, in the forms of T5 v1.1 base: how
far from fp32, whether gradients repeat to the bit, and how fast. FlexAttention has no dropout, on a CPU no gradients.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from checks.gpu.checks.attention import Form, forms
from checks.gpu.checks.kernels import LIMITS
from checks.gpu.report import Report
from pretrain.models.functional.attention_backends import Pattern, eager, flash

FORMS = {**forms(512, 114), "no bias": Form(512, 512, biased=False, causal=False)}
WIDTH = 64  # d_kv
ROWS, HEADS = 128, 12  # on a CPU 2 each
NAMES = ("output", "gradient of q", "gradient of k", "gradient of v", "gradient of the bias")
Attention = Callable[..., Tensor]  # of queries, keys, values and, if there is a bias, its diagonals


def flex(report: Report) -> None:
    if not report.cuda:
        report.skip("gradients", "FlexAttention has none on a CPU")
        report.skip("this project's kernels, cuDNN's, times", "no GPU")
    for name, form in FORMS.items():
        with report.part(name):
            for side, attention in attentions(form, report).items():
                with report.part(f"{name}, {side}"):
                    errors = distances(form, attention, report)
                    report.row("errors", form=name, of=side, **errors)
                    report.expect(f"{name}, {side}: near fp32", max(errors.values()) < LIMITS[_dtype(report)], errors)
                    if report.cuda:
                        _measure(report, name, side, form, attention)


def attentions(form: Form, report: Report) -> dict[str, Attention]:
    """What computes the form on this device."""
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, form.queries, form.keys, report.kind)

    def flexible(*inputs: Tensor) -> Tensor:
        return by_flex(*inputs, block_mask=causal if form.causal else None)

    if not report.cuda:
        return {"flex": flexible}
    found: dict[str, Attention] = {
        "kernels": lambda q, k, v, bias=None: flash(q, k, v, Pattern(bias, None, form.causal), WIDTH**-0.5, 0.0),
        "flex": torch.compile(flexible, dynamic=False),
    }
    if not form.biased:
        found |= {"flash": partial(_by_sdpa, SDPBackend.FLASH_ATTENTION)}
        found |= {"cudnn": partial(_by_sdpa, SDPBackend.CUDNN_ATTENTION)}
    return found


def by_flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, block_mask: object = None) -> Tensor:
    """`bias` (heads, queries + keys − 1) holds that of query i and key j at queries − 1 − i + j."""
    last = q.size(2) - 1

    def biased(score: Tensor, row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score if bias is None else score + bias[head, last - i + j]

    return flex_attention(q, k, v, score_mod=biased, block_mask=block_mask, scale=WIDTH**-0.5)


def _by_sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, scale=WIDTH**-0.5)


def distances(form: Form, attention: Attention, report: Report) -> dict[str, float]:
    """The relative distances of the output and, on a GPU, of the gradients from those in fp32."""
    *inputs, along = drawn(form, report)
    pattern = Pattern(None, None, form.causal)

    def defined(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        matrix = pattern._replace(diagonals=bias).matrix(form.queries, form.keys, q.dtype, q.device)
        return eager(q, k, v, matrix, False, WIDTH**-0.5, 0.0)

    found = _results(attention, inputs, along, report)
    exact = _results(defined, [one.float() for one in inputs], along.float(), report)
    pairs = zip(found, exact, strict=True)
    return dict(zip(NAMES, (float((one.float() - other).norm() / other.norm()) for one, other in pairs), strict=False))


def _results(attention: Attention, inputs: list[Tensor], along: Tensor, report: Report) -> list[Tensor]:
    """The output and, on a GPU, the gradients."""
    inputs = [one.detach().requires_grad_(report.cuda) for one in inputs]
    output = attention(*inputs)
    return [output.detach(), *(torch.autograd.grad(output, inputs, along) if report.cuda else ())]


def drawn(form: Form, report: Report) -> list[Tensor]:
    """Queries, keys, values (rows, heads, length, d_kv), as a layer's projections lie in memory; the diagonals of the
    bias in fp32, if there is one; the gradient of the output."""
    generator = torch.Generator(report.device).manual_seed(0)
    rows, heads = (2, 2) if report.small else (ROWS, HEADS)
    lengths = form.queries, form.keys, form.keys, form.queries
    *inputs, along = (
        torch.randn(rows, length, heads, WIDTH, generator=generator, device=report.device, dtype=_dtype(report))
        for length in lengths
    )
    bias = torch.randn(heads, form.queries + form.keys - 1, generator=generator, device=report.device)
    return [*(one.transpose(1, 2) for one in inputs), *([bias] if form.biased else []), along.transpose(1, 2)]


def _dtype(report: Report) -> torch.dtype:
    return torch.bfloat16 if report.cuda else torch.float32


def _measure(report: Report, name: str, side: str, form: Form, attention: Attention) -> None:
    """Milliseconds forward, and forward and backward; whether the same gradients come twice."""
    from triton.testing import do_bench  # has no wheel for some machines

    *inputs, along = drawn(form, report)
    first, second = (_results(attention, inputs, along, report) for _ in range(2))
    repeats = {part: torch.equal(*pair) for part, *pair in zip(NAMES, first, second, strict=False)}
    if side == "kernels":
        report.expect(f"{name}: the same bits twice", all(repeats.values()), repeats)
    with torch.no_grad():
        forward = do_bench(lambda: attention(*inputs))
    both = do_bench(lambda: _results(attention, inputs, along, report))
    report.row("times", form=name, of=side, forward_ms=forward, both_ms=both, repeats=all(repeats.values()))
