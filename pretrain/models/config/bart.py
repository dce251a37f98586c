"""BART's config."""

from typing import Literal

from pydantic import PositiveFloat

from pretrain.models.config.base import Count
from pretrain.models.config.vanilla import PostNormConfig


class BartConfig(PostNormConfig):
    """BART (Lewis et al. 2020). The decoder starts from EOS, as in fairseq."""

    family: Literal["bart"] = "bart"
    activation: Literal["relu", "gelu", "gelu_tanh"] = "gelu"
    max_positions: Count = 1024
    """The longest input and the longest target, in tokens."""
    scale_embedding: bool = False
    """Multiply token vectors by √d_model."""
    init_std: PositiveFloat = 0.02
    """The standard deviation of all weights at the start. The default suits widths of 768 and more: narrower models
    learn faster with 1/√d_model."""

    @property
    def decoder_start_id(self) -> int:
        return self.eos_id
