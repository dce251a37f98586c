"""BPE, WordPiece and WordLevel in a tokenizer.json of the library `tokenizers`, such as Llama's, Qwen's and BERT's.

The library normalizes, splits and merges text as the file says. Special tokens never match text: text that spells one
is read like any other text. Added tokens that aren't special, such as Qwen's <think>, match text, as
in transformers.

transformers doesn't always do what tokenizer.json says: for Llama 2's class, for example, it takes only the tokens and
the merges. So `read` lets transformers read published files, and keeps what transformers made of them.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Literal

import tokenizers
from tokenizers import AddedToken, decoders

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.config_file import LocalPath
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.json_file import read_json
from data_pipeline.corpus.tokenizer import vocabulary_lists
from data_pipeline.corpus.tokenizer.byt5 import gpt2s_characters
from data_pipeline.corpus.tokenizer.config import TokenizerConfig
from data_pipeline.corpus.tokenizer.text_model import FastTokenizer, Roles, TextModel, byte_of, parts, read_file

Json = dict[str, Any]
Named = dict[str, int | None]

MODEL, CONFIG, ROLES = "tokenizer.json", "tokenizer_config.json", "roles.json"
_CUT = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")  # a space between letters
_WITHIN = re.compile(r"\S ")
_BEFORE = "\ue000"  # a character for private use
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_UNUSED = re.compile(r"\[unused\d+\]")  # no text becomes such a token of BERT's
_PLAIN: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
READ = ("BPE", "WordPiece", "WordLevel")


class TokenizerJson(FastTokenizer):
    """A model of BPE, WordPiece or WordLevel.

    `content`: a tokenizer.json whose merges make no special token. `config`: a tokenizer_config.json that lets
    transformers read `content` unchanged. `notes`: lines for the user on how the roles were chosen.
    """

    kind = "tokenizer_json"
    file_names = (MODEL, CONFIG, ROLES)

    def __init__(self, content: str, config: Json, roles: Roles, origin: str | Path, notes: tuple[str, ...] = ()):
        """`origin` names the file in error messages. Raises FailedError if the library can't read `content`."""
        self._content, self.config, self._origin, self.notes = content, config, origin, notes
        super().__init__(parsed(content, origin), roles)

    @classmethod
    def read(cls, directory: Path) -> "TokenizerJson":
        """The model in a directory with `files`. Raises UserError for a missing file, FailedError for a damaged one."""
        content = read_file(directory / MODEL)
        try:
            config, roles = read_json(directory / CONFIG, Json), read_json(directory / ROLES, Roles)
        except FileNotFoundError as error:
            raise UserError(f"{error.filename}: no such file or directory") from None
        return cls(content, config, roles, directory / MODEL)

    @cached_property
    def saved(self) -> Json:
        """The content of tokenizer.json."""
        return json.loads(self._content)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        spelled = self.saved["model"].get("byte_fallback")
        return frozenset(id_ for id_, token in self.tokens.items() if spelled and _BYTE.fullmatch(token))

    @cached_property
    def begins_with_bos(self) -> bool:
        ids: list[int] = self._backend.encode("a").ids
        return ids[:1] == [self.roles.bos] and ids[-1:] != [self.roles.eos]

    @cached_property
    def names(self) -> Mapping[int, str]:
        """Special tokens, and tokens of a BPE that no text becomes, such as BART's madeupword0000."""
        special = {token["id"]: token["content"] for token in self.saved["added_tokens"] if token["special"]}
        return {**special, **self._never_made}

    @cached_property
    def _never_made(self) -> Mapping[int, str]:
        model, others = self.saved["model"], ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
        if model["type"] != "BPE" or any(model.get(option) for option in others):
            return {}
        made = {left + right for left, right in model["merges"]}
        made |= {token["content"] for token in self.saved["added_tokens"]}
        rest = ((id_, token) for token, id_ in model["vocab"].items() if len(token) > 1 and token not in made)
        return {id_: token for id_, token in rest if not _BYTE.fullmatch(token)}

    def glue(self, first: int) -> str:
        """A space if the decoder is of a type that drops the space before a text, and `first` has one."""
        drops = {"Strip", "Metaspace"} & types(self.saved["decoder"])
        return " " if self._are_words or (drops and self.tokens[first].startswith("\u2581")) else ""

    @cached_property
    def _are_words(self) -> bool:
        """Whether decoding puts a space before each token that doesn't continue a word."""
        found = types(self.saved["decoder"])
        return "WordPiece" in found or (self.saved["model"]["type"] == "WordLevel" and not found)

    def encode_rest(self, text: str) -> list[int]:
        """As in an export: what the model puts before each text, such as Llama 2's ▁, stands behind no other token."""
        ids: list[int] = self._behind_a_token.encode(_BEFORE + text, add_special_tokens=False).ids
        return ids[1:]

    @cached_property
    def _behind_a_token(self) -> tokenizers.Tokenizer:
        backend = self.backend()
        backend.add_tokens([AddedToken(_BEFORE, normalized=False)])  # special tokens would not match text
        backend.encode_special_tokens = True
        return backend

    def __setstate__(self, state: Mapping[str, object]) -> None:
        super().__setstate__({name: value for name, value in state.items() if name != "_behind_a_token"})

    def token_texts(self) -> Iterator[tuple[int, str]]:
        decode = decoders.ByteLevel().decode
        continues = self.saved["model"].get("continuing_subword_prefix") or ""
        for id_, token in self.tokens.items():
            if _BYTE.fullmatch(token) and not self._are_words:
                yield id_, ""
            elif self._are_words and not _UNUSED.fullmatch(token) and id_ not in self.names:
                goes_on = bool(continues) and token.startswith(continues)
                yield id_, token.removeprefix(continues) if goes_on else f" {token}"
            elif not self._are_words and id_ not in self.names:
                yield id_, decode([token]) if self._of_bytes else token.replace("\u2581", " ")

    @property
    def token_bytes(self) -> list[bytes]:
        """A token of byte-level BPE is a part of UTF-8, which may be no whole character."""
        found = [*super().token_bytes]
        for id_ in self.byte_ids:
            found[id_] = byte_of(self.tokens[id_])
        if self._of_bytes:
            of_character = {character: byte for byte, character in enumerate(gpt2s_characters())}
            for token, id_ in self.saved["model"]["vocab"].items():
                if found[id_] and set(token) <= of_character.keys():
                    found[id_] = bytes(of_character[character] for character in token)
        return found

    @cached_property
    def _of_bytes(self) -> bool:
        return "ByteLevel" in types([self.saved["pre_tokenizer"], self.saved["decoder"]])

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """The two files of transformers, and one of the roles: a published model's own files name only some roles."""
        as_json = {CONFIG: self.config, ROLES: asdict(self.roles)}
        written = {name: json.dumps(value, indent=1, sort_keys=True) + "\n" for name, value in as_json.items()}
        return {name: content.encode() for name, content in {MODEL: self._content, **written}.items()}

    @cached_property
    def sha256(self) -> str:
        deciding = [self.saved[key] for key in ("model", "normalizer", "pre_tokenizer", "added_tokens")]
        return fingerprint([*deciding, asdict(self.roles)])

    def without(self, special_tokens: Sequence[str]) -> "TokenizerJson":
        """The tokenizer without the last added tokens, which are `special_tokens`, and without their roles."""
        size = self.size - len(special_tokens)
        gone: dict[str, Any] = {
            role: None
            for role, id_ in asdict(self.roles).items()
            if role not in ("pad", "eos") and id_ is not None and id_ >= size
        }
        roles = replace(self.roles, **gone)
        return TokenizerJson(self._content, self.config, roles, self._origin, self.notes).first(size)

    def first(self, size: int) -> "TokenizerJson":
        """The tokenizer without the added tokens from id `size` on.

        Raises UserError if a token of the model, or a token with a role, has such an id.
        """
        if size >= self.size:
            return self
        gone = {token["content"] for token in self.saved["added_tokens"] if token["id"] >= size}
        roles = [id_ for id_ in asdict(self.roles).values() if id_ is not None]
        if gone != {token for id_, token in self.tokens.items() if id_ >= size} or max(roles) >= size:
            raise UserError(f"{self._origin}: {self.size} ids, and those from {size} on are needed")
        kept = [token for token in self.saved["added_tokens"] if token["id"] < size]
        content = json.dumps({**self.saved, "added_tokens": kept}, ensure_ascii=False)
        return TokenizerJson(content, _without(self.config, gone), self.roles, self._origin, self.notes)

    def parts(self, text: str) -> Iterable[str]:
        """`text` in parts with the ids of the whole; or the whole, if it can't be cut so."""
        return parts(text, _CUT, len(text)) if self._can_be_cut else [text]

    @cached_property
    def _can_be_cut(self) -> bool:
        """Whether a space between letters begins a new token, also at the start of a part."""
        encoded = self._backend.encode_batch_fast(["ab", " cd", " ef", "ab cd ef"], add_special_tokens=False)
        *apart, whole = (one.ids for one in encoded)
        separately = [id_ for ids in apart for id_ in ids]
        return separately == whole and not any(_WITHIN.search(text) for _, text in self.token_texts())


def existing(path: Path, sentinels: int) -> TokenizerJson:
    """The tokenizer at `path`, or of the corpus at `path`; without the sentinels of an export if `sentinels` come again
    above special tokens."""
    of_corpus = path / "tokenizer"
    model = read(of_corpus if (of_corpus / MODEL).exists() and not (path / MODEL).exists() else path)
    return without_sentinels(model)[0] if sentinels else model


def without_sentinels(model: TokenizerJson) -> tuple[TokenizerJson, int]:
    """The model without the sentinels that an export has at the end, and their number."""
    sentinels = sentinels_at_the_end([model.names.get(id_, "") for id_ in range(model.size)])
    return model.first(model.size - sentinels), sentinels


def sentinels_at_the_end(names: Sequence[str]) -> int:
    """How many of the last `names` of tokens are sentinels, <extra_id_0> last."""
    return sum(1 for _ in takewhile(lambda one: one[1] == f"<extra_id_{one[0]}>", enumerate(reversed(names))))


def types(settings: Any) -> set[str]:
    """The types of normalizers, pre_tokenizers or decoders in a part of a tokenizer.json."""
    if isinstance(settings, list):
        return set().union(*map(types, settings))
    if isinstance(settings, dict):
        own = {settings["type"]} if isinstance(settings.get("type"), str) else set()
        return own.union(*map(types, settings.values()))
    return set()


def _without(config: Json, tokens: set[str]) -> Json:
    """A tokenizer_config.json that doesn't name `tokens`."""

    def is_gone(value: Any) -> bool:
        name = value.get("content") if isinstance(value, dict) else value
        return isinstance(name, str) and name in tokens

    kept: Json = {}
    for key, value in config.items():
        if isinstance(value, list):
            kept[key] = [one for one in value if not is_gone(one)]
        elif isinstance(value, dict) and "content" not in value:
            kept[key] = {name: one for name, one in value.items() if not is_gone(one)}
        elif not is_gone(value):
            kept[key] = value
    return kept


_OF_THE_MODEL = ("config.json", "generation_config.json")
_ROLES = ("pad", "eos", "unk", "bos", "mask")
# The usual spellings of roles, for a tokenizer.json alone, and for padding if no file names it.
_SPELLED = {
    "eos": ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "[SEP]"),
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "[CLS]"),
    "mask": ("[MASK]",),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
}


def read(path: Path) -> TokenizerJson:
    """The tokenizer at `path`: a tokenizer.json, its directory, or `tokenizer/` of a checkpoint or corpus.

    Of a directory without a tokenizer.json, transformers reads GPT-2's, BART's or BERT's lists of tokens.

    Raises UserError if there is none, if its model is of another kind or if no file names its EOS; FailedError if a
    file is damaged.
    """
    directory, file = (path, path / MODEL) if path.is_dir() else (path.parent, path)
    if file.name != MODEL:
        raise UserError(f"{path}: expected {MODEL}, or the directory with it")
    if (directory / ROLES).exists():
        return TokenizerJson.read(directory)
    if path.is_dir() and not file.exists() and vocabulary_lists.are_in(directory):
        config = optional_json(directory / CONFIG)
        names_class = (directory / _OF_THE_MODEL[0]).exists() or "tokenizer_class" in config
        theirs = _in_transformers(directory) if names_class else vocabulary_lists.read(directory)
        return _of_transformers(theirs, directory, {})
    backend = read_backend(file)
    if (kind := type(backend.model).__name__) not in READ:
        raise UserError(f"{file}: a tokenizer of kind {kind}; tokenizer_json reads {', '.join(READ)}")
    if any((directory / name).exists() for name in (CONFIG, _OF_THE_MODEL[0])):
        return _of_transformers(_in_transformers(directory), directory, optional_json(directory / CONFIG))
    named = {role: _spelled(backend, role) for role in _ROLES}
    config = {f"{role}_token": backend.id_to_token(id_) for role, id_ in named.items() if id_ is not None}
    return _with_roles(backend, {**_PLAIN, **config}, named, directory)


def _of_transformers(theirs: Any, directory: Path, config: Json) -> TokenizerJson:
    """The tokenizer that transformers has made of the files in `directory`. `config`: its tokenizer_config.json."""
    backend, named = theirs.backend_tokenizer, {role: getattr(theirs, f"{role}_token_id") for role in _ROLES}
    if named["eos"] is None and named["bos"] is None:  # BERT's texts are between these two
        named |= {"eos": theirs.sep_token_id, "bos": theirs.cls_token_id}
    if named["unk"] is None and type(backend.model).__name__ != "BPE":
        named["unk"] = _spelled(backend, "unk")
    config = {**(config or _PLAIN), **theirs.special_tokens_map}
    config |= {f"{role}_token": backend.id_to_token(named[role]) for role in ("bos", "eos") if named[role] is not None}
    config.pop("added_tokens_decoder", None)  # tokenizer.json has them
    return _with_roles(backend, config, named, directory)


def _with_roles(backend: tokenizers.Tokenizer, config: Json, named: Named, directory: Path) -> TokenizerJson:
    """The model of `backend`. `named`: the ids of the roles that its own files name."""
    file = directory / MODEL
    ids = backend.get_vocab(with_added_tokens=True).values()
    if set(ids) != set(range(len(ids))):
        raise UserError(f"{file}: {len(ids)} tokens with ids up to {max(ids)}: the ids have gaps")
    roles, notes = _roles(directory, backend, named)
    return TokenizerJson(normal(backend, roles, file), config, roles, file, tuple(notes))


def read_backend(file: Path) -> tokenizers.Tokenizer:
    """The library's tokenizer of a tokenizer.json. Raises UserError if `file` can't be read, FailedError for damage."""
    return parsed(read_file(file), file)


def parsed(content: str, origin: str | Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the library raises nothing narrower
        raise FailedError(f"{origin}: damaged: {error}") from None


def _in_transformers(directory: Path) -> Any:
    import transformers  # 3 s and 230 MB, only to read a published tokenizer

    try:
        return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of several libraries
        raise UserError(f"{directory}: transformers rejects the tokenizer: {' '.join(str(error).split())}") from None


def optional_json(path: Path) -> Json:
    """The settings in the file `path`; empty if there is none."""
    return read_json(path, Json) if path.exists() else {}


def _spelled(backend: tokenizers.Tokenizer, role: str) -> int | None:
    """The token with this role, by its spelling; `unk`: the token that the model names."""
    names = [backend.model.unk_token] if role == "unk" else _SPELLED.get(role, ())
    found = (backend.token_to_id(name) for name in names if name)
    return next((id_ for id_ in found if id_ is not None), None)


def _roles(directory: Path, backend: tokenizers.Tokenizer, named: Named) -> tuple[Roles, list[str]]:
    """(roles, lines for the user on roles that aren't plain). `named`: the tokenizer's own roles, which come first."""
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
        expected = f"eos_token in {CONFIG}, or eos_token_id in config.json"
        raise UserError(f"{directory}: no file names an EOS token: expected {expected}")
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


def normal(backend: tokenizers.Tokenizer, roles: Roles, file: str | Path) -> str:
    """A tokenizer.json in which no merge makes a special token, and nothing truncates or pads text.

    Raises UserError if text can still become a special token.
    """
    saved: Json = json.loads(backend.to_str())
    model = saved["model"]
    special = {token["id"]: token["content"] for token in saved["added_tokens"] if token["special"]}
    prefix = model.get("continuing_subword_prefix") or ""
    if "merges" in model:
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


class TokenizerJsonConfig(TokenizerConfig):
    """An existing tokenizer.json of BPE, WordPiece or WordLevel, such as Llama's, Qwen's, Gemma's or BERT's."""

    model: ClassVar[type[TextModel]] = TokenizerJson

    kind: Literal["tokenizer_json"] = "tokenizer_json"
    path: LocalPath
    """The file, or its directory, with tokenizer_config.json and config.json where there are."""

    @property
    def on_unknown(self) -> str:
        return f"{self.path} doesn't know this text: choose a tokenizer that does, or train one"

    def existing(self) -> TokenizerJson:
        return existing(Path(self.path), self.sentinels)
