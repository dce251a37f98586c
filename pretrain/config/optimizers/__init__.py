"""The `optimizer:` section of a run file. This package doesn't import torch.

An optimizer is two files: its settings, which say what it is and what it costs, and the implementation that they name.
A package of your own offers an optimizer through an entry point, which names the class of its settings:

    [project.entry-points."encdec_pretrain.optimizers"]
    lion = "lion.settings:LionConfig"
"""

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from data_pipeline.base.config_file import of_kind
from data_pipeline.base.packages import offered
from pretrain.config.optimizers.adafactor import AdafactorConfig
from pretrain.config.optimizers.adamw import AdamWConfig
from pretrain.config.optimizers.adamw_scale import AdamWScaleConfig
from pretrain.config.optimizers.muon import MuonConfig
from pretrain.config.optimizers.optimizer import OptimizerConfig

_SHIPPED: tuple[type[OptimizerConfig], ...] = (AdamWConfig, AdamWScaleConfig, AdafactorConfig, MuonConfig)
OPTIMIZERS = {str(settings.model_fields["name"].default): settings for settings in _SHIPPED}
OPTIMIZERS |= offered("optimizers", OptimizerConfig, OPTIMIZERS, "name")
"""The settings of shipped optimizers and of optimizers that installed packages offer, by name; the first is the
default."""

if TYPE_CHECKING:
    AnyOptimizer = OptimizerConfig
else:
    AnyOptimizer = Annotated[
        reduce(or_, OPTIMIZERS.values()), Field(discriminator="name"), of_kind("name", next(iter(OPTIMIZERS)))
    ]
    """The `optimizer:` section of a run file; `name` selects the class."""
