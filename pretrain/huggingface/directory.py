"""Directories for transformers' `from_pretrained`: written completely or not at all, read without pickles."""

import math
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from torch import Tensor

from data_pipeline.foundation.atomic import new_directory, write_json
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import human_size, printable
from data_pipeline.foundation.json_file import read_json
from data_pipeline.tokenizer import Tokenizer
from pretrain.huggingface import tokenizer_export, transformers_config, weights
from pretrain.huggingface.conversion import (
    Conversion,
    Exported,
    Json,
    State,
    check_sizes,
    in_their_names,
    leaves,
)
from pretrain.models import ModelConfig

CONFIG, GENERATION = "config.json", "generation_config.json"
README = "README.md"
PATTERN = "model{suffix}.safetensors"  # weights.WEIGHTS, or the files that weights.INDEX lists
SHARD_BYTES = 5_000_000_000
# What names the labels of a classifier: transformers makes lists as long as there are labels.
_OF_CLASSIFIERS = ("num_labels", "id2label", "label2id")
_LONGEST = 2**30  # bytes of a file that isn't weights
# Settings that any config.json may have: its weights are quantized, in another file, or differ in shape between layers.
_FIXED: Json = {"quantization_config": None, "transformers_weights": None, "per_layer_config": None, "pruned_heads": {}}


def write(
    exported: Exported,
    conversion: Conversion,
    tokenizer: Tokenizer,
    objective: str | None,
    readme: str,
    out: Path,
    shard_bytes: int,
) -> None:
    """Writes `out`, which appears only once it is complete. Weights above `shard_bytes` go into several files.

    `objective`: the name of what the model has learnt, if it is known.
    """
    from huggingface_hub import save_torch_state_dict  # takes a second to import

    with new_directory(out) as partial:
        (partial / README).write_text(readme, encoding="utf-8")
        tokenizer_export.write(tokenizer, conversion, objective, partial)
        write_json(partial / CONFIG, exported.config)
        if exported.generation_config is not None:
            write_json(partial / GENERATION, exported.generation_config)
        for name, content in exported.files.items():
            (partial / name).write_bytes(content)
        # of a matrix cut to its vocabulary it would refuse to save a view
        tensors = {name: one.clone() if _is_view(one) else one for name, one in exported.tensors.items()}
        save_torch_state_dict(tensors, partial, filename_pattern=PATTERN, max_shard_size=shard_bytes)


def _is_view(tensor: Tensor) -> bool:
    """Whether its storage holds more than the tensor."""
    return tensor.untyped_storage().nbytes() > tensor.nbytes


class Imported(NamedTuple):
    """A model under our names, with fp32 weights. `replaced`: as in `Conversion`."""

    config: ModelConfig
    state: State
    replaced: tuple[str, int] | None


def read(conversions: Iterable[Conversion], directory: Path) -> Imported:
    """Reads the model in `directory`. `model_type` selects the family.

    Nothing is built before the sizes in config.json are found in the headers of the weights: a wrong one could fill the
    memory. Raises UserError, with the setting or tensor, for what our model doesn't support; FailedError if a file is
    damaged.
    """
    path = directory / CONFIG
    check_files(directory)
    try:
        saved = read_json(path, Json)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    by_type = {conversion.model_type: conversion for conversion in conversions}
    named = saved.get("model_type")
    if not isinstance(named, str) or named not in by_type:
        raise UserError(f"{path}: model_type is {named!r}, not one of {', '.join(by_type)}")
    if endless := [".".join(key) for key, value in leaves(saved) if value in (math.inf, -math.inf) or value != value]:
        raise UserError(f"{path}: no finite numbers: {', '.join(endless)}")
    saved = {key: value for key, value in saved.items() if key not in _OF_CLASSIFIERS}
    conversion = by_type[named]
    _refuse_others(_FIXED, saved, path)
    saved = conversion.needed(saved)
    stored = weights.shapes_of(directory)
    check_sizes(saved, stored, conversion.keys, path)  # transformers makes lists as long as there are layers
    theirs = None if conversion.remote_code else transformers_config.config_of(saved, path)
    settings = {**saved, **theirs.to_dict()} if theirs else saved
    check_sizes(settings, stored, conversion.keys, path)
    _refuse_others(conversion.fixed, settings, path)
    for section in (settings, settings.get("encoder"), settings.get("decoder")):
        if isinstance(section, dict) and isinstance(ends := section.get("eos_token_id"), list) and ends:
            section["eos_token_id"] = ends[0]  # one of several EOS tokens; the tokenizer says which is ours
            if outside := [id_ for id_ in ends if id_ >= section.get("vocab_size", id_ + 1)]:
                raise UserError(
                    f"{path}: eos_token_id has {outside}, but the embedding has {section['vocab_size']} rows"
                )
    names, rejection = {name: name for name in stored}, None
    try:
        if theirs:
            names = transformers_config.loaded_names(stored, conversion.class_name, theirs, path)
    except UserError as error:  # our own checks name keys and tensors, so they go first
        rejection = error
    tensors = {names[name]: tensor for name, tensor in weights.read(directory).items()}
    try:
        config, state = conversion.from_hugging_face(settings, tensors, path)
    except KeyError as error:
        raise UserError(f"{path}: lacks {error}") from None
    except ValidationError as error:
        raise UserError("\n".join(f"{path}: {line}" for line in in_their_names(error, conversion.keys))) from None
    except UserError as error:
        raise UserError(f"{directory}: {error}") from None
    _refuse_ids(config, conversion.keys, path)
    if rejection:
        raise rejection
    if conversion.encoder_decoder:
        ours = config.decoder_start_id
        generation = directory / GENERATION
        for file, values in (
            (path, settings),
            (generation, read_json(generation, Json) if generation.exists() else {}),
        ):
            start = values.get("decoder_start_token_id")
            if start not in (None, ours):
                token = {config.eos_id: "EOS", config.pad_id: "padding"}.get(ours, "BOS")
                raise UserError(
                    f"{file}: decoder_start_token_id is {start}, but our {config.family} starts from {token}, {ours}"
                )
    return Imported(config, state, conversion.replaced(settings))


def check_files(directory: Path) -> None:
    """Raises UserError for what no import should read: a pipe, a device, or a description as large as weights."""
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.suffix not in (".json", ".model", ".txt", ".safetensors"):
            continue
        found = path.stat() if path.exists() else path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{printable(str(path))}: no regular file")
        if path.suffix != ".safetensors" and found.st_size > _LONGEST:
            raise UserError(f"{printable(str(path))}: {human_size(found.st_size)}, which is no description of a model")


def _refuse_ids(config: ModelConfig, keys: Mapping[str, str], path: Path) -> None:
    """Raises UserError if a token has a role for which the embedding has no row."""
    rows = config.padded_vocab_size
    roles = {keys[ours]: getattr(config, ours, None) for ours in ("pad_id", "eos_id", "bos_id")}
    if outside := [f"{key} is {id_}" for key, id_ in roles.items() if id_ is not None and id_ >= rows]:
        raise UserError(f"{path}: {'; '.join(outside)}, but the embedding has {rows} rows")


def _refuse_others(fixed: Mapping[str, Any], settings: Json, path: Path) -> None:
    """Raises UserError that names the settings with which our model would compute something else."""
    problems = [
        f"{key} is {settings[key]!r}, but must be {ours!r}"
        for key, ours in fixed.items()
        if settings.get(key, ours) != ours
    ]
    if problems:
        raise UserError(f"{path}: our models don't support these settings: {'; '.join(problems)}")
