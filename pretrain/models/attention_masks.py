"""What the self-attention of each layer of a stack sees: the whole row or a window of it, with its rotations."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from pretrain.models.config.blocks import LocalAndGlobal
from pretrain.models.logit_bias import Pattern, logit_bias
from pretrain.models.masks import Window
from pretrain.models.positions import Rotation


class Sight(NamedTuple):
    """For the attention of a layer: the bias of its logits, and the rotations of queries and of keys.

    `causal` instead of a bias hides the future only. The rotation of self-attention's keys is that of its queries.
    """

    bias: Tensor | Pattern | None
    rotation: Rotation | None = None
    causal: bool = False
    memory_rotation: Rotation | None = None


def bias_or_causal(
    x: Tensor,
    keys: int,
    *,
    causal: bool,
    window: Window | None = None,
    diagonals: Tensor | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor | Pattern | None, bool]:
    """The bias of self-attention's logits for `x` (batch, queries, d_model), the last of `keys` tokens; and instead of
    it, whether only the future is hidden. The arguments are those of `logit_bias`."""
    queries = x.size(1)
    if causal and window is None and diagonals is None and key_mask is None and segments is None:
        if queries == 1:
            return None, False
        if queries == keys:
            return None, True
    of_segments = {"query_segments": segments, "key_segments": segments}
    future = causal and queries > 1
    return logit_bias(x, keys, diagonals, causal=future, window=window, key_mask=key_mask, **of_segments), False


class Sights:
    """Layers that see the same share one `Sight`: a stack has one or two kinds of layers.

    `window` makes what a query of this stack sees of the config's number of tokens.
    """

    def __init__(self, config: LocalAndGlobal, num_layers: int, window: Callable[[int], Window]):
        kinds = [config.kind(layer) for layer in range(num_layers)]
        distinct = list(dict.fromkeys(kinds))
        self._of_layer = [distinct.index(kind) for kind in kinds]
        self._distinct = [(None if kind.window is None else window(kind.window), kind.rope_base) for kind in distinct]

    def of_layers(self, see: Callable[[Window | None, float], Sight], queries: int, keys: int) -> list[Sight]:
        """The sight of each layer. `see` makes one of a window, None if that hides nothing, and a base of rotations."""
        sights = [
            see(None if window is None or window.hides_nothing(queries, keys) else window, base)
            for window, base in self._distinct
        ]
        return [sights[kind] for kind in self._of_layer]

    def pairs(self, tokens: int, pairs: int) -> int:
        """The pairs of queries and keys that all layers compute, for `tokens` whose examples have `pairs` of them.

        A window leaves as many pairs for each token as it is wide. That ignores where examples begin and end.
        """
        widths = [None if window is None else window.before + window.after + 1 for window, _ in self._distinct]
        seen = [pairs if width is None else min(pairs, width * tokens) for width in widths]
        return sum(seen[kind] for kind in self._of_layer)


def before_only(tokens: int) -> Window:
    """The window of `tokens` in a causal layer: the query's own and those before it."""
    return Window(tokens - 1)
