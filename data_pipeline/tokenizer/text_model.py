"""What each kind of tokenizer is: a model that turns text into ids of its own."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

from data_pipeline.text.vocabulary import Vocabulary

_PART_CHARACTERS = 1_000_000
_SPACE = re.compile(r"[^\S\x1c-\x1f]")  # those four are white space to Python, and to no tokenizer
_CUT = re.compile(rf"(?<=\S){_SPACE.pattern}")
_SENTENCE_END = re.compile(r"""[.!?。．｡！？]['"”’»›)\]}」』】）]*\Z""")

# What a special token is for, by how it is written. Others are called by their names.
ROLES = {"<pad>": "pad", "</s>": "eos", "<unk>": "unk", "<s>": "bos", "<mask>": "mask"}


class TextModel(ABC):
    """Text to ids and back. Special tokens and sentinels are no concern of it: `Tokenizer` puts them on top.

    `glue`: what stands between a special token and the text after it where ids are shown as text.
    """

    kind: ClassVar[str]
    glue: ClassVar[str]

    @property
    @abstractmethod
    def size(self) -> int:
        """Ids of the model's own."""

    @property
    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """What these ids are for."""

    @property
    @abstractmethod
    def names(self) -> Mapping[int, str]:
        """Ids that are shown by name, since they stand for no text."""

    @property
    @abstractmethod
    def files(self) -> Mapping[str, bytes]:
        """Name and content of the files that the model is read from again."""

    @property
    @abstractmethod
    def sha256(self) -> str:
        """Of all that decides which ids a text gets."""

    @abstractmethod
    def has(self, token: str) -> bool:
        """Whether a token of the model is written like that."""

    @abstractmethod
    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without any mark around them."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """The text that `ids` stand for."""


def parts(text: str) -> Iterator[str]:
    """`text` in parts of about a million characters, cut where white space begins.

    No token reaches across such a place, and what encoding takes of memory for each character is bounded. Only where a
    million characters are all white space, or none of them is, they are cut elsewhere.
    """
    start = 0
    while start < len(text):
        space = _CUT.search(text, start + _PART_CHARACTERS, start + 2 * _PART_CHARACTERS)
        end = space.start() if space else start + 2 * _PART_CHARACTERS
        yield text[start:end]
        start = end


def starts_word(text: str) -> bool:
    """Whether a token of this `text` starts a word: white space is its start."""
    return _SPACE.match(text) is not None


def ends_sentence(text: str) -> bool:
    """Whether a token of this `text` ends a sentence: a mark, with closing quotes and brackets or without, is its end.

    "." does, and '?"', and " 2018."; so would "Mr.", if it were one token.
    """
    return _SENTENCE_END.search(text.rstrip()) is not None
