"""The run that a checkpoint is of."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.loading.mixing import Mixture
from data_pipeline.tokenizer import Tokenizer
from pretrain.config import CheckpointSection


@dataclass(frozen=True)
class Origin:
    """What every checkpoint of `run` has in common, on one of its ranks.

    `identity`: see `Index`. `mixture`: says how many rows of each corpus come before a position.
    """

    run: Path
    rank: int
    ranks: int
    zero_stage: int
    identity: dict[str, Any]
    config_fingerprint: str
    tokenizer: Tokenizer
    mixture: Mixture
    settings: CheckpointSection
