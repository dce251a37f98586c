"""What every family is, whatever its layers."""

from collections.abc import Callable

from torch import Tensor, nn

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
        return sum(parameter.numel() for parameter in self.parameters())

    def flops(self, inputs: int, targets: int) -> float:
        """Floating-point operations of one row of so many inputs and targets, forward and backward.

        6 for each weight of a matrix and token that meets it, and 12 for each pair of query and key and unit of width:
        what a step needs, without recomputation. A look-up costs nothing.
        """
        raise NotImplementedError


def matrix_weights(module: nn.Module) -> int:
    """Weights of all matrices in `module`, also while ZeRO-3 has them sharded."""
    return sum(getattr(weight, "ds_numel", weight.numel()) for weight in module.parameters() if _is_matrix(weight))


def _is_matrix(weight: Tensor) -> bool:
    return len(getattr(weight, "ds_shape", weight.shape)) > 1  # under ZeRO-3 a parameter's own shape is empty
