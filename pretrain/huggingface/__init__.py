"""Export of models to Hugging Face transformers, and import; one module per family.

To add a family, write a module with `CONVERSIONS` and name the module in the family's entry in
`pretrain.models.families`. The other modules here are shared by all families: files, shards, tokenizers, checks.
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from torch import Tensor

from data_pipeline.foundation.errors import UserError
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.byte_level_bpe import ByteLevelBPE
from data_pipeline.tokenizer.tokenizer_json import TokenizerJson
from pretrain.checkpoint.initial import save_weights
from pretrain.huggingface import card, directory, rewriting, tokenizer_import, yan
from pretrain.huggingface.conversion import Conversion
from pretrain.huggingface.lineage import Lineage
from pretrain.huggingface.rewriting import TRANSFORMERS
from pretrain.models import FAMILIES, ModelConfig


def conversion_for(config: ModelConfig) -> Conversion:
    """How a model converts to transformers. Raises UserError if transformers has no such model."""
    nearest = min(conversions(config.family), key=lambda one: len(one.lacks(config)))
    if lacks := nearest.lacks(config):
        raise UserError(f"transformers has no {nearest.name or nearest.model_type} with {', '.join(lacks)}")
    return nearest


def conversions(family: str) -> Sequence[Conversion]:
    """How the models of a family convert to transformers and back."""
    module = FAMILIES[family].conversion
    return import_module(module).CONVERSIONS if module else ()


def export(
    state_dict: Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer: Tokenizer,
    out: Path,
    shard_bytes: int = directory.SHARD_BYTES,
    engine: str = TRANSFORMERS,
    encoder_only: bool = False,
    lineage: Lineage | None = None,
) -> str:
    """Writes a directory for `from_pretrained(out)`; returns a sentence that says how to load it.

    `state_dict` holds whole fp32 tensors under the names of the model's `state_dict()`. `out` must be new or empty, and
    appears only once it is complete. Weights above `shard_bytes` are split into several files. `engine`: the one whose
    converter will read the directory. `encoder_only`: leaves out the decoder. `lineage`: where the model comes from,
    for its card and the tokenizer's mask token. Raises UserError if weights, config and tokenizer don't fit together,
    or transformers or the engine has no such model.
    """
    conversion = conversion_for(config)
    exported = rewriting.exported(conversion, state_dict, config, tokenizer, engine, encoder_only)
    lineage = lineage or Lineage()
    readme = card.page(lineage, config, conversion, engine, encoder_only)
    directory.write(exported, conversion, tokenizer, lineage.objective, readme, out, shard_bytes)
    name = conversion.encoder.class_name if encoder_only and conversion.encoder else conversion.class_name
    permission = ", both with trust_remote_code=True" if conversion.remote_code else ""
    return f"{name}.from_pretrained and AutoTokenizer.from_pretrained load it{permission}"


def load_state(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Reads a model that transformers saved: its config, and fp32 weights under the names of our `state_dict()`.

    `vocab_size` counts all rows of the embedding matrix: the files don't say how many of them are padding.
    """
    config, state, _ = _load(path)
    return config, state


def _load(path: Path) -> directory.Imported:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's: our own checks say what is wrong
        return directory.read([one for family in FAMILIES for one in conversions(family)], path)


def import_(path: Path, out: Path) -> ModelConfig:
    """Writes a checkpoint of step 0 with the model and tokenizer that transformers saved in the directory `path`.

    A run on a corpus with this tokenizer has the same config: `vocab_size` counts the tokenizer's ids, and further rows
    of the matrix are padding. Raises UserError for what our models or tokenizers don't support.
    """
    config, state, tokenizer = read(path)
    save_weights(config, state, tokenizer, out)
    return config


def import_yan(path: Path, tokenizer: Path, out: Path) -> ModelConfig:
    """Writes a checkpoint of step 0 from one of Yan's own code. `tokenizer`: a directory with GPT-2's files.

    Raises UserError if the file is no such checkpoint, or the tokenizer isn't the model's.
    """
    model = Tokenizer(ByteLevelBPE.read(tokenizer))
    config, state = yan.read(path, model.vocabulary.eos)
    if config.vocab_size != model.size:
        raise UserError(f"{path}: the model has {config.vocab_size} ids, the tokenizer {tokenizer} {model.size}")
    save_weights(config, state, model, out)
    return config


def read(path: Path) -> tuple[ModelConfig, dict[str, Tensor], Tokenizer]:
    """The model and tokenizer of the directory `path`, as `import_` writes them.

    Prints a line for each choice that the files leave open.
    """
    config, state, replaced = _load(path)
    tokenizer = tokenizer_import.read(path)
    rows = config.padded_vocab_size
    if isinstance(tokenizer.model, TokenizerJson):
        tokenizer = _with_rows(tokenizer, tokenizer.model, rows, path)
        roles = {"pad_id": tokenizer.vocabulary.pad, "eos_id": tokenizer.vocabulary.eos}
        config = config.model_copy(update=roles)  # chosen with a view to config.json
    vocabulary = tokenizer.vocabulary
    if replaced and replaced[1] < tokenizer.size and replaced[1] not in vocabulary.special.values():
        raise UserError(
            f"{path}: {replaced[0]} is {replaced[1]} in config.json, which the tokenizer gives to text. transformers "
            "has a vector for this id beside the embedding, and ours has none. Expected an id without a use in text"
        )
    if tokenizer.size > rows:
        raise UserError(f"{path}: the tokenizer has {tokenizer.size} ids, the embedding matrix {rows} rows")
    if "eos_id" not in config.model_fields_set:  # BERT's config.json has none
        config = config.model_copy(update={"eos_id": vocabulary.eos})
    for key, configured, has in (("pad", config.pad_id, vocabulary.pad), ("eos", config.eos_id, vocabulary.eos)):
        if configured != has:
            raise UserError(f"{path}: {key}_token_id is {configured} in config.json, but the tokenizer's is {has}")
    config = config.model_copy(
        update={"vocab_size": tokenizer.size, "pad_vocab_to_multiple_of": _unit(rows, tokenizer.size)}
    )
    return config, state, tokenizer


def _with_rows(tokenizer: Tokenizer, model: TokenizerJson, rows: int, path: Path) -> Tokenizer:
    """The tokenizer without added tokens for which the model has no row, such as Gemma 3's token of an image."""
    for line in model.notes:
        print(f"{path}: {line}", file=sys.stderr)
    if tokenizer.sentinels or model.size <= rows:
        return tokenizer
    kept = model.first(rows)
    gone = [f"{token['content']} ({token['id']})" for token in model.saved["added_tokens"] if token["id"] >= rows]
    print(f"{path}: left out: {', '.join(gone)}; the embedding matrix has {rows:,} rows", file=sys.stderr)
    return Tokenizer(kept, tokenizer.special_tokens)


def _unit(rows: int, ids: int) -> int:
    """The `pad_vocab_to_multiple_of` that gives `ids` ids `rows` rows: 128 if it does, else the smallest."""
    return next(unit for unit in (128, *range(1, rows + 1)) if -(-ids // unit) * unit == rows)


__all__ = ["conversion_for", "conversions", "export", "import_", "import_yan", "load_state", "read"]
