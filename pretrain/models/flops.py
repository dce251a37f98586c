"""The floating-point operations of a training step, forward and backward: what plans, MFU, ladders and budgets count.

6 per matrix weight and token, and 12 per query-key pair and unit of width, including pairs that causality hides
(Chowdhery et al. 2022, appendix B). Recomputation, look-ups, norms and additional losses don't count. Models are read
as they are built, by the names of their modules, so their shapes must be whole: under ZeRO-3, take their `outline`.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from torch import Tensor, nn

from pretrain.models.attention import Attention
from pretrain.models.layers import Linear
from pretrain.models.model import Model

Part = Literal["encoder", "decoder", "cross-attention", "head"]
_PARTS: dict[str, Part] = {
    "encoder": "encoder",
    "bridge": "decoder",  # from an encoder's states to a decoder's
    "decoder": "decoder",
    "lm_head": "head",
    "masked_lm": "head",
    "next_sentence": "head",
}
_CROSS_ATTENTION = "cross_attention"


class Sizes(NamedTuple):
    """The sizes that determine the FLOPs of some examples, summed over them, without padding and ignored labels.

    `inputs` and `targets` count tokens. `input_pairs`, `target_pairs` and `cross_pairs` count pairs of tokens of one
    example: inputs with inputs, targets with targets, inputs with targets.
    """

    examples: int
    inputs: int
    targets: int
    input_pairs: int
    target_pairs: int
    cross_pairs: int

    @classmethod
    def of_example(cls, inputs: int, targets: int) -> "Sizes":
        """The sizes of one example."""
        return cls(1, inputs, targets, inputs**2, targets**2, inputs * targets)


class Matrix(NamedTuple):
    """A matrix, the part that it belongs to, and what it is multiplied by: as many vectors as `Sizes` has of these."""

    part: Part
    rows: Literal["examples", "inputs", "targets"]
    weight: Tensor


def count_flops(model: Model, sizes: Sizes) -> float:
    """FLOPs of a training step for examples of these sizes."""
    return sum(flops_by_part(model, sizes).values())


def flops_by_part(model: Model, sizes: Sizes) -> dict[str, float]:
    """`count_flops` of each part that the model has: "encoder", "decoder" without cross-attention, "cross-attention",
    and "head", what comes after the last layer."""
    found: Counter[Part] = Counter()
    for part, rows, weight in matrices(model):
        found[part] += 6 * weight.numel() * getattr(sizes, rows)
    for part, pairs in _pairs(model, sizes):
        found[part] += 12 * pairs
    return {part: float(found[part]) for part in get_args(Part) if part in found}


def matrices(model: Model) -> Iterator[Matrix]:
    """The matrices that a model multiplies by. Those of merged attention's keys and values come twice."""
    for name, module in model.named_modules():
        part = _PARTS.get(name.split(".")[0])
        if part and isinstance(module, Linear):
            across = f".{_CROSS_ATTENTION}." in name
            of_memory = across and name.endswith((".k", ".v"))
            yield Matrix("cross-attention" if across else part, _rows(model, name, part, of_memory), module.weight)
        if isinstance(module, Attention) and module.merged:
            yield from (Matrix("cross-attention", "inputs", one.weight) for one in (module.k, module.v))


def _rows(model: Model, name: str, part: Part, of_memory: bool) -> Literal["examples", "inputs", "targets"]:
    """A model of one row reads it with all layers; without a decoder it predicts some of its tokens."""
    if name.startswith("next_sentence"):
        return "examples"
    if model.decoder_reads_targets:
        return "inputs" if part == "encoder" or of_memory else "targets"
    return "targets" if part == "head" and not hasattr(model, "decoder") else "inputs"


def _pairs(model: Model, sizes: Sizes) -> Iterator[tuple[Part, int]]:
    """Query-key pairs times the width of their attention, of each stack of layers."""
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
        masks = getattr(model.get_submodule(name.rpartition(".")[0]), "layer_masks", None)
        yield part, own[0].width * (masks.pairs(tokens, pairs) if masks else len(own) * pairs)
        # merged attention in one row sees a token or its state, never both
        across = [one for _, one in found if one not in own or (two_sides and one.merged)]
        if across:
            yield "cross-attention", sum(one.width for one in across) * (sizes.cross_pairs if two_sides else pairs)
