"""Chooses what computes attention, before the first step. On a GPU, this project's kernels must show that they do.

The forms of attention that the run's model takes are computed once by them and once by PyTorch, forward and backward.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from data_pipeline.foundation.errors import FailedError
from data_pipeline.loading.batches import Batch, TrainingBatches
from data_pipeline.loading.device import with_target_indices
from pretrain import models
from pretrain.functional.attention import attend, use, using
from pretrain.functional.attention_bias import Pattern, Window, labels
from pretrain.models import ModelConfig
from pretrain.trainer.trial_passes import full_rows
from pretrain.trainer.validate import ValidatedRun
from pretrain.zero.ranks import least

# Relative, in the L2 norm, against sums in fp32. bf16 rounds by up to 2⁻⁹: the inputs of the second product of each
# result, and the result itself.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float32: 1e-5}
TOLERANCE_OF_TF32 = 4e-3
_ROWS = 2  # of each form: a program of the kernels works on one head of one row
_LONGEST = 1024  # tokens: longer rows have more tiles of the same kind


def choose_attention(run: ValidatedRun, device: torch.device) -> str | None:
    """Takes what `compute.attention` asks for, the same on all ranks, which call this together.

    Returns why the kernels of this project aren't taken where `auto` would take them, in one line. Raises FailedError
    with it where they are asked for.
    """
    asked = run.config.compute.attention
    if device.type != "cuda" or asked in ("sdpa", "eager"):
        use(asked if asked in ("sdpa", "eager") else None)
        return None
    dtype = torch.bfloat16 if run.config.precision == "bf16" else torch.float32
    problem = find_problem(run.model, _rows(run), dtype, device)
    if least(int(problem is None), device):
        use("triton")
        return None
    use("sdpa")
    line = f"compute.attention: this project's kernels fail here: {problem or 'on another rank'}"
    if asked == "triton":
        raise FailedError(f"{line}; set auto or sdpa")
    return f"{line}; PyTorch's are taken"


def _rows(run: ValidatedRun) -> Iterator[Batch]:
    """The longest rows that the run may have, and its first."""
    plan = replace(run.plan, measured=min(_ROWS, run.plan.share))
    yield full_rows(run, plan.micro_batch)
    yield TrainingBatches(run.stream, plan.layout)[0].batch


def find_problem(config: ModelConfig, batches: Iterable[Batch], dtype: torch.dtype, device: torch.device) -> str | None:
    """The problem with the kernels for the model of `config` in training on `batches`, in one line, if there is one.

    Any exception is one, also of `batches`.
    """
    try:
        for call in calls(config, list(batches), dtype):
            name, error = max(_errors(call, device).items(), key=lambda item: item[1])
            tf32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
            tolerance = TOLERANCE_OF_TF32 if tf32 else TOLERANCE[dtype]
            if not error <= tolerance:
                return f"{name}: {error:.1e} away from PyTorch's, more than {tolerance:g}"
    except Exception as error:  # whatever a compiler, a driver or a kernel raises: the run goes on without them
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def calls(config: ModelConfig, batches: Sequence[Batch], dtype: torch.dtype) -> list[tuple]:
    """The arguments of the kernels' operator in a pass over the batches, on the meta device; each form of it once."""
    model = models.outline(config).to(dtype).train()
    found: dict[tuple, tuple] = {}
    with using("triton"), _Recorded() as recorded:
        for batch in batches:
            model(**{name: one.to("meta") for name, one in with_target_indices(batch).items()})
    for call in recorded.calls:
        queries, _, _, diagonals, hidden, seed, *settings = call
        form = queries.shape[1:2], queries.shape[3:], diagonals is None, len(hidden), seed is None, *settings
        found.setdefault(form, call)
    return list(found.values())


class _Recorded(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Mapping | None = None) -> Any:
        if function.name() == "encdec::flash_attention":
            self.calls.append(args)
        return function(*args, **(kwargs or {}))


def _errors(call: tuple, device: torch.device) -> dict[str, float]:
    """Relative errors of the output and all gradients in one form of attention, for random numbers and two examples in
    each row. With dropout, only an output or gradient that isn't finite has one: ∞."""
    q, k, _, diagonals, hidden, _, before, after, scale, softcap, dropout = call
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, q.dtype)

    (rows, heads, queries, d_kv), keys = q.shape, k.size(2)
    queries, keys = min(queries, _LONGEST), min(keys, _LONGEST)
    inputs = [draw(rows, length, heads, d_kv).transpose(1, 2) for length in (queries, keys, keys)]
    inputs += [] if diagonals is None else [draw(heads, queries + keys - 1)]
    examples = (
        torch.arange(length, device=device).mul(2).div(length, rounding_mode="floor") for length in (queries, keys)
    )
    seen = labels(queries, None, *(one.expand(rows, -1) for one in examples)) if hidden else None
    window = None if before is None else Window(before, after)
    pattern = Pattern(None, seen, before is None and after is not None, window)
    along = draw(rows, heads, queries, d_kv)

    def results(backend: Any, dtype: torch.dtype, dropout: float) -> list[Tensor]:
        given = [one.to(dtype, copy=True).requires_grad_() for one in inputs]
        own = pattern._replace(diagonals=given[3] if len(given) > 3 else None)
        bias = own if backend == "triton" else own.matrix(queries, keys, dtype, device)
        with using(backend):
            output = attend(given[0], given[1], given[2], bias, False, scale, dropout, softcap)
        return [output.detach(), *torch.autograd.grad(output, given, along.to(dtype))]

    names = ["the output", *(f"the gradient of {name}" for name in ("queries", "keys", "values", "the bias"))]
    found, exact = results("triton", q.dtype, 0.0), results("sdpa", torch.float32, 0.0)
    errors = {
        name: float((one.float() - other).norm() / other.norm())
        for name, one, other in zip(names, found, exact, strict=False)
    }
    if dropout and not all(bool(one.isfinite().all()) for one in results("triton", q.dtype, dropout)):
        errors["dropout"] = float("inf")
    return errors
