"""Reads a tokenizer as it is published beside a model: a text gets the ids that transformers' AutoTokenizer gives it.

transformers doesn't always do what tokenizer.json says: for Llama 2's class, for example, it takes only the tokens and
the merges. So transformers reads the files, and what it made of them is kept.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers

from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.json_file import read_json
from data_pipeline.foundation.lazy_imports import imported_at_first_use
from data_pipeline.tokenizer.fast import Roles
from data_pipeline.tokenizer.text_model import read_file
from data_pipeline.tokenizer.tokenizer_json import CONFIG, MODEL, ROLES, Json, TokenizerJson

with imported_at_first_use():
    import transformers  # 3 s and 230 MB, to read a published tokenizer alone

_OF_THE_MODEL = ("config.json", "generation_config.json")
_ROLES = ("pad", "eos", "unk", "bos", "mask")
# The usual spellings of roles, for a tokenizer.json alone and for padding that no file names.
_SPELLED = {
    "eos": ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>"),
    "bos": ("<s>", "<bos>", "<|begin_of_text|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
}


def read(path: Path) -> TokenizerJson:
    """The tokenizer at `path`: a tokenizer.json, or the directory with it; also `tokenizer/` of a checkpoint or corpus.

    Raises UserError if there is none, if its model isn't BPE, or if no file names its EOS; FailedError if a file
    is damaged.
    """
    directory, file = (path, path / MODEL) if path.is_dir() else (path.parent, path)
    if file.name != MODEL:
        raise UserError(f"{path}: expected {MODEL}, or the directory with it")
    if (directory / ROLES).exists():
        return TokenizerJson.read(directory)
    backend = read_backend(file)
    if (kind := type(backend.model).__name__) != "BPE":
        raise UserError(f"{file}: a tokenizer of kind {kind}; tokenizer_json reads BPE alone")
    config: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if any((directory / name).exists() for name in (CONFIG, _OF_THE_MODEL[0])):
        theirs = _in_transformers(directory)
        backend = theirs.backend_tokenizer
        named = {role: getattr(theirs, f"{role}_token_id") for role in _ROLES}
        config = {**(optional_json(directory / CONFIG) or config), **theirs.special_tokens_map}
        config.pop("added_tokens_decoder", None)  # tokenizer.json has them
    else:
        named = {role: _spelled(backend, role) for role in _ROLES}
        config |= {f"{role}_token": backend.id_to_token(id_) for role, id_ in named.items() if id_ is not None}
    ids = backend.get_vocab(with_added_tokens=True).values()
    if set(ids) != set(range(len(ids))):
        raise UserError(f"{file}: {len(ids)} tokens with ids up to {max(ids)}: the ids have gaps")
    roles, notes = _roles(directory, backend, named)
    return TokenizerJson(_normal(backend, roles, file), config, roles, file, tuple(notes))


def read_backend(file: Path) -> tokenizers.Tokenizer:
    """The tokenizer.json `file` in the library. Raises UserError if it can't be read, FailedError if it is damaged."""
    content = read_file(file)
    try:
        return tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the library raises nothing narrower
        raise FailedError(f"{file}: damaged: {error}") from None


def _in_transformers(directory: Path) -> Any:
    kind = transformers.AutoTokenizer
    try:
        return kind.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of several libraries
        raise UserError(f"{directory}: transformers rejects the tokenizer: {' '.join(str(error).split())}") from None


def optional_json(path: Path) -> Json:
    """The settings in the file `path`; empty if there is none."""
    return read_json(path, Json) if path.exists() else {}


def _spelled(backend: tokenizers.Tokenizer, role: str) -> int | None:
    """The token that has the role by its name, or that the model names."""
    names = [backend.model.unk_token] if role == "unk" else _SPELLED.get(role, ())
    found = (backend.token_to_id(name) for name in names if name)
    return next((id_ for id_ in found if id_ is not None), None)


def _roles(directory: Path, backend: tokenizers.Tokenizer, named: dict[str, int | None]) -> tuple[Roles, list[str]]:
    """What has which role, and lines on what isn't plain. `named`: the tokenizer's own, which come first."""
    size = backend.get_vocab_size(with_added_tokens=True)
    saved = [optional_json(directory / name) for name in _OF_THE_MODEL]
    given: dict[str, list[int]] = {}
    for role in ("eos", "pad", "bos"):
        values = [one.get(f"{role}_token_id") for one in saved]
        ids = [id_ for value in values for id_ in (value if isinstance(value, list) else [value])]
        given[role] = list(dict.fromkeys(id_ for id_ in ids if isinstance(id_, int) and 0 <= id_ < size))

    def of(role: str) -> int | None:
        own = named[role]
        return own if own is not None else next(iter(given[role]), None)

    eos = of("eos")
    if eos is None:
        raise UserError(
            f"{directory}: no file names an EOS token: expected eos_token in {CONFIG}, or eos_token_id in config.json"
        )
    notes, name = [], f"{backend.id_to_token(eos)} ({eos})"
    if others := [id_ for id_ in given["eos"] if id_ != eos]:
        ends = ", ".join(f"{backend.id_to_token(id_)} ({id_})" for id_ in others)
        notes.append(f"the model's files end texts with {ends} too; EOS here is the tokenizer's, {name}")
    pad = of("pad")
    if pad is None:
        pad = _spelled(backend, "pad")
        if pad is None:
            pad = eos
        notes.append(f"no file names a token for padding; {backend.id_to_token(pad)} ({pad}) serves")
    bos, unk = of("bos"), named["unk"]
    return Roles(pad, eos, None if unk in (pad, eos, bos) else unk, bos, named["mask"]), notes


def _normal(backend: tokenizers.Tokenizer, roles: Roles, file: Path) -> str:
    """The content of tokenizer.json in which no merge makes a special token, and nothing cuts or pads a text.

    Raises UserError if text can become a special token nevertheless.
    """
    saved: Json = json.loads(backend.to_str())
    model = saved["model"]
    special = {token["id"]: token["content"] for token in saved["added_tokens"] if token["special"]}
    prefix = model.get("continuing_subword_prefix") or ""
    model["merges"] = [
        [left, right]
        for left, right in model["merges"]
        if model["vocab"].get(left + right.removeprefix(prefix)) not in special
    ]
    saved["truncation"] = saved["padding"] = None
    content = json.dumps(saved, ensure_ascii=False)
    checked = tokenizers.Tokenizer.from_str(content)
    checked.encode_special_tokens = True
    names = [name for id_, name in special.items() if id_ != roles.unk]
    spelled = [text for name in names for text in (name, f"a {name} b", f"\n{name}\n")]
    for text, found in zip(spelled, checked.encode_batch_fast(spelled, add_special_tokens=False), strict=True):
        if wrong := [special[id_] for id_ in found.ids if id_ in special and id_ != roles.unk]:
            raise UserError(f"{file}: the text {text!r} becomes the special token {wrong[0]}; text must stay text")
    return content
