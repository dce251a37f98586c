"""Directories for transformers' `from_pretrained`: written completely or not at all, read without pickles."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_pipeline.foundation.atomic import new_directory
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.tokenizer import Tokenizer
from pretrain.huggingface import in_transformers, json_files, tokenizer_files
from pretrain.huggingface.engines import TRANSFORMERS, rewritten
from pretrain.huggingface.interchange import Interchange, State, check, shapes
from pretrain.huggingface.json_files import Json
from pretrain.huggingface.without_mup import without_mup
from pretrain.models import ModelConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
README, ADAPTER = "README.md", "adapter_config.json"
SHARD_BYTES = 5_000_000_000
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
# Settings that any config.json may have: its weights are quantized, in another file, or differ in shape between layers.
_FIXED: Json = {"quantization_config": None, "transformers_weights": None, "per_layer_config": None, "pruned_heads": {}}


def write(
    interchange: Interchange,
    state_dict: Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer: Tokenizer,
    out: Path,
    shard_bytes: int,
    engine: str,
    encoder_only: bool,
    readme: str,
) -> None:
    """Writes `out`, which appears only once it is complete. Weights above `shard_bytes` go into several files."""
    check(shapes(config), state_dict, "the weights don't fit the model")
    if tokenizer.size != config.vocab_size:
        raise UserError(
            f"the tokenizer's {tokenizer.pieces} pieces, {len(tokenizer.special_tokens)} special tokens and "
            f"{tokenizer.sentinels} sentinels make {tokenizer.size} ids, "
            f"but the model's vocab_size is {config.vocab_size}"
        )
    padding = list(range(tokenizer.size, config.padded_vocab_size)) if engine == TRANSFORMERS else []
    plain = without_mup(interchange, state_dict, config)
    exported = interchange.to_hugging_face(*rewritten(interchange, *plain, tokenizer, engine))
    if encoder_only:
        if interchange.encoder is None:
            raise UserError(f"--encoder-only: transformers can't load the encoder of a {config.family} by itself")
        exported = interchange.encoder.of(exported)
    with new_directory(out) as partial:
        (partial / README).write_text(readme, encoding="utf-8")
        tokenizer_files.write(tokenizer, interchange, partial)
        bos = {"bos_token_id": tokenizer.vocabulary.bos}
        json_files.write(partial / CONFIG, {**exported.config, **bos})
        if exported.generation_config is not None:
            suppressed = {"suppress_tokens": padding} if padding else {}
            json_files.write(partial / GENERATION, {**exported.generation_config, **bos, **suppressed})
        for name, content in exported.files.items():
            (partial / name).write_bytes(content)
        _write_tensors(exported.tensors, partial, shard_bytes)


def read(interchanges: Iterable[Interchange], directory: Path) -> tuple[ModelConfig, State]:
    """Reads the model in `directory`: its config, and fp32 weights under our names. `model_type` selects the family.

    Raises UserError, with the setting or tensor, for what our model doesn't support; FailedError if a file is damaged.
    """
    path = directory / CONFIG
    saved = json_files.read(path)
    by_type = {interchange.model_type: interchange for interchange in interchanges}
    if saved.get("model_type") not in by_type:
        raise UserError(f"{path}: model_type is {saved.get('model_type')!r}, not one of {', '.join(by_type)}")
    interchange = by_type[saved["model_type"]]
    _refuse_others(_FIXED, saved, path)
    theirs = None if interchange.remote_code else in_transformers.config_of(saved, path)
    settings = {**saved, **theirs.to_dict()} if theirs else saved
    _refuse_others(interchange.fixed, settings, path)
    for section in (settings, settings.get("encoder"), settings.get("decoder")):
        if isinstance(section, dict) and isinstance(ends := section.get("eos_token_id"), list) and ends:
            section["eos_token_id"] = ends[0]  # one of several end marks; the tokenizer says which is ours
    tensors = _read_tensors(directory)
    rejection = None
    if theirs:
        try:
            names = in_transformers.loaded_names(tensors, interchange.class_name, theirs, path)
            tensors = {names[name]: tensor for name, tensor in tensors.items()}
        except UserError as error:  # our own checks name keys and tensors, so they go first
            rejection = error
    try:
        config, state = interchange.from_hugging_face(settings, tensors)
    except KeyError as error:
        raise UserError(f"{path}: lacks {error}") from None
    except ValidationError as error:
        lines = [f"{path}: {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise UserError("\n".join(lines)) from None
    except UserError as error:
        raise UserError(f"{directory}: {error}") from None
    if rejection:
        raise rejection
    if interchange.encoder_decoder:
        generation = directory / GENERATION
        for file, values in ((path, settings), (generation, json_files.read_if_there(generation))):
            start = values.get("decoder_start_token_id")
            if start not in (None, config.decoder_start_id):
                ours = config.decoder_start_id
                mark = {config.eos_id: "the end mark", config.pad_id: "padding"}.get(ours, "the begin mark")
                raise UserError(
                    f"{file}: decoder_start_token_id is {start}, but our {config.family} starts from {mark}, {ours}"
                )
    return config, state


def _refuse_others(fixed: Mapping[str, Any], settings: Json, path: Path) -> None:
    """Raises UserError that names the settings with which our model would compute something else."""
    problems = [
        f"{key} is {settings[key]!r}, but must be {ours!r}"
        for key, ours in fixed.items()
        if settings.get(key, ours) != ours
    ]
    if problems:
        raise UserError(f"{path}: our models don't support these settings: {'; '.join(problems)}")


def _write_tensors(tensors: State, directory: Path, shard_bytes: int) -> None:
    shards: list[State] = [{}]
    held = 0
    for name, tensor in tensors.items():
        if shards[-1] and held + tensor.nbytes > shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = tensor.contiguous()
        held += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], directory / WEIGHTS, metadata={"format": "pt"})
        return
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, directory / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    json_files.write(directory / INDEX, index)


def _read_tensors(directory: Path) -> State:
    """The tensors that transformers loads, in fp32: from model.safetensors or else from the shards in its index.

    Other files are ignored: model.ema.safetensors, for example, is a variant of the model.
    """
    if (directory / ADAPTER).exists():
        raise UserError(
            f"{directory / ADAPTER}: weights in an adapter can't be imported; merge it into the model first"
        )
    if (directory / WEIGHTS).exists():
        return _read_file(directory / WEIGHTS)
    if not (directory / INDEX).exists():
        found = sorted(path.name for path in directory.iterdir() if path.suffix in _WEIGHT_FILES)
        raise UserError(
            f"{directory}: expected {WEIGHTS} or {INDEX}, found {', '.join(found) or 'no weights'}. To import a "
            f"variant, rename it to {WEIGHTS}. Other formats may run code when they are read: save them again "
            "with transformers' save_pretrained"
        )
    tensors: State = {}
    for file, names in _shards(directory / INDEX).items():
        if not (directory / file).exists():
            raise UserError(f"{directory / file}: no such file, but {INDEX} names it")
        shard = _read_file(directory / file)
        if others := sorted(names ^ shard.keys()):
            raise FailedError(f"{directory / file}: holds other tensors than {INDEX} says: {', '.join(others[:8])}")
        tensors |= shard
    return tensors


def _shards(index: Path) -> dict[str, set[str]]:
    """The names of the tensors in each file that `index` lists. Raises FailedError if a file is not beside it."""
    weight_map = json_files.read(index).get("weight_map")
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items() if isinstance(weight_map, dict) else ():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise FailedError(f"{index}: damaged: {name} is in {file!r}, not in a *.safetensors file beside it")
        shards.setdefault(file, set()).add(name)
    if not shards:
        raise FailedError(f"{index}: damaged: expected weight_map, from names of tensors to files")
    return shards


def _read_file(path: Path) -> State:
    try:
        tensors = load_file(path)
    except Exception as error:
        raise FailedError(f"{path}: damaged: {error}") from None
    if wrong := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise FailedError(f"{path}: damaged: infinite numbers or NaN in {', '.join(sorted(wrong)[:8])}")
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
