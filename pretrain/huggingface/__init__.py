"""Models for Hugging Face transformers, and back; one file for each family.

A family is added as a module with its `INTERCHANGE`, which its entry in `pretrain.models.families` names. All that is
the same for every family (files, shards, tokenizers, checks) stands beside them.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from torch import Tensor

from data_pipeline.foundation.errors import UserError
from data_pipeline.tokenizer import Tokenizer
from pretrain.checkpoint.initial import save_weights
from pretrain.huggingface import directory, tokenizer_files
from pretrain.huggingface.interchange import Exported, Interchange
from pretrain.models import FAMILIES, ModelConfig


def interchange_of(family: str) -> Interchange:
    """Raises UserError where transformers has no such model."""
    module = FAMILIES[family].interchange
    if module is None:
        exported = ", ".join(name for name, entry in FAMILIES.items() if entry.interchange)
        raise UserError(f"models of the family {family} can't be exported, only {exported}")
    return import_module(module).INTERCHANGE


def export(
    state_dict: Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer: Tokenizer,
    out: Path,
    shard_bytes: int = directory.SHARD_BYTES,
) -> str:
    """Writes a directory for `from_pretrained(out)`, and returns in words how it is loaded.

    `state_dict` has the names of the model's `state_dict()`, whole tensors in fp32. `out` must not exist or be empty;
    it appears when it is whole. Weights of more than `shard_bytes` are cut into several files. Raises UserError for
    what doesn't fit together.
    """
    interchange = interchange_of(config.family)
    directory.write(interchange, state_dict, config, tokenizer, out, shard_bytes)
    return interchange.usage


def load_state(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Config and weights of a model that transformers saved; the weights have the names of our `state_dict()`, in fp32.

    `vocab_size` counts the rows of the embedding matrix: the files don't say how many of them are padding.
    """
    interchanges = [interchange_of(name) for name, entry in FAMILIES.items() if entry.interchange]
    return directory.read(interchanges, path)


def import_(path: Path, out: Path) -> ModelConfig:
    """Writes a checkpoint of step 0 with the model and the tokenizer that transformers saved in the directory `path`.

    Its config is that of a run file over a corpus with this tokenizer: `vocab_size` counts the tokenizer's ids, and
    rows of the matrix above them pad it. Raises UserError for what our model or our tokenizers can't say.
    """
    config, state = load_state(path)
    tokenizer = tokenizer_files.read(path)
    rows, vocabulary = config.padded_vocab_size, tokenizer.vocabulary
    if tokenizer.size > rows:
        raise UserError(f"{path}: the tokenizer has {tokenizer.size} ids, the embedding matrix {rows} rows")
    for key, said, has in (("pad", config.pad_id, vocabulary.pad), ("eos", config.eos_id, vocabulary.eos)):
        if said != has:
            raise UserError(f"{path}: {key}_token_id is {said} in config.json, but the tokenizer's is {has}")
    config = config.model_copy(
        update={"vocab_size": tokenizer.size, "pad_vocab_to_multiple_of": _unit(rows, tokenizer.size)}
    )
    save_weights(config, state, tokenizer, out)
    return config


def _unit(rows: int, ids: int) -> int:
    """What to pad to a multiple of so that so many ids get so many rows: 128 where it does, else the least."""
    return next(unit for unit in (128, *range(1, rows + 1)) if -(-ids // unit) * unit == rows)


__all__ = ["Exported", "Interchange", "export", "import_", "interchange_of", "load_state"]
