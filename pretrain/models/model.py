"""The base class of all families."""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn

from pretrain.config.models import ModelConfig
from pretrain.models.loss import Losses


class Model(nn.Module):
    """`forward` takes the tensors of a batch by name and returns the loss of every prediction.

    Tensors have the names that `data_pipeline.loading.batches.as_batch` gives them. `decoder_reads_targets`: a decoder
    reads the targets; otherwise all layers read the inputs.
    """

    config: ModelConfig
    decoder_reads_targets: ClassVar[bool] = False

    forward: Callable[..., Losses]

    def begin_step(self, seed: int, step: int) -> None:
        """Called before each training step. A family that draws something for a whole step draws it by these
        two numbers."""

    def before_head(self, x: Tensor) -> Tensor:
        """The input (…, d_model) of the output matrix, from the decoder's states `x` (…, d_model)."""
        return x

    def num_parameters(self) -> int:
        """The number of trained scalars; a tied matrix counts once. If ZeRO-3 shards the model, use its `outline`."""
        return sum(parameter.numel() for parameter in self.parameters())
