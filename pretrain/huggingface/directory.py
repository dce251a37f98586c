"""The directories that transformers' `from_pretrained` reads: written whole or not at all, and read without pickles."""

import json
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_pipeline.atomic import flush
from data_pipeline.errors import FailedError, UserError
from data_pipeline.tokenizer import Tokenizer
from pretrain.huggingface import tokenizer_files
from pretrain.huggingface.interchange import Interchange, Json, State, check, shapes
from pretrain.models import ModelConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000


def write(
    interchange: Interchange,
    state_dict: Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer: Tokenizer,
    out: Path,
    shard_bytes: int,
) -> None:
    """Writes `out`, which appears when it is whole; weights of more than `shard_bytes` in several files."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists already; choose another directory for the export")
    check(shapes(config), state_dict, "the weights don't fit the model")
    if tokenizer.size != config.vocab_size:
        raise UserError(
            f"the tokenizer's {tokenizer.pieces} pieces, {len(tokenizer.special_tokens)} special tokens and "
            f"{tokenizer.sentinels} sentinels make {tokenizer.size} ids, "
            f"but the model's vocab_size is {config.vocab_size}"
        )
    exported = interchange.to_hugging_face(state_dict, config)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        tokenizer_files.write(tokenizer, interchange, partial)
        bos = {"bos_token_id": tokenizer.vocabulary.bos}
        _write_json(partial / "config.json", {**exported.config, **bos})
        if exported.generation_config is not None:
            _write_json(partial / "generation_config.json", {**exported.generation_config, **bos})
        for name, content in exported.files.items():
            (partial / name).write_bytes(content)
        _write_tensors(exported.tensors, partial, shard_bytes)
        for path in partial.iterdir():
            flush(path)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    flush(out.parent)


def read(interchanges: Iterable[Interchange], directory: Path) -> tuple[ModelConfig, State]:
    """Config and fp32 weights, under our names, of the model in `directory`; its `model_type` says which family's."""
    path = directory / "config.json"
    saved = _read_json(path)
    by_type = {interchange.model_type: interchange for interchange in interchanges}
    if saved.get("model_type") not in by_type:
        raise UserError(f"{path}: model_type is {saved.get('model_type')!r}, not one of {', '.join(by_type)}")
    tensors = _read_tensors(directory)
    try:
        return by_type[saved["model_type"]].from_hugging_face(saved, tensors)
    except KeyError as error:
        raise UserError(f"{path}: lacks {error}") from None
    except ValidationError as error:
        lines = [f"{path}: {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise UserError("\n".join(lines)) from None
    except UserError as error:
        raise UserError(f"{directory}: {error}") from None


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
    _write_json(directory / INDEX, index)


def _read_tensors(directory: Path) -> State:
    if (directory / INDEX).exists():
        paths = sorted({directory / file for file in _read_json(directory / INDEX).get("weight_map", {}).values()})
    else:
        paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise UserError(f"{directory}: has no *.safetensors (other formats run code when they are read)")
    tensors: State = {}
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file, but {INDEX} names it")
        try:
            tensors |= load_file(path)
        except Exception as error:
            raise FailedError(f"{path}: damaged: {error}") from None
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _read_json(path: Path) -> Json:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except ValueError:
        raise FailedError(f"{path}: damaged: not valid JSON") from None
    if not isinstance(content, dict):
        raise FailedError(f"{path}: damaged: not a JSON object")
    return content


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
