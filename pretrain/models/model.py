"""The base class of all families."""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

from torch import nn

from pretrain.models.config import ModelConfig
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

    def num_parameters(self) -> int:
        """The number of trained scalars; a tied matrix counts once. If ZeRO-3 shards the model, use its `outline`."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops(self, sizes: Sizes) -> float:
        """Floating-point operations of a training step, forward and backward, for examples of these sizes.

        Counts 6 per matrix weight and token, and 12 per query-key pair and unit of width, including pairs that
        causality hides (Chowdhery et al. 2022, appendix B). Recomputation and look-ups don't count. If ZeRO-3 shards
        the model, use its `outline`.
        """
        raise NotImplementedError


def matrix_weights(module: nn.Module) -> int:
    """The number of weights of all matrices in `module`, which isn't sharded."""
    return sum(weight.numel() for weight in module.parameters() if weight.dim() > 1)
