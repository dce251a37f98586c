"""The count of a step's kernels, against one by hand."""

from checks.launches import Launches, passes

# norms, products, copies of weights, attention, GELU and gates, residual sums
ENCODER = {"forward": 2 + 5 + 1 + 1 + 2 + 2, "backward": 4 + 10 + 8 + 4 + 2 + 1}
DECODER = {"forward": 3 + 7 + 1 + 2 + 2 + 3, "backward": 6 + 14 + 9 + 4 + 3 + 1}


def test_a_layer_launches_what_its_parts_do():
    """In the backward pass a norm and a product have two kernels each. Self-attention has two, zeros, and five to sum
    its bias's gradient; cross-attention one. The gates' and values' gradients take three, and the sum of their inputs'
    gradients one. The bias's gradient is added to that of other layers. Keys and values of cross-attention are made
    once for all layers."""
    few = passes(1, encoder=1, decoder=1)
    encoder, decoder = (
        passes(1, encoder=2, decoder=1),
        passes(1, encoder=1, decoder=2),
    )
    assert added(few, encoder) == ENCODER
    assert added(few, decoder) == DECODER


def added(few: tuple[Launches, Launches], more: tuple[Launches, Launches]) -> dict[str, int]:
    directions = ("forward", "backward")
    return {
        name: one.kernels.total() - other.kernels.total()
        for name, one, other in zip(directions, more, few, strict=True)
    }
