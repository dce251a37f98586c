"""The base class of all families."""

from collections.abc import Callable, Iterable
from typing import ClassVar, NamedTuple, cast

from torch import Tensor, nn

from pretrain.config.models import ModelConfig
from pretrain.models.attention import Attention
from pretrain.models.loss import Losses


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


class Model(nn.Module):
    """`forward` takes the tensors of a batch by name and returns the loss of every prediction.

    Tensors are named as in `data_pipeline.loading.batches.as_batch`. `decoder_reads_targets`: whether a decoder reads
    the targets; otherwise all layers read the inputs.
    """

    config: ModelConfig
    decoder_reads_targets: ClassVar[bool] = False

    forward: Callable[..., Losses]

    def begin_step(self, seed: int, step: int) -> None:
        """Called before each training step. What a family draws for a whole step, it draws by these two numbers."""

    def before_head(self, x: Tensor) -> Tensor:
        """What the output matrix is multiplied by, for the decoder's states `x` (…, d_model)."""
        return x

    def num_parameters(self) -> int:
        """The number of trained scalars; a tied matrix counts once. If ZeRO-3 shards the model, use its `outline`."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops(self, sizes: Sizes) -> float:
        """Floating-point operations of a training step, forward and backward, for examples of these sizes.

        Counts 6 per matrix weight and token, and 12 per query-key pair and unit of width, including pairs that
        causality hides (Chowdhery et al. 2022, appendix B). Recomputation and look-ups don't count. If ZeRO-3 shards
        the model, use its `outline`.
        """
        return sum(self.flops_by_part(sizes).values())

    def flops_by_part(self, sizes: Sizes) -> dict[str, float]:
        """`flops` of each part that the model has: "encoder", "decoder" without cross-attention, "cross-attention" and
        "head", what comes after the last layer."""
        raise NotImplementedError


def attention_flops(attention: Attention, width: int, queries: int, keys: int, pairs: int) -> float:
    """FLOPs of an attention layer of `width` heads · d_kv: `q` and `o` process `queries` tokens, `k` and `v` `keys`."""
    key_weights = matrix_weights(attention.k) + matrix_weights(attention.v)
    query_weights = matrix_weights(attention) - key_weights
    return 6.0 * (query_weights * queries + key_weights * keys) + 12.0 * width * pairs


def cross_attentions(layers: Iterable[nn.Module]) -> list[Attention]:
    """The cross-attention of each decoder layer that has one of its own."""
    return [cast(Attention, layer.cross_attention) for layer in layers if hasattr(layer, "cross_attention")]


def matrix_weights(module: nn.Module) -> int:
    """The number of weights of all matrices in `module`, which isn't sharded."""
    return sum(weight.numel() for weight in module.parameters() if weight.dim() > 1)
