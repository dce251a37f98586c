"""BPE as a tokenizer.json of the `tokenizers` library describes it, such as Llama's, Qwen's and Gemma's.

The library does what the file says: it normalizes a text, splits it and merges its characters or bytes. Special tokens
never match text: text that spells one is merged from its letters like any other. Added tokens that aren't special,
such as Qwen's <think>, match text, as they do in transformers.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders

from data_pipeline.foundation.atomic import fingerprint
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.json_file import read_json
from data_pipeline.text.vocabulary import Vocabulary
from data_pipeline.tokenizer.text_model import TextModel, ends_sentence, read_file, starts_word

Json = dict[str, Any]

MODEL, CONFIG, ROLES = "tokenizer.json", "tokenizer_config.json", "roles.json"
_PART_CHARACTERS = 1_000_000
_CUT = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")  # a space between letters
_WITHIN = re.compile(r"\S ")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a batch would use threads that other workers need


@dataclass(frozen=True)
class Roles:
    """The ids of the tokens that have a role; None for a role without a token."""

    pad: int
    eos: int
    unk: int | None = None
    bos: int | None = None
    mask: int | None = None


class TokenizerJson(TextModel):
    """`content` is a tokenizer.json whose model is BPE, and in which no merge makes a special token.

    `config` is a tokenizer_config.json, with which transformers reads `content` as it is. `notes` are lines for the
    user on how the roles were chosen.
    """

    kind = "tokenizer_json"

    def __init__(self, content: str, config: Json, roles: Roles, origin: str | Path, notes: tuple[str, ...] = ()):
        """`origin` names the file in error messages. Raises FailedError if the library can't read `content`."""
        self._content, self.config, self.roles, self._origin, self.notes = content, config, roles, origin, notes
        try:
            self._backend = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises nothing narrower
            raise FailedError(f"{origin}: damaged: {error}") from None
        self._backend.encode_special_tokens = True  # text that spells a special token is text

    @classmethod
    def read(cls, directory: Path) -> "TokenizerJson":
        """The model in `directory`, whose files are those of `files`.

        Raises UserError if a file is missing, FailedError if one is damaged.
        """
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
    def _tokens(self) -> dict[int, str]:
        return {id_: token for token, id_ in self._backend.get_vocab(with_added_tokens=True).items()}

    @cached_property
    def size(self) -> int:
        return max(self._tokens) + 1

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        spelled = self.saved["model"].get("byte_fallback")
        return frozenset(id_ for id_, token in self._tokens.items() if spelled and _BYTE.fullmatch(token))

    @cached_property
    def names(self) -> Mapping[int, str]:
        return {token["id"]: token["content"] for token in self.saved["added_tokens"] if token["special"]}

    @cached_property
    def glue(self) -> str:
        """Decoders of these two types drop the space before a text."""
        return " " if {"Strip", "Metaspace"} & types(self.saved["decoder"]) else ""

    @cached_property
    def _texts(self) -> list[str]:
        """The text of each token; "" for an id of no text, and for a byte by itself."""
        texts = [""] * self.size
        of_bytes = "ByteLevel" in types([self.saved["pre_tokenizer"], self.saved["decoder"]])
        decode = decoders.ByteLevel().decode
        for id_, token in self._tokens.items():
            if id_ not in self.names and not _BYTE.fullmatch(token):
                texts[id_] = decode([token]) if of_bytes else token.replace("\u2581", " ")
        return texts

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """A token whose text starts with white space starts a word. Special tokens and bytes start and end nothing.

        Text is the longest range of ids without a special token.
        """
        is_text = np.array([id_ not in self.names for id_ in range(self.size)])
        starts, ends = np.flatnonzero(np.diff([False, *is_text, False])).reshape(-1, 2).T
        longest = (ends - starts).argmax()
        roles = asdict(self.roles)
        return Vocabulary(
            size=self.size,
            text=(int(starts[longest]), int(ends[longest])),
            **roles,
            special={name: id_ for id_, name in self.names.items() if id_ not in roles.values()},
            word_starts=np.array([starts_word(text) for text in self._texts]),
            sentence_ends=np.array([ends_sentence(text) for text in self._texts]),
        )

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """The two files of transformers, and the roles, which those leave partly to the files of a model."""
        as_json = {CONFIG: self.config, ROLES: asdict(self.roles)}
        written = {name: json.dumps(value, indent=1, sort_keys=True) + "\n" for name, value in as_json.items()}
        return {name: content.encode() for name, content in {MODEL: self._content, **written}.items()}

    @cached_property
    def sha256(self) -> str:
        deciding = [self.saved[key] for key in ("model", "normalizer", "pre_tokenizer", "added_tokens")]
        return fingerprint([*deciding, asdict(self.roles)])

    def has(self, token: str) -> bool:
        return self._backend.token_to_id(token) is not None

    def encode(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = [[] for _ in texts]
        for batch in _batches((number, part) for number, text in enumerate(texts) for part in self._parts(text)):
            encoded = self._backend.encode_batch_fast([part for _, part in batch], add_special_tokens=False)
            for (number, _), one in zip(batch, encoded, strict=True):
                ids[number] += one.ids
        return ids

    def decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def first(self, size: int) -> "TokenizerJson":
        """The tokenizer without the tokens that were added from id `size` on.

        Raises UserError if one of its own tokens, or one that has a role, is among them.
        """
        if size >= self.size:
            return self
        gone = {token["content"] for token in self.saved["added_tokens"] if token["id"] >= size}
        roles = [id_ for id_ in asdict(self.roles).values() if id_ is not None]
        if gone != {token for id_, token in self._tokens.items() if id_ >= size} or max(roles) >= size:
            raise UserError(f"{self._origin}: {self.size} ids, and those from {size} on are needed")
        kept = [token for token in self.saved["added_tokens"] if token["id"] < size]
        content = json.dumps({**self.saved, "added_tokens": kept}, ensure_ascii=False)
        return TokenizerJson(content, _without(self.config, gone), self.roles, self._origin, self.notes)

    def _parts(self, text: str) -> Iterator[str]:
        """`text` in parts, which bound the memory that encoding takes, if their ids are those of the whole."""
        start = 0
        while len(text) - start > _PART_CHARACTERS and self._can_be_cut:
            space = _CUT.search(text, start + _PART_CHARACTERS)
            if space is None:
                break
            yield text[start : space.start()]
            start = space.start()
        yield text[start:]

    @cached_property
    def _can_be_cut(self) -> bool:
        """Whether a space between letters begins a new token, and a text that begins there gets no further space."""
        parts = self._backend.encode_batch_fast(["ab", " cd", " ef", "ab cd ef"], add_special_tokens=False)
        *apart, whole = (part.ids for part in parts)
        return [id_ for ids in apart for id_ in ids] == whole and not any(_WITHIN.search(text) for text in self._texts)


def _batches(parts: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Batches of `parts`, each (index of a text, a part of it), of at most `_PART_CHARACTERS` beside the last part."""
    batch: list[tuple[int, str]] = []
    characters = 0
    for part in parts:
        batch.append(part)
        characters += len(part[1])
        if characters > _PART_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch


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
        return (value.get("content") if isinstance(value, dict) else value) in tokens if _is_token(value) else False

    kept: Json = {}
    for key, value in config.items():
        if isinstance(value, list):
            kept[key] = [one for one in value if not is_gone(one)]
        elif isinstance(value, dict) and "content" not in value:
            kept[key] = {name: one for name, one in value.items() if not is_gone(one)}
        elif not is_gone(value):
            kept[key] = value
    return kept


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))
