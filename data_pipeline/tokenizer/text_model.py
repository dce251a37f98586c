"""The interface of every kind of tokenizer model, which turns text into ids."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Protocol

from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.text.vocabulary import Vocabulary

_PART_CHARACTERS = 1_000_000
_SPACE = re.compile(r"[^\S\x1c-\x1f]")  # those four are white space to Python, and to no tokenizer
_CUT = re.compile(rf"(?<=\S){_SPACE.pattern}")
_SENTENCE_END = re.compile(r"""[.!?。．｡！？]['"”’»›)\]}」』】）]*\Z""")

# Special tokens whose spelling gives their role. Others are looked up by name.
ROLES = {"<pad>": "pad", "</s>": "eos", "<unk>": "unk", "<s>": "bos", "<mask>": "mask"}


class TextModel(Protocol):
    """Text to ids and back. `Tokenizer` adds further special tokens and the sentinels."""

    kind: ClassVar[str]

    @property
    def glue(self) -> str:
        """What separates a special token from the text after it when ids are shown as text."""

    @property
    def size(self) -> int:
        """The number of the model's ids."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The roles of the model's ids."""

    @property
    def byte_ids(self) -> frozenset[int]:
        """The ids of single bytes, which spell the characters that have no token."""
        return frozenset()

    @property
    def names(self) -> Mapping[int, str]:
        """Names of the ids that stand for no text, for display."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """Name and content of the files from which the model can be read."""

    @property
    def sha256(self) -> str:
        """Checksum of all that decides which ids a text gets."""

    def has(self, token: str) -> bool:
        """Whether the model has a token spelled `token`."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without begin or EOS tokens."""

    def decode(self, ids: list[int]) -> str:
        """The text that `ids` stand for."""


def read_file(path: Path) -> str:
    """The text of a tokenizer's file. Raises UserError if it can't be read, FailedError if it isn't UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or 'can not be read').lower()}") from None
    except ValueError:
        raise FailedError(f"{path}: damaged: not valid UTF-8") from None


def parts(text: str, cut: re.Pattern[str] = _CUT, longest: int | None = None) -> Iterator[str]:
    """`text` in parts of about a million characters, cut where `cut` matches: by default, where white space begins.

    No token spans such a cut, and the parts bound the memory that encoding takes. Text is cut elsewhere only if `cut`
    matches nowhere before the part has `longest` characters, by default two million.
    """
    longest = longest or 2 * _PART_CHARACTERS
    start = 0
    while start < len(text):
        space = cut.search(text, start + _PART_CHARACTERS, start + longest)
        end = space.start() if space else start + longest
        yield text[start:end]
        start = end


def starts_word(text: str) -> bool:
    """Whether a token with this `text` starts a word, which means that it starts with white space."""
    return _SPACE.match(text) is not None


def ends_sentence(text: str) -> bool:
    """Whether a token with this `text` ends a sentence: it ends with a mark, perhaps followed by closing quotes or
    brackets.

    Examples are ".", '?"' and " 2018."; "Mr." would also count, if it were one token.
    """
    return _SENTENCE_END.search(text.rstrip()) is not None
