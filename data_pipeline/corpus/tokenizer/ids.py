"""Tokens without text: documents are lists of integers, such as codes of items or bins of a series.

A document is written as its ids with spaces between, "3 17 255", and id n is the token n. Pad comes above the ids, then
eos.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.errors import UserError
from data_pipeline.corpus.tokenizer.config import TokenizerConfig
from data_pipeline.corpus.tokenizer.text_model import TextModel, read_saved
from data_pipeline.text.vocabulary import Vocabulary

MODEL = "ids.json"
MOST_IDS = 1 << 22
_NAMES = ("<pad>", "</s>")
_OF_NUMBERS = b"0123456789 \t\n\r"
_MOST_DIGITS = 18  # of a number that int64 holds
_SHOWN = 20  # characters of what is no id, in a message


@dataclass(frozen=True)
class _Saved:
    vocab_size: int


class Ids(TextModel):
    """The ids from 0 to `vocab_size` − 1. Each starts a word, and none ends a sentence."""

    kind = "ids"
    file_names = (MODEL,)

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    @classmethod
    def read(cls, directory: Path) -> "Ids":
        return cls(**asdict(read_saved(directory / MODEL, _Saved)))

    def glue(self, first: int) -> str:
        return self.gap

    @property
    def size(self) -> int:
        return self.vocab_size + len(_NAMES)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(
            size=self.size,
            text=(0, self.vocab_size),
            pad=self.vocab_size,
            eos=self.vocab_size + 1,
            unk=None,
            word_starts=np.arange(self.size) < self.vocab_size,
            sentence_ends=np.zeros(self.size, dtype=bool),
        )

    @property
    def names(self) -> Mapping[int, str]:
        return dict(enumerate(_NAMES, self.vocab_size))

    @property
    def settings(self) -> Mapping[str, object]:
        return {"vocab_size": self.vocab_size}

    @property
    def files(self) -> Mapping[str, bytes]:
        return {MODEL: json.dumps(asdict(_Saved(self.vocab_size))).encode() + b"\n"}

    @property
    def sha256(self) -> str:
        return fingerprint([self.kind, self.vocab_size])

    def has(self, token: str) -> bool:
        return token in _NAMES

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Raises UserError, which names the first one and its place, for anything but ids and white space."""
        return [ids.tolist() for ids in self.encode_to_arrays(texts)]

    def encode_to_arrays(self, texts: list[str]) -> list[np.ndarray]:
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> np.ndarray:
        numbers = text.encode(errors="surrogatepass")
        if not numbers.strip():
            return np.zeros(0, dtype=np.int64)  # of white space alone, NumPy makes a 0
        if not numbers.translate(None, _OF_NUMBERS):
            ids = np.fromstring(numbers, dtype=np.int64, sep=" ")  # a number that is too large becomes the largest
            if ids.max() < self.vocab_size:
                return ids
        for place, word in enumerate(text.split()):
            if not (word.isascii() and word.isdigit()):
                raise UserError(f"expected ids with spaces between, found {word[:_SHOWN]!r} at place {place}")
            if len(word.lstrip("0")) > _MOST_DIGITS or int(word) >= self.vocab_size:
                most = f"tokenizer.vocab_size is {self.vocab_size:,}, so the largest is {self.vocab_size - 1:,}"
                raise UserError(f"no id {word[:_SHOWN]}, at place {place}: {most}")
        raise UserError("expected ids with spaces between, found other white space")

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class IdsConfig(TokenizerConfig):
    """No text: documents are lists of integers from 0 to `vocab_size` − 1, and these are the ids. Then come pad and
    eos. A source has the option `ids`, or lines of integers with spaces between."""

    model: ClassVar[type[TextModel]] = Ids
    tokens_per_byte: ClassVar[float] = 0.5
    has_text: ClassVar[bool] = False

    kind: Literal["ids"] = "ids"
    vocab_size: int = Field(gt=0, le=MOST_IDS)
    """Number of different ids of documents, whose largest is one less. Pad and eos come on top."""

    def existing(self) -> Ids:
        return Ids(self.vocab_size)
