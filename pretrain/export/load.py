"""Import: reads a directory that transformers saved, and writes a checkpoint of step 0."""

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import printable
from data_pipeline.base.json_file import read_json
from data_pipeline.base.packages import example
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.tokenizer_json import TokenizerJson, optional_json
from pretrain.engine.checkpoint.trained import save_weights
from pretrain.export import tokenizer_files, weights
from pretrain.models import FAMILIES, ModelConfig, meta_model
from pretrain.models.state_dict_adapter import (
    OUTPUT,
    HFModel,
    Json,
    State,
    drop_copies,
    hf_models,
    in_their_names,
    refuse_others,
    tensor_names,
    tied,
    to_ours,
)

CONFIG, GENERATION = "config.json", "generation_config.json"
# Keys of any config.json: quantized weights, weights in another file, layers of different shapes.
_FIXED: Json = {"quantization_config": None, "transformers_weights": None, "per_layer_config": None, "pruned_heads": {}}
# Relatives of our families, and what the nearest family lacks.
_LACKING = {
    "switch_transformers": "t5 has no layers of experts, between which a router chooses",
    "longt5": "t5 has no local and transient-global attention, which LongT5's encoder has",
    "mbart": "bart has no norms before its layers",
    "m2m_100": "bart has no norms before its layers and no sinusoidal positions",
    "pegasus": "bart has no norms before its layers and no sinusoidal positions",
    "marian": "bart has no sinusoidal positions",
}
_END_OF_IMAGE = 256_000  # transformers' default in T5Gemma 2


def import_(path: Path, out: Path) -> ModelConfig:
    """Writes a checkpoint of step 0 with the model and tokenizer that transformers saved in the directory `path`.

    `vocab_size` counts the tokenizer's ids, and further rows of the embedding are padding, so a run on a corpus with
    this tokenizer has the same config. Raises UserError for what our models or tokenizers don't support.
    """
    config, state, tokenizer = _read(path)
    save_weights(config, state, tokenizer, out)
    return config


def read(path: Path) -> tuple[ModelConfig, State, Tokenizer]:
    """The model and tokenizer of the directory `path`, as `import_` writes them: weights are fp32.

    Prints a line for each choice that the files leave open.
    """
    config, state, tokenizer = _read(path)
    return config, weights.in_fp32(state), tokenizer


def _read(path: Path) -> tuple[ModelConfig, State, Tokenizer]:
    """`read`, with weights in the file's floating-point type."""
    config, state, starts = _load_state(path)
    tokenizer = tokenizer_files.read(path)
    rows = config.padded_vocab_size
    if isinstance(tokenizer.model, TokenizerJson):
        tokenizer = _with_rows(tokenizer, tokenizer.model, rows, path)
        roles = {"pad_id": tokenizer.vocabulary.pad, "eos_id": tokenizer.vocabulary.eos}
        config = config.model_copy(update=roles)  # the tokenizer chose them by config.json too
    _refuse_other_start(config, starts)
    vocabulary = tokenizer.vocabulary
    if config.family == "t5gemma2":
        _refuse_end_of_image(tokenizer, path)
    if tokenizer.size > rows:
        raise UserError(f"{path}: the tokenizer has {tokenizer.size} ids, the embedding matrix {rows} rows")
    if "eos_id" not in config.model_fields_set:  # BERT's config.json has none
        config = config.model_copy(update={"eos_id": vocabulary.eos})
    for key, configured, has in (("pad", config.pad_id, vocabulary.pad), ("eos", config.eos_id, vocabulary.eos)):
        if configured != has:
            raise UserError(f"{path}: {key}_token_id is {configured} in config.json, but the tokenizer's is {has}")
    ids = tokenizer.size
    # 128 if that makes as many rows, else the smallest unit that does
    unit = next(unit for unit in (128, *range(1, rows + 1)) if -(-ids // unit) * unit == rows)
    return config.model_copy(update={"vocab_size": ids, "pad_vocab_to_multiple_of": unit}), state, tokenizer


def _with_rows(tokenizer: Tokenizer, model: TokenizerJson, rows: int, path: Path) -> Tokenizer:
    """The tokenizer without added tokens that have no row in the embedding, such as Gemma 3's image token."""
    for line in model.notes:
        print(f"{path}: {line}", file=sys.stderr)
    if tokenizer.sentinels or model.size <= rows:
        return tokenizer
    shortened = model.first(rows)
    tokens = [(token["content"], token["id"]) for token in model.saved["added_tokens"]]
    gone = [f"{printable(content)} ({id_})" for content, id_ in tokens if id_ >= rows]
    print(f"{path}: left out: {', '.join(gone)}; the embedding matrix has {rows:,} rows", file=sys.stderr)
    return Tokenizer(shortened, tokenizer.special_tokens)


def _refuse_end_of_image(tokenizer: Tokenizer, path: Path) -> None:
    """Raises UserError if text can have the token after an image, whose vector transformers keeps beside the
    embedding."""
    id_ = read_json(path / CONFIG, Json)["encoder"].get("eoi_token_index", _END_OF_IMAGE)
    if id_ < tokenizer.size and id_ not in tokenizer.vocabulary.special.values():
        raise UserError(
            f"{path}: encoder.eoi_token_index is {id_} in config.json, which the tokenizer gives to text. transformers "
            "has a vector for this id beside the embedding, and ours has none. Expected an id without a use in text"
        )


def load_state(directory: Path) -> tuple[ModelConfig, State]:
    """Reads a model that transformers saved: its config, and fp32 weights under the names of our `state_dict()`.

    `vocab_size` counts all rows of the embedding: without the tokenizer nothing says how many of them are padding.
    Raises UserError, which names the setting or tensor, for what our model doesn't support; FailedError if a file is
    damaged.
    """
    config, state, starts = _load_state(directory)
    _refuse_other_start(config, starts)
    return config, weights.in_fp32(state)


def _load_state(directory: Path) -> tuple[ModelConfig, State, dict[Path, Any]]:
    """`load_state`, with weights in the file's floating-point type, and by file, what transformers' decoder starts
    from."""
    path = directory / CONFIG
    if not path.exists():
        way_out = "" if directory.exists() else "; from the Hub: hf download NAME --local-dir DIR"
        raise UserError(f"{path}: no such file{way_out}")
    saved = read_json(path, Json)
    by_type: dict[str, HFModel] = {}
    for family in FAMILIES:  # families that ship come first: a package's family may be exported as the same model
        for one in hf_models(family):
            by_type.setdefault(one.model_type, one)
    hf = by_type.get(str(saved.get("model_type")))
    if hf is None:
        name = saved.get("model_type")
        if lacking := _LACKING.get(str(name)):
            raise UserError(f"{path}: model_type is {name!r}: our {lacking}")
        raise UserError(f"{path}: model_type is {name!r}, not one of {', '.join(by_type)}{example('families', name)}")
    refuse_others(saved, _FIXED, f"{path}: ")
    stored = weights.read(directory)
    settings, theirs = _settings(_needed(saved, hf), stored, hf, path)
    refuse_others(settings, hf.fixed, f"{path}: ")
    names, rejection = {name: name for name in stored}, None
    try:
        if theirs:
            names = _loaded_names(stored, hf.class_name, theirs, path)
    except UserError as error:  # raised below, after our own checks, which name keys and tensors
        rejection = error
    try:
        config, state = from_hf(hf, settings, {names[name]: tensor for name, tensor in stored.items()})
    except KeyError as error:
        raise UserError(f"{path}: lacks {error}") from None
    except ValidationError as error:
        raise UserError("\n".join(f"{path}: {line}" for line in in_their_names(error, hf.all_keys))) from None
    except UserError as error:
        raise UserError(f"{directory}: {error}") from None
    if rejection:
        raise rejection
    if not hf.encoder_decoder:
        return config, state, {}
    files = {path: settings, directory / GENERATION: optional_json(directory / GENERATION)}
    return config, state, {file: values.get("decoder_start_token_id") for file, values in files.items()}


def from_hf(hf: HFModel, settings: Json, tensors: State) -> tuple[ModelConfig, State]:
    """Our config and tensors, from config.json with transformers' defaults and the tensors of a file.

    Raises UserError for what our model doesn't support, for missing and unexpected tensors, and for copies that differ.
    """
    tensors = dict(tensors)
    drop_copies(tensors, hf.copies)
    ours = {**to_ours(settings, hf.settings), **hf.config_from_hf(settings, tensors)}
    config = hf.config_class.model_validate(ours)
    model = meta_model(config)
    expected, matrix = hf.tensors_to_hf(config, model.state_dict()), tied(model)
    names = tensor_names(hf, expected, matrix)
    if matrix:
        drop_copies(tensors, {names[matrix]: [(hf.names or {}).get(OUTPUT, OUTPUT)]})
    weights.check({names[name]: tuple(tensor.shape) for name, tensor in expected.items()}, tensors)
    return config, hf.tensors_from_hf(config, {name: tensors[names[name]] for name in expected})


def _needed(saved: Json, hf: HFModel, above: str = "") -> Json:
    """config.json, or its section at `above`, with the values of `hf.ignored`."""
    needed: Json = {}
    for key, value in saved.items():
        path = f"{above}{key}"
        needed[key] = hf.ignored.get(path, _needed(value, hf, f"{path}.") if isinstance(value, dict) else value)
    return needed


def _settings(saved: Json, stored: Iterable[str], hf: HFModel, path: Path) -> tuple[Json, Any]:
    """The settings of config.json with transformers' defaults, and transformers' config (None: it lacks the model).

    Of several EOS ids the first is kept: the tokenizer says which one is ours.
    """
    import transformers  # 1.4 s and 69 MB: an export and a wrong directory do without

    theirs = None
    settings = {"rope_factor": 1.0, **saved} if hf.code else saved  # which earlier exports lack
    keys = None if hf.names is None else hf.all_keys
    weights.check_depths(saved, stored, keys, path)  # before transformers makes lists as long as there are layers
    if not hf.code:
        with _by_transformers(path):
            theirs = transformers.CONFIG_MAPPING[saved["model_type"]].from_dict(saved)
        settings = {**saved, **theirs.to_dict()} | {key: saved.get(key) for key in hf.as_saved}
        weights.check_depths(settings, stored, keys, path)
    for section in (settings, settings.get("encoder"), settings.get("decoder")):
        if isinstance(section, dict) and isinstance(ends := section.get("eos_token_id"), list) and ends:
            section["eos_token_id"] = ends[0]
    return settings, theirs


def _refuse_other_start(config: ModelConfig, starts: dict[Path, Any]) -> None:
    """Raises UserError if transformers' decoder starts from another token than ours. `starts`: see `_load_state`."""
    ours = config.decoder_start_id
    for file, start in starts.items():
        if start not in (None, ours):
            token = {config.eos_id: "EOS", config.pad_id: "padding"}.get(ours, "BOS")
            raise UserError(
                f"{file}: decoder_start_token_id is {start!r}, but our {config.family} starts from {token}, {ours}"
            )


def _loaded_names(names: Iterable[str], class_name: str, config: Any, path: Path) -> dict[str, str]:
    """The name under which transformers loads each tensor of a file into the class `class_name`.

    transformers renames some tensors: the text encoder of T5Gemma 2, the norms in BERT's published files, and the
    tensors of a model without a head. Raises UserError, which names `path`, if transformers can't build the model, or
    loads two tensors under one name.
    """
    import transformers  # as in `_settings`
    from transformers import conversion_mapping, core_model_loading

    with _by_transformers(path), torch.device("meta"):
        model = getattr(transformers, class_name)(config)
    conversions = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, core_model_loading.WeightRenaming)]
    state = model.state_dict()
    found: dict[str, str] = {}
    for name in names:
        loaded, _ = core_model_loading.rename_source_key(name, renamings, [], model.base_model_prefix, state)
        if loaded in found:
            raise UserError(f"{path.parent}: {found[loaded]} and {name} are one tensor in transformers, {loaded}")
        found[loaded] = name
    return {name: loaded for loaded, name in found.items()}


@contextmanager
def _by_transformers(path: Path) -> Iterator[None]:
    """Within the block, transformers and torch don't warn: our own checks refuse what the warnings are about. Raises
    UserError, which names `path`, if transformers rejects the file."""
    from transformers.utils import logging  # as in `_settings`

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except Exception as error:  # several libraries raise their own exceptions for wrong types and values
        reason = printable(" ".join(str(error).split())) or type(error).__name__
        raise UserError(f"{path}: transformers rejects it: {reason}") from None
    finally:
        logging.set_verbosity(before)
