"""The `optimizer:` section of a run file. This package doesn't import torch.

An optimizer is two files: its settings, which say what it is and what it costs, and the implementation that they name.
A package of your own offers an optimizer through an entry point, which names the class of its settings:

    [project.entry-points."encdec_pretrain.optimizers"]
    lion = "lion.settings:LionConfig"
"""

from typing import Annotated

from data_pipeline.base.config_file import OneOf
from data_pipeline.base.packages import Kinds
from pretrain.config.optimizers.optimizer import OptimizerConfig

_HERE = "pretrain.config.optimizers"
OPTIMIZERS = Kinds(
    "optimizers",
    OptimizerConfig,
    "name",
    {
        "adamw": f"{_HERE}.adamw:AdamWConfig",
        "adamw_scale": f"{_HERE}.adamw_scale:AdamWScaleConfig",
        "adafactor": f"{_HERE}.adafactor:AdafactorConfig",
        "muon": f"{_HERE}.muon:MuonConfig",
    },
)
"""The settings of shipped optimizers and of optimizers that installed packages offer, by name."""

AnyOptimizer = Annotated[OptimizerConfig, OneOf("name", OPTIMIZERS, default="adamw")]
"""The `optimizer:` section of a run file; `name` selects the class."""
