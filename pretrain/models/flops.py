"""Counts the floating-point operations (FLOPs) of a training step, forward and backward, for plans and MFU.

A step takes 6 FLOPs per matrix weight and token, and 12 per query-key pair and unit of width, including pairs that the
causal mask hides (Chowdhery et al. 2022, appendix B). Recomputation, look-ups, norms and auxiliary losses don't count.
Modules are recognized by their names, and their shapes must be unsharded: for a model under ZeRO-3, use its
`meta_model`.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from torch import Tensor, nn

from pretrain.models.attention import Attention
from pretrain.models.layers import Linear
from pretrain.models.model import Model
from pretrain.models.stacks import Stack

Part = Literal["encoder", "decoder", "cross-attention", "head"]
_PARTS: dict[str, Part] = {
    "encoder": "encoder",
    "bridge": "decoder",  # maps an encoder's states to a decoder's input
    "decoder": "decoder",
    "lm_head": "head",
    "masked_lm": "head",
}
_CROSS_ATTENTION = "cross_attention"


class Sizes(NamedTuple):
    """The sums over some examples that determine their FLOPs, without padding and ignored labels.

    Attributes:
        inputs: tokens of the inputs.
        targets: tokens of the targets.
        input_pairs: pairs of two input tokens of one example.
        target_pairs: pairs of two target tokens of one example.
        cross_pairs: pairs of an input token and a target token of one example.
    """

    inputs: int
    targets: int
    input_pairs: int
    target_pairs: int
    cross_pairs: int

    @classmethod
    def of_example(cls, inputs: int, targets: int) -> "Sizes":
        """The sizes of one example."""
        return cls(inputs, targets, inputs**2, targets**2, inputs * targets)


class Matrix(NamedTuple):
    """A matrix, its part of the model, and the field of `Sizes` with the number of vectors that it multiplies."""

    part: Part
    rows: Literal["inputs", "targets"]
    weight: Tensor


def count_flops(model: Model, sizes: Sizes) -> float:
    """FLOPs of a training step for examples of these sizes."""
    return sum(flops_by_part(model, sizes).values())


def flops_by_part(model: Model, sizes: Sizes) -> dict[str, float]:
    """`count_flops` by part: "encoder", "decoder" (without cross-attention), "cross-attention" and "head" (after the
    last layer). Parts that the model lacks are left out."""
    found: Counter[Part] = Counter()
    for part, rows, weight in matrices(model):
        found[part] += 6 * weight.numel() * getattr(sizes, rows)
    for part, pairs in _pairs(model, sizes):
        found[part] += 12 * pairs
    return {part: float(found[part]) for part in get_args(Part) if part in found}


def matrices(model: Model) -> Iterator[Matrix]:
    """The matrices that a model multiplies by. Merged attention yields its matrices of keys and values twice."""
    for name, module in model.named_modules():
        part = _PARTS.get(name.split(".")[0])
        if part and isinstance(module, Linear):
            across = f".{_CROSS_ATTENTION}." in name
            of_memory = across and name.endswith((".k", ".v"))
            yield Matrix("cross-attention" if across else part, _rows(model, part, of_memory), module.weight)
        if isinstance(module, Attention) and module.merged:
            yield from (Matrix("cross-attention", "inputs", one.weight) for one in (module.k, module.v))


def _rows(model: Model, part: Part, of_memory: bool) -> Literal["inputs", "targets"]:
    """In a model without separate targets, all layers read the inputs. Without a decoder, the head reads masked
    tokens."""
    if model.decoder_reads_targets:
        return "inputs" if part == "encoder" or of_memory else "targets"
    return "targets" if part == "head" and not hasattr(model, "decoder") else "inputs"


def _pairs(model: Model, sizes: Sizes) -> Iterator[tuple[Part, int]]:
    """For each stack of layers, its query-key pairs times the width of the attention."""
    two_sides = model.decoder_reads_targets
    for name, layers in model.named_modules():
        part = _PARTS.get(name.split(".")[0])
        if part is None or not isinstance(layers, nn.ModuleList):
            continue
        tokens, pairs = sizes.inputs, sizes.input_pairs
        if two_sides and part == "decoder":
            tokens, pairs = sizes.targets, sizes.target_pairs
        found = [(each, one) for each, one in layers.named_modules() if isinstance(one, Attention)]
        own = [one for each, one in found if not each.endswith(_CROSS_ATTENTION)]
        stack = model.get_submodule(name.rpartition(".")[0])
        in_windows = stack.pairs(tokens, pairs) if isinstance(stack, Stack) else len(own) * pairs
        yield part, own[0].width * in_windows
        # a decoder that reads the inputs attends with merged attention to a token or to its state, never to both
        across = [one for _, one in found if one not in own or (two_sides and one.merged)]
        if across:
            yield "cross-attention", sum(one.width for one in across) * (sizes.cross_pairs if two_sides else pairs)
