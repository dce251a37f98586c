"""How much of a training step are its bare matrix products?

    python benchmarks/products.py [--threads 1 2] [--precision bf16 fp32]

The products that PyTorch computes in one step of our model, in their order, shapes and strides, are repeated on random
matrices, in turns with the whole step. Where a kernel computes attention, the products that it consists of stand for
it. The share is that of the products in the step; its inverse is the most that all else could still gain. On a CPU
without arithmetic for bf16 its products are those of fp32, and are left out.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import PRECISIONS, Options, Side, Table, compare, main, slow
from peers import our_model, our_step, tokens, works, works_argument
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LIMIT = """What is no product is spread over many operations that read and write activations once: softmax and its
bias, GELU, norms, residual sums, the loss, copies of heads. On a processor with AMX a bf16 product takes a seventh of
the time that it takes in fp32, while these operations take as long as in fp32. Fusing them needs a compiler
(`compute.compile`)."""

_ATEN = torch.ops.aten
_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    _ATEN.mm.default: torch.mm,
    _ATEN.bmm.default: torch.bmm,
    _ATEN.addmm.default: torch.addmm,
    _ATEN.baddbmm.default: torch.baddbmm,
}
_FORWARD, _BACKWARD = "_scaled_dot_product", "_backward"
Outline = tuple[torch.Size, tuple[int, ...], torch.dtype]


class Recorder(TorchDispatchMode):
    """Records the products of what runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[Callable[..., Tensor], tuple[Outline, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            operands = tuple((one.shape, one.stride(), one.dtype) for one in args if isinstance(one, Tensor))
            self.products.append((_PRODUCTS[func], operands))
        elif func.name().startswith(f"aten::{_FORWARD}") and "attention_math" not in func.name():
            self._attention(_BACKWARD in func.name(), [one for one in args if isinstance(one, Tensor)])
        return func(*args, **(kwargs or {}))

    def _attention(self, backward: bool, tensors: list[Tensor]) -> None:
        queries, keys = tensors[1:3] if backward else tensors[:2]
        rows, width = queries.size(0) * queries.size(1), queries.size(3)
        logits_shape = (queries.size(2), width, keys.size(2))
        context_shape = (queries.size(2), keys.size(2), width)
        keys_shape = (keys.size(2), queries.size(2), width)
        # backward: the logits again, the gradients of weights and queries, and of keys and values
        for m, k, n in (logits_shape, context_shape, *(backward * (logits_shape, keys_shape, keys_shape))):
            shapes = (torch.Size([rows, m, k]), torch.Size([rows, k, n]))
            outlines = tuple((shape, _contiguous(shape), queries.dtype) for shape in shapes)
            self.products.append((torch.bmm, outlines))


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return shape[1] * shape[2], shape[2], 1


def bare(step: Side) -> Side:
    """The products of `step` alone."""
    with Recorder() as recorder:
        step()
    made: dict[tuple[int, Outline], Tensor] = {}

    def operand(place: int, outline: Outline) -> Tensor:
        if (place, outline) not in made:
            shape, strides, dtype = outline
            made[place, outline] = torch.empty_strided(shape, strides, dtype=dtype).normal_()
        return made[place, outline]

    calls = [
        (product, [operand(place, one) for place, one in enumerate(operands)])
        for product, operands in recorder.products
    ]

    def products() -> None:
        for product, operands in calls:
            product(*operands)

    return products


def measure(options: Options) -> Iterator[Table]:
    for work in works(options):
        table = Table(f"Bare products: {work}", ["dtype", "threads", "our step", "its products", "share"])
        for precision in options.precisions:
            if slow(precision):
                continue
            model = our_model(work.config).to(PRECISIONS[precision]).train()
            step = our_step(model, tokens(work))
            sides = {"ours": step, "products": bare(step)}
            for threads in options.threads:
                result = compare(sides, options, threads)
                share = result.ratio("products")
                table.add(precision, threads, result.ours, result["products"], f"{share:.0%}", **result.data)
        yield table


if __name__ == "__main__":
    main(__doc__, measure, LIMIT, works_argument)
