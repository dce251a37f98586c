"""What every family is, whatever its layers."""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

from torch import Size, Tensor, nn

from pretrain.models.config import ModelConfig
from pretrain.models.loss import Losses


class Sizes(NamedTuple):
    """What decides the arithmetic of some examples, summed over them; padding and ignored labels don't count.

    `inputs`, `targets`: tokens. `input_pairs`, `target_pairs`, `cross_pairs`: pairs of tokens of one example: inputs
    with inputs, targets with targets, inputs with targets.
    """

    examples: int
    inputs: int
    targets: int
    input_pairs: int
    target_pairs: int
    cross_pairs: int

    @classmethod
    def of_example(cls, inputs: int, targets: int) -> "Sizes":
        """Of one example of that many inputs and targets."""
        return cls(1, inputs, targets, inputs**2, targets**2, inputs * targets)


class Model(nn.Module):
    """`forward` takes the tensors of a batch by name and gives the loss of everything that is predicted.

    Names of tensors are those of `data_pipeline.loading.batches.as_batch`. `decoder_reads_targets`: whether a decoder
    reads the targets, rather than all layers the inputs.
    """

    config: ModelConfig
    decoder_reads_targets: ClassVar[bool] = False

    forward: Callable[..., Losses]

    def num_parameters(self) -> int:
        """Scalars to train, a tied matrix counted once. Build on the meta device to count without memory."""
        return sum(whole_shape(parameter).numel() for parameter in self.parameters())

    def flops(self, sizes: Sizes) -> float:
        """Floating-point operations that a training step needs for examples of these sizes, forward and backward.

        6 for each weight of a matrix and token that meets it, and 12 for each pair of query and key and unit of width,
        also of pairs that causality hides (Chowdhery et al. 2022, appendix B). Recomputation and look-ups cost nothing.
        """
        raise NotImplementedError


def matrix_weights(module: nn.Module) -> int:
    """Weights of all matrices in `module`, also while ZeRO-3 has them sharded."""
    shapes = [whole_shape(weight) for weight in module.parameters()]
    return sum(shape.numel() for shape in shapes if len(shape) > 1)


def whole_shape(parameter: Tensor) -> Size:
    """The shape of a parameter, also while ZeRO-3 has it sharded, when its own is (0,)."""
    return getattr(parameter, "ds_shape", parameter.shape)
