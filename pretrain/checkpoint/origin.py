"""The run that a checkpoint belongs to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.loading.mixing import Mixture
from data_pipeline.tokenizer import Tokenizer
from pretrain.config.run_config import CheckpointSection


@dataclass(frozen=True)
class Origin:
    """What all checkpoints of `run` have in common, as seen by one of its ranks.

    For `identity` see `Index`. `mixture` gives the number of rows of each corpus before a position.
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
