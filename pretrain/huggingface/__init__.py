"""Models for Hugging Face transformers, and back; one file for each family.

A family is added as a module with its `INTERCHANGE`, entered in `FAMILIES`. All that is the same for every family
(files, shards, tokenizers, checks) stands beside them.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from data_pipeline.errors import UserError
from data_pipeline.tokenizer import Tokenizer
from pretrain.huggingface import bert, directory, gpt2, t5
from pretrain.huggingface.interchange import Exported, Interchange
from pretrain.models import ModelConfig

FAMILIES: dict[str, Interchange] = {
    "t5": t5.INTERCHANGE,
    "decoder_only": gpt2.INTERCHANGE,
    "encoder_only": bert.INTERCHANGE,
}


def export(state_dict: Mapping[str, Tensor], config: ModelConfig, tokenizer: Tokenizer, out: Path) -> str:
    """Writes a directory for `from_pretrained(out)`, and returns the name of transformers' class for the model.

    `state_dict` has the names of the model's `state_dict()`, whole tensors in fp32. `out` must not exist or be empty;
    it appears when it is whole. Raises UserError for what doesn't fit together.
    """
    if config.family not in FAMILIES:
        raise UserError(f"models of the family {config.family} can't be exported, only {', '.join(FAMILIES)}")
    interchange = FAMILIES[config.family]
    directory.write(interchange, state_dict, config, tokenizer, out)
    return interchange.class_name


def load_state(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Config and weights of a model that transformers saved; the weights have the names of our `state_dict()`, in fp32.

    `vocab_size` counts the rows of the embedding matrix: the files don't say how many of them are padding.
    """
    return directory.read(FAMILIES.values(), path)


__all__ = ["FAMILIES", "Exported", "Interchange", "export", "load_state"]
