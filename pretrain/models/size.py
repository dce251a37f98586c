"""The size of a model by its settings alone, without PyTorch: what the launcher says before it starts anything.

Norms, biases and positions are left out, which are below 2 % of any model that ships. `Model.num_parameters` and
`Model.flops` count exactly.
"""

from dataclasses import dataclass, replace
from typing import Any

from pretrain.config.models import LocalAndGlobal, ModelConfig


@dataclass(frozen=True)
class Size:
    """Weights of `model`'s matrices: of layers that read the inputs, of those that read the targets, and of tables.
    Of those that read the targets, `reading_both` read the inputs too.

    `input_pairs` and so on are units of width, summed over layers, in which attention relates tokens. In the share
    `local` of the layers, self-attention sees a window of tokens.
    """

    input_weights: int
    target_weights: int
    head: int
    tables: int
    input_pairs: int
    target_pairs: int
    cross_pairs: int
    reading_both: int = 0
    window: int = 0
    local: float = 0.0

    @property
    def parameters(self) -> int:
        return self.input_weights + self.target_weights + self.tables

    def flops(self, inputs: int, targets: int) -> float:
        """Of a training step on a row, as `Model.flops` counts: 6 for a weight and token, 12 for a pair and unit."""
        weights = (self.input_weights + self.reading_both) * inputs + (self.target_weights + self.head) * targets
        pairs = self.input_pairs * self._seen(inputs) + self.target_pairs * self._seen(targets)
        return 6.0 * weights + 12.0 * (pairs + self.cross_pairs * inputs * targets)

    def _seen(self, tokens: int) -> float:
        """Pairs of tokens in a layer, on average."""
        return tokens * (self.local * min(self.window, tokens) + (1 - self.local) * tokens)


def size_of(config: ModelConfig) -> Size:
    """The size of the model that `config`, whose vocabulary is set, describes."""
    size = _without_windows(config)
    if not (isinstance(config, LocalAndGlobal) and config.sliding_window):
        return size
    depth = config.full_attention_every or 1  # the layers' kinds repeat
    local = sum(not config.sees_all(layer) for layer in range(depth)) / depth
    return replace(size, window=config.sliding_window, local=local)


def _without_windows(config: ModelConfig) -> Size:
    settings: Any = config
    encoder, decoder = settings.stacks.get("encoder", settings), settings.stacks.get("decoder", settings)
    below: int = getattr(settings, "num_encoder_layers", None) or encoder.num_layers
    above: int = getattr(settings, "num_decoder_layers", None) or decoder.num_layers
    layer, width = _layer(settings, encoder), _width(encoder)
    embedding = config.padded_vocab_size * config.width
    if config.family in ("encoder_only", "decoder_only"):
        tables = embedding if getattr(settings, "tie_embeddings", True) else 2 * embedding
        return Size(layer * below, 0, embedding, tables, width * below, 0, 0)
    if config.family in ("autoregressive", "double_decoder"):  # every layer reads the whole row
        across = 4 * config.width**2 if config.family == "autoregressive" else 0  # else the layers' own weights serve
        layers = layer * (below + above) + across * above
        return Size(layers, 0, embedding, embedding, width * (below + above + above), 0, 0)
    keys, queries = _attention(encoder.d_model, decoder)[1], _attention(decoder.d_model, decoder)[0]
    decoder_weights = _layer(settings, decoder) * above
    if config.family == "t5gemma2":  # its cross-attention shares the weights of self-attention
        pairs = width * below, width * above, width * above
        return Size(layer * below, decoder_weights, embedding, embedding, *pairs, reading_both=keys * above)
    tied = getattr(settings, "tie_embeddings", "output" if encoder is not decoder else True)
    tables = embedding * {"all": 1, "output": 2, "none": 3, True: 1, False: 2}[tied]
    return Size(
        layer * below + keys * above,
        decoder_weights + queries * above,
        embedding,
        tables,
        width * below,
        _width(decoder) * above,
        _width(decoder) * above,
    )


def _width(stack: Any) -> int:
    """Units of all heads."""
    return stack.num_heads * stack.d_kv if hasattr(stack, "d_kv") else stack.d_model


def _attention(read: int, stack: Any) -> tuple[int, int]:
    """Weights of an attention layer for queries and outputs, and for keys and values of states `read` wide."""
    query_weights = 2 * stack.d_model * _width(stack)
    grouped = getattr(stack, "num_key_value_heads", None) or stack.num_heads
    return query_weights, 2 * read * _width(stack) * grouped // stack.num_heads


def _layer(settings: Any, stack: Any) -> int:
    """Weights of a layer with self-attention alone."""
    kind = getattr(settings, "feed_forward", None) or getattr(settings, "activation", "geglu")
    matrices = 3 if kind in ("gated-gelu", "swiglu", "geglu") else 2
    if settings.family == "autoregressive":
        matrices = 2
    d_ff = stack.d_ff or 4 * stack.d_model
    return sum(_attention(stack.d_model, stack)) + matrices * stack.d_model * d_ff
