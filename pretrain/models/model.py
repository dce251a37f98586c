"""What every family is, whatever its layers."""

from collections.abc import Callable

from torch import Size, Tensor, nn

from pretrain.models.config import ModelConfig
from pretrain.models.loss import Losses


class Model(nn.Module):
    """`forward` takes the tensors of a batch by name and gives the loss of everything that is predicted.

    Names of tensors are those of `data_pipeline.loading.batches.as_batch`.
    """

    config: ModelConfig

    forward: Callable[..., Losses]

    def num_parameters(self) -> int:
        """Scalars to train, a tied matrix counted once. Build on the meta device to count without memory."""
        return sum(whole_shape(parameter).numel() for parameter in self.parameters())

    def flops(self, inputs: int, targets: int) -> float:
        """Floating-point operations of one row of so many inputs and targets, forward and backward.

        6 for each weight of a matrix and token that meets it, and 12 for each pair of query and key and unit of width:
        what a step needs, without recomputation. A look-up costs nothing.
        """
        raise NotImplementedError


def matrix_weights(module: nn.Module) -> int:
    """Weights of all matrices in `module`, also while ZeRO-3 has them sharded."""
    shapes = [whole_shape(weight) for weight in module.parameters()]
    return sum(shape.numel() for shape in shapes if len(shape) > 1)


def whole_shape(parameter: Tensor) -> Size:
    """The shape of a parameter, also while ZeRO-3 has it sharded, when its own is (0,)."""
    return getattr(parameter, "ds_shape", parameter.shape)
