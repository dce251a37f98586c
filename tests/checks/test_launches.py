"""The count of a step's kernels, against one by hand."""

from checks.launches import Launches, passes

# norms, products and copies of weights, attention, GELU and gates, residual sums
ENCODER = {"forward": 2 + 4 + 2 + 1 + 2 + 2, "backward": 4 + 8 + 8 + 4 + 2 + 1}
DECODER = {"forward": 3 + 7 + 3 + 2 + 2 + 3, "backward": 6 + 14 + 10 + 4 + 3 + 2}


def test_a_layer_launches_what_its_parts_do():
    """In the backward pass a norm and a product have two kernels each. Self-attention has two, zeros, and five for the
    sum of its bias's gradient; cross-attention one, and joins those of keys and values. The gates' gradients take four.
    The gradients of the bias, and of the encoder's states, are added to those of other layers."""
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
