"""Byte-level BPE: GPT-2's merges of bytes (Radford et al. 2019), with GPT-2's ids, or with BART's.

Every text can be encoded and decodes to itself. Special tokens ("<s>", "<|endoftext|>") never match text: text that
spells one is merged from its letters like any other text.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.config_file import LocalPath
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.corpus.tokenizer.config import TokenizerConfig
from data_pipeline.corpus.tokenizer.text_model import FastTokenizer, Roles, TextModel, read_file

VOCABULARY, MERGES = "vocab.json", "merges.txt"
_GPT2_NAMES = ("encoder.json", "vocab.bpe")
_END_OF_TEXT = "<|endoftext|>"  # GPT-2's only special token
_VERSION = "#version: 0.2"

Merges = list[tuple[str, str]]


class ByteLevelBPE(FastTokenizer):
    """`ids` maps tokens, written in GPT-2's byte alphabet, to ids. `merges` lists pairs of tokens in merge order."""

    kind = "byte_level_bpe"
    file_names = (VOCABULARY, MERGES)

    def __init__(self, ids: dict[str, int], merges: Merges):
        self._ids, self._merges = ids, merges
        self._made = _tokens_of(merges)
        backend = tokenizers.Tokenizer(models.BPE(ids, merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        super().__init__(backend, _roles(ids))

    def glue(self, first: int) -> str:
        return ""

    @classmethod
    def read(cls, directory: Path) -> "ByteLevelBPE":
        """The model in `directory`: encoder.json and vocab.bpe, or vocab.json and merges.txt.

        Raises UserError if a file is missing or doesn't match the other, FailedError if it is damaged.
        """
        if (directory / "dict.txt").exists():
            what = "fairseq's dictionary, by which BART's ids differ from GPT-2's"
            raise UserError(f"{directory / 'dict.txt'}: {what}; read vocab.json and merges.txt of facebook/bart-base")
        pairs = [tuple(directory / name for name in names) for names in (_GPT2_NAMES, (VOCABULARY, MERGES))]
        found = [pair for pair in pairs if all(path.is_file() for path in pair)]
        if not found:
            raise UserError(f"{directory}: expected encoder.json and vocab.bpe, or vocab.json and merges.txt")
        ids_path, merges_path = found[0]
        ids, merges = _read_ids(ids_path), _read_merges(merges_path)
        if missing := sorted(_tokens_of(merges) - ids.keys()):
            raise UserError(f"{ids_path}: lacks {len(missing)} tokens of {merges_path.name}, {missing[0]!r} first")
        if not ({_END_OF_TEXT, "</s>"} & ids.keys()):
            raise UserError(f"{ids_path}: has no EOS: neither {_END_OF_TEXT} nor </s>")
        return cls(ids, merges)

    def token_texts(self) -> Iterator[tuple[int, str]]:
        """Text after a line break continues the word of the break."""
        bytes_of = decoders.ByteLevel()
        return ((self._ids[token], bytes_of.decode([token])) for token in self._made)

    @cached_property
    def names(self) -> Mapping[int, str]:
        return {id_: token for token, id_ in self._ids.items() if token not in self._made}

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """The files under Hugging Face's names."""
        ids = dict(sorted(self._ids.items(), key=lambda item: item[1]))
        lines = [_VERSION, *(f"{left} {right}" for left, right in self._merges)]
        return {
            VOCABULARY: (json.dumps(ids, ensure_ascii=False) + "\n").encode(),
            MERGES: ("\n".join(lines) + "\n").encode(),
        }

    @cached_property
    def sha256(self) -> str:
        return fingerprint([self._ids, self._merges])


def _roles(ids: dict[str, int]) -> Roles:
    """GPT-2's only special token serves as BOS, EOS and padding."""
    end = ids["</s>"] if "</s>" in ids else ids[_END_OF_TEXT]
    return Roles(ids.get("<pad>", end), end, ids.get("<unk>"), ids.get("<s>", end), ids.get("<mask>"))


def _read_ids(path: Path) -> dict[str, int]:
    try:
        ids = json.loads(read_file(path))
    except ValueError:
        raise FailedError(f"{path}: damaged: not valid JSON") from None
    numbers = list(ids.values()) if isinstance(ids, dict) else []
    if not numbers or not all(isinstance(id_, int) for id_ in numbers) or set(numbers) != set(range(len(numbers))):
        raise UserError(f"{path}: expected tokens with consecutive ids from 0, each used once")
    return ids


def _read_merges(path: Path) -> Merges:
    merges = []
    for number, line in enumerate(read_file(path).split("\n"), 1):
        if not line or line.startswith("#version"):
            continue
        left, *right = line.split(" ")
        if len(right) != 1:
            raise UserError(f"{path}: line {number}: expected two tokens")
        merges.append((left, right[0]))
    return merges


def _tokens_of(merges: Merges) -> set[str]:
    """All tokens that text can become: bytes and their merges."""
    merged = (token for left, right in merges for token in (left, right, left + right))
    return {*pre_tokenizers.ByteLevel.alphabet(), *merged}


class ByteLevelBPEConfig(TokenizerConfig):
    """GPT-2's or BART's tokenizer."""

    model: ClassVar[type[TextModel]] = ByteLevelBPE

    kind: Literal["byte_level_bpe"] = "byte_level_bpe"
    path: LocalPath
    """The directory of the tokenizer's files."""

    def existing(self) -> ByteLevelBPE:
        return ByteLevelBPE.read(Path(self.path))
