"""Compares this project's attention on a GPU with PyTorch's: `python -m pretrain.models.functional.kernel_check`.

Standard input has the arguments of `find_problem` by name, as JSON. The exit code is 0 if there is no problem, else the
last line on standard error is the problem. A process of its own, since a kernel may hang, crash or leave a GPU's
context unusable.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.models.functional.attention_backends import Pattern, Window, attend, labels, using
from pretrain.models.kernels import Form

# Relative, in the L2 norm, against sums in fp32. bf16 rounds by up to 2⁻⁹: the inputs of the second product of each
# result, and the result itself. TF32 as much. For gradients, FlashAttention takes the weighted mean of the values from
# the rounded output: where a query sees two keys, or logits as large as 4, twice that is lost in the difference.
_TOLERANCE, _TOLERANCE_OF_FP32 = 4e-3, 1e-5
_SHORTEST, _LONGEST = 64, 1024  # tokens. Longer rows have more tiles of the same kind


def find_problem(forms: Sequence[Form], dtype: str, device: str, tf32: bool) -> str | None:
    """The problem with the kernels in one of the forms, in one line, if there is one. Any exception is one.

    `dtype` is the name of PyTorch's. `tf32`: products of fp32 are rounded to TF32.
    """
    torch.backends.cuda.matmul.allow_tf32 = tf32
    tolerance = _TOLERANCE_OF_FP32 if dtype == "float32" and not tf32 else _TOLERANCE
    try:
        for form in forms:
            name, error = max(
                _errors(form, getattr(torch, dtype), torch.device(device)).items(), key=lambda one: one[1]
            )
            if not error <= tolerance:
                return f"{name}: {error:.1e} away from PyTorch's, more than {tolerance:g}"
    except Exception as error:  # whatever a compiler, a driver or a kernel raises
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def _errors(form: Form, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Relative errors of the output and all gradients, for random numbers and two examples in each row. With dropout,
    only an output or gradient that isn't finite has one: ∞."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    rows = form.rows
    heads = form.heads
    d_kv = form.d_kv
    before, after = form.before, form.after
    queries, keys = (max(_SHORTEST, min(length, _LONGEST)) for length in (form.queries, form.keys))
    inputs = [draw(rows, length, heads, d_kv).transpose(1, 2) for length in (queries, keys, keys)]
    inputs[0] /= form.scale * d_kv**0.5  # logits of variance 1, as at a model's start
    inputs += [draw(heads, queries + keys - 1)] if form.biased else []
    examples = (
        torch.arange(length, device=device).mul(2).div(length, rounding_mode="floor") for length in (queries, keys)
    )
    seen = labels(queries, None, *(one.expand(rows, -1) for one in examples)) if form.masked else None
    window = None if before is None or after is None else Window(before, after)
    pattern = Pattern(None, seen, before is None and after is not None, window)
    along = draw(rows, heads, queries, d_kv)

    def results(backend: Any, dtype: torch.dtype, dropout: float) -> list[Tensor]:
        arguments = [one.to(dtype, copy=True).requires_grad_() for one in inputs]
        own = pattern._replace(diagonals=arguments[3] if form.biased else None)
        bias = own if backend == "triton" else own.matrix(queries, keys, dtype, device)
        with using(backend):
            output = attend(arguments[0], arguments[1], arguments[2], bias, False, form.scale, dropout, form.softcap)
        return [output.detach(), *torch.autograd.grad(output, arguments, along.to(dtype))]

    names = ["the output", *(f"the gradient of {name}" for name in ("queries", "keys", "values", "the bias"))]
    found, exact = results("triton", dtype, 0.0), results("sdpa", torch.float32, 0.0)
    errors = {
        name: float((one.float() - other).norm() / other.norm())
        for name, one, other in zip(names, found, exact, strict=False)
    }
    if form.dropout and not all(bool(one.isfinite().all()) for one in results("triton", dtype, form.dropout)):
        errors["dropout"] = float("inf")
    return errors


if __name__ == "__main__":
    arguments = json.load(sys.stdin)
    sys.exit(find_problem(**arguments | {"forms": [Form(**one) for one in arguments["forms"]]}))
