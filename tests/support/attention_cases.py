"""Attention by the kernel against the definition in fp64: on a GPU, or on a CPU in Triton's interpreter.

Each function takes a device and returns what its name says. On a CPU the process must have started with
TRITON_INTERPRET=1 (`interpreted` below).
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain import models
from pretrain.models.functional.attention_backends import (
    MASKED,
    Pattern,
    Window,
    apart,
    attend,
    eager,
    flash,
    labels,
    using,
)
from tests.support.small_models import VOCABULARY, examples_of, gradients, packed

BATCH = 2


class Case(NamedTuple):
    """`masking`: "all", "padding", "packed" or "nothing", where the second row sees no key and the first all."""

    queries: int
    keys: int
    d_kv: int = 16
    bias: bool = True
    masking: str = "all"
    causal: bool = False
    window: Window | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    heads: int = 2


@contextmanager
def interpreted() -> Iterator[Callable[..., Any]]:
    """Calls functions in a process whose kernels run in Triton's interpreter."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            process.submit(patch_once).result()  # starts the process
        yield lambda function, *arguments: process.submit(function, *arguments).result()


def patch_once() -> None:
    """Lets Triton's interpreter prepare its language once for each function, not in each call, which takes it longer
    than the call. A launch prepares it again for the kernel itself."""
    from triton.runtime import interpreter  # Triton has no wheel for some machines

    prepared = set()

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.fn not in prepared:
            prepared.add(self.fn)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **options)

    interpreter.InterpretedFunction.__call__ = call


def errors(case: Case, device: str, form: Callable[..., Tensor] = flash) -> dict[str, float]:
    """The relative errors of the output and of each gradient, in the L2 norm, against the definition in fp64.

    Queries that see nothing get a gradient of zero from above: what they attend to is not defined.
    """
    inputs, pattern, along = drawn(case, device)
    found = results(form, inputs, pattern, along, case)
    exact = [None if one is None else one.detach().double().requires_grad_() for one in inputs]
    defined = results(by_definition, exact, pattern._replace(diagonals=None), along.double(), case)
    return {name: float((found[name].double() - defined[name]).norm() / defined[name].norm()) for name in defined}


def drawn(case: Case, device: str) -> tuple[list[Tensor | None], Pattern, Tensor]:
    """(queries, keys, values, diagonals or None), who sees whom, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, case.dtype)

    lengths = case.queries, case.keys, case.keys
    # as the projections of a layer give them: (batch, length, heads, d_kv) in memory
    shapes = [(BATCH, length, case.heads, case.d_kv) for length in lengths]
    inputs: list[Tensor | None] = [draw(*shape).transpose(1, 2).requires_grad_() for shape in shapes]
    inputs.append(draw(case.heads, case.queries + case.keys - 1).requires_grad_() if case.bias else None)
    seen = labels(case.queries, *(None if one is None else one.to(device) for one in masks_of(case)))
    pattern = Pattern(None, seen, case.causal, case.window)
    along = draw(BATCH, case.heads, case.queries, case.d_kv)
    mask = pattern.matrix(case.queries, case.keys, torch.float32, along.device)
    if mask is not None:
        along = along * (mask > MASKED).any(dim=-1, keepdim=True)
    return inputs, pattern, along


def masks_of(case: Case) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The mask of keys and the segments of queries and keys."""
    if case.masking == "all":
        return None, None, None
    if case.masking == "packed":  # three examples of a row, of other lengths in each row, and padding after them
        ends = torch.tensor([[0.3, 0.45, 0.9], [0.1, 0.6, 1.0]])
        number = [
            (torch.arange(n)[None, :, None] >= (ends * n).long()[:, None]).sum(dim=-1)
            for n in (case.queries, case.keys)
        ]
        queries, keys = ((1 + one) * (one < 3) for one in number)
        return keys > 0, queries, keys
    real = torch.tensor([case.keys, 0] if case.masking == "nothing" else [case.keys // 2 + 1, case.keys])
    return torch.arange(case.keys) < real[:, None], None, None


def results(
    form: Callable[..., Tensor], inputs: list[Tensor | None], pattern: Pattern, along: Tensor, case: Case
) -> dict[str, Tensor]:
    """The output of `attend` in one form, and its gradients."""
    *vectors, diagonals = inputs
    output = form(*vectors, pattern._replace(diagonals=diagonals), case.d_kv**-0.5, 0.0, case.softcap)
    names = ["queries", "keys", "values", "diagonals"][: 3 + case.bias]
    gradients = torch.autograd.grad(output, inputs[: len(names)], along)
    counted = along.abs().sum(dim=-1, keepdim=True) > 0
    return {"output": (output * counted).detach(), **dict(zip(names, gradients, strict=True))}


def by_definition(
    queries: Tensor, keys: Tensor, values: Tensor, pattern: Pattern, scale: float, _: float, softcap: float | None
) -> Tensor:
    bias = pattern.matrix(queries.size(2), keys.size(2), queries.dtype, queries.device)
    return eager(queries, keys, values, bias, False, scale, 0.0, softcap)


def by_pytorch(
    queries: Tensor, keys: Tensor, values: Tensor, pattern: Pattern, scale: float, _: float, softcap: float | None
) -> Tensor:
    """By `attend`, with the bias and masks as a matrix; causality alone is a flag."""
    flag = pattern == Pattern(None, None, True)
    bias = None if flag else pattern.matrix(queries.size(2), keys.size(2), queries.dtype, queries.device)
    return attend(queries, keys, values, bias, flag, scale, 0.0, softcap)


def of_queries_that_see_nothing(device: str) -> tuple[float, bool]:
    """The greatest output of such queries, and whether all gradients are finite though they get one from above."""
    case = Case(40, 30, masking="nothing")
    inputs, pattern, along = drawn(case, device)
    output = flash(*inputs[:3], pattern._replace(diagonals=inputs[3]), 1.0, 0.0)
    gradients = torch.autograd.grad(output, inputs, torch.ones_like(along))
    return float(output[1].abs().max()), all(bool(one.isfinite().all()) for one in gradients)


def dropped(device: str) -> dict[str, Any]:
    """What dropout does: the share of weights that it keeps in each head of each row; the share that it treats alike in
    two heads, in queries side by side and in keys side by side; and errors as in `errors`, given the weights that it
    kept. With values of one for each key apart, the output is the weights themselves."""
    case = Case(40, 64, d_kv=64)
    inputs, pattern, along = drawn(case, device)
    pattern = pattern._replace(diagonals=inputs[3])
    apart = torch.eye(case.keys, device=device).expand(BATCH, case.heads, -1, -1)
    torch.manual_seed(3)
    kept = flash(inputs[0], inputs[1], apart, pattern, 0.1, 0.25).detach() != 0
    torch.manual_seed(3)
    found = flash(*inputs[:3], pattern, 0.1, 0.25)
    gradients = torch.autograd.grad(found, inputs, along)
    exact = [one.detach().double().requires_grad_() for one in inputs]
    bias = pattern._replace(diagonals=exact[3]).matrix(case.queries, case.keys, torch.float64, apart.device)
    weights = torch.softmax(0.1 * exact[0] @ exact[1].transpose(-1, -2) + bias, dim=-1)
    defined = (weights * kept / 0.75) @ exact[2]
    expected = torch.autograd.grad(defined, exact, along.double())
    pairs = zip([found, *gradients], [defined, *expected], strict=True)
    return {
        "kept": kept.float().mean(dim=(2, 3)).flatten().tolist(),
        "alike": [
            float((one == other).float().mean())
            for one, other in (
                (kept[0, 0], kept[1, 1]),
                (kept[:, :, 1:], kept[:, :, :-1]),
                (kept[..., 1:], kept[..., :-1]),
            )
        ],
        "errors": [float((one.double() - other).norm() / other.norm()) for one, other in pairs],
    }


def repeats(device: str) -> bool:
    """Whether the gradients of a large case are the same bits twice: atomic additions would differ on a GPU."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    case = Case(512, 512, 64, dtype=dtype, masking="packed") if device == "cuda" else Case(70, 70)
    inputs, pattern, along = drawn(case, device)
    first, second = (results(flash, inputs, pattern, along, case) for _ in range(2))
    return all(torch.equal(first[name], second[name]) for name in first)


def joined_alike() -> dict[str, bool]:
    """Whether output and gradients are the same bits where queries, keys and values are parts of one tensor, and if
    their gradients are copied to join them."""
    case = Case(20, 20, masking="packed")
    inputs, pattern, along = drawn(case, "cpu")
    pattern, joined = pattern._replace(diagonals=inputs[3]), _joined(inputs)
    output = flash(*apart(joined), pattern, 0.3, 0.0, None, joined)
    with OperationNames() as names:
        gradient, *grad_bias = torch.autograd.grad(output, (joined, inputs[3]), along)
    output_apart = flash(*inputs[:3], pattern, 0.3, 0.0)
    expected = torch.autograd.grad(output_apart, inputs, along)
    pairs = zip([output, *apart(gradient), *grad_bias], [output_apart, *expected], strict=True)
    return {"same": all(torch.equal(*pair) for pair in pairs), "copies": bool({"cat", "stack", "clone"} & names.found)}


def _joined(inputs: list[Tensor]) -> Tensor:
    """Queries, keys and values as one product would give them."""
    return torch.stack([one.detach().transpose(1, 2) for one in inputs[:3]], dim=2).requires_grad_()


class OperationNames(TorchDispatchMode):
    """`found`: the names of PyTorch's operations that run within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def compiled_alike() -> dict[str, bool]:
    """Whether torch.compile, in one graph, gives the same bits, with and without dropout. On a CPU no code is made."""
    case = Case(20, 20, masking="packed", causal=True)
    inputs, pattern, along = drawn(case, "cpu")
    pattern, joined = pattern._replace(diagonals=inputs[3]), _joined(inputs)

    def of_joined(joined: Tensor, pattern: Pattern, dropout: float) -> Tensor:
        return flash(*apart(joined), pattern, 0.1, dropout, None, joined)

    compiled = torch.compile(of_joined, backend="aot_eager", fullgraph=True)
    alike = {}
    for dropout in (0.0, 0.3):
        found = []
        for form in (of_joined, compiled):
            torch.manual_seed(0)
            output = form(joined, pattern, dropout)
            found.append([output, *torch.autograd.grad(output, (joined, inputs[3]), along)])
        alike[str(dropout)] = all(torch.equal(*pair) for pair in zip(*found, strict=True))
    return alike


_STACK = {"num_layers": 2, "d_model": 32, "num_heads": 2, "num_key_value_heads": 1, "d_ff": 32}
MODELS: dict[str, dict[str, Any]] = {
    "t5": {"num_heads": 2, "d_kv": 16, "d_ff": 32, "num_encoder_layers": 1, "num_decoder_layers": 1},
    "bart": {"num_heads": 2, "d_ff": 32, "num_encoder_layers": 1, "num_decoder_layers": 1, "max_positions": 64},
    "autoregressive": {"num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "max_positions": 64},
    "decoder_only": {"num_heads": 2, "d_ff": 32, "num_layers": 1, "positions": "alibi"},
    "encoder_only": {"num_heads": 2, "d_ff": 32, "num_layers": 1, "max_positions": 64},
    "t5gemma": {"encoder": _STACK, "decoder": _STACK, "sliding_window": 5, "attention_softcap": 0.5},
    "t5gemma2": {**_STACK, "sliding_window": 5, "full_attention_every": 2},
}


def of_model(family: str, device: str) -> dict[str, float]:
    """For each parameter, the relative difference of gradients with the kernel and without it, on a packed row."""
    torch.manual_seed(0)
    settings = {"family": family, "vocab_size": VOCABULARY, "dropout_rate": 0.0, **MODELS[family]}
    settings |= {} if family == "t5gemma" else {"d_model": 32}
    model = models.build(models.parse(settings)).to(device)
    rows = examples_of(model, [[(9, 9), (11, 11), (4, 4)], [(30, 30)]])
    batch = {name: tensor.to(device) for name, tensor in packed(rows, padding=0).items()}
    found = []
    for backend in ("triton", None):
        with using(backend):
            found.append(gradients(model, model(**batch)["labels"].sum()))
    kernel, plain = found
    return {name: float((kernel[name] - plain[name]).norm() / plain[name].norm().clamp(min=1e-3)) for name in plain}
