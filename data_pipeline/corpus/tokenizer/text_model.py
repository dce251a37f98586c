"""The interface of tokenizer models, which turn text into ids, and a base class for models of the library `tokenizers`.

Special tokens never match text: text that spells one is encoded like any other text.
"""

import os
import re
import unicodedata
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

import numpy as np
import tokenizers

from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.json_file import read_json
from data_pipeline.text.vocabulary import Vocabulary

Item = TypeVar("Item")
Saved = TypeVar("Saved")
_PART_CHARACTERS = 1_000_000
_SPACE = re.compile(r"[^\S\x1c-\x1f]")  # the four are white space for Python, but for no tokenizer
_CUT = re.compile(rf"(?<=\S){_SPACE.pattern}")
_SENTENCE_END = re.compile(r"""[.!?。．｡！？]['"”’»›)\]}」』】）]*\Z""")

# Special tokens whose spelling gives their role.
ROLES = {"<pad>": "pad", "</s>": "eos", "<unk>": "unk", "<s>": "bos", "<mask>": "mask"}


class TextModel(Protocol):
    """Text to ids and back. `Tokenizer` adds further special tokens and the sentinels.

    Attributes:
        kind: the name of the kind, as in a corpus file.
        file_names: the names of the files that `read` opens.
        listings: the names of the model's other files, which only people read.
        gap: what stands before a special token when ids are shown, and belongs to it in an input: " " or "".
        sentinels_ascend: True if sentinels have ascending ids from the model's own on, as ByT5's; False if
            `<extra_id_0>` has the highest id, as T5's.
    """

    kind: ClassVar[str]
    file_names: ClassVar[tuple[str, ...]]
    listings: ClassVar[tuple[str, ...]] = ()
    gap: str = " "
    sentinels_ascend: ClassVar[bool] = False

    @classmethod
    def read(cls, directory: Path) -> "TextModel":
        """The model whose `files` are in `directory`. Raises UserError for a missing file, FailedError for damage."""

    def glue(self, first: int) -> str:
        """What stands between a special token and a text that begins with the token `first`, when ids are shown."""
        return ""

    @property
    def size(self) -> int:
        """The number of the model's ids."""

    @property
    def own_sentinels(self) -> int:
        """The number of sentinels that the model's files have, behind the model's ids."""
        return 0

    @property
    def vocabulary(self) -> Vocabulary:
        """The roles of the model's ids."""

    @property
    def byte_ids(self) -> frozenset[int]:
        """The ids of single bytes, which spell the characters that have no token."""
        return frozenset()

    @property
    def begins_with_bos(self) -> bool:
        """True if transformers puts BOS before a text and no EOS after it, as for Llama and Gemma."""
        return False

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """What each id stands for in a text, in UTF-8; b"" for ids that don't stand for text."""
        texts = self.vocabulary.texts or ("",) * self.size
        return [text.encode(errors="surrogatepass") for text in texts]

    @property
    def names(self) -> Mapping[int, str]:
        """The names of the ids without text, for display."""
        return {}

    @property
    def settings(self) -> Mapping[str, object]:
        """The keys of a corpus file, besides `kind` and `path`, that make this model."""
        return {}

    @property
    def files(self) -> Mapping[str, bytes]:
        """The content of the model's files, by name."""

    @property
    def sha256(self) -> str:
        """A checksum of everything that decides which ids a text gets."""

    def has(self, token: str) -> bool:
        """Whether the model has a token spelled `token`."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without begin or EOS tokens."""

    def encode_to_arrays(self, texts: list[str]) -> list[np.ndarray]:
        """`encode`, as arrays of integers (n,)."""
        return [np.array(ids, dtype=np.int64) for ids in self.encode(texts)]

    def encode_rest(self, text: str) -> list[int]:
        """Ids of the `text` behind a special token: without a space in front, it continues a word."""
        return self.encode([text])[0]

    def decode(self, ids: list[int]) -> str:
        """The text that `ids` stand for."""

    def backend(self) -> tokenizers.Tokenizer:
        """The library's tokenizer that gives the same ids, for an export. Raises UserError if there is none."""
        raise UserError(f"a tokenizer of kind {self.kind} can't be exported: it has no tokenizer.json")

    def without_token(self, texts: Iterable[str]) -> dict[str, int]:
        """The number of each character of `texts` that has no token of its own.

        Characters are counted after composition (NFC), as tokenizers do.
        """
        seen = CodePoints()
        seen.add(unicodedata.normalize("NFC", "\n".join(texts)))
        uncovered = np.zeros(self.size, dtype=bool)
        uncovered[[*self.byte_ids, *([] if self.vocabulary.unk is None else [self.vocabulary.unk])]] = True
        encoded = zip(seen.counts.items(), self.encode([*seen.counts]), strict=True)
        return {character: count for (character, count), ids in encoded if uncovered[ids].any()}


def read_saved(path: Path, kind: type[Saved]) -> Saved:
    """The content of a JSON file. Raises UserError if the file is missing, FailedError if it is damaged."""
    try:
        return read_json(path, kind)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file or directory") from None


def read_file(path: Path) -> str:
    """The text of a tokenizer's file. Raises UserError if it can't be read, FailedError if it isn't UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or 'can not be read').lower()}") from None
    except ValueError:
        raise FailedError(f"{path}: damaged: not valid UTF-8") from None


def parts(text: str, cut: re.Pattern[str] = _CUT, longest: int | None = None) -> Iterator[str]:
    """`text` in parts of about a million characters, to bound the memory of encoding.

    Text is cut where `cut` matches, by default where white space begins: no token spans the cut. A part without a match
    is cut after `longest` characters, by default two million.
    """
    longest = longest or 2 * _PART_CHARACTERS
    start = 0
    while start < len(text):
        space = cut.search(text, start + _PART_CHARACTERS, start + longest)
        end = space.start() if space else start + longest
        yield text[start:end]
        start = end


def byte_of(token: str) -> bytes:
    """The byte of a token such as <0x0A>."""
    return bytes([int(token[3:5], 16)])


def starts_word(text: str) -> bool:
    """Whether a token with this `text` starts a word: with white space."""
    return _SPACE.match(text) is not None


def ends_sentence(text: str) -> bool:
    """Whether a token with this `text` ends a sentence: with a mark, and perhaps closing quotes or brackets.

    ".", '?"' and " 2018." do; "Mr." would too, if it were one token.
    """
    return _SENTENCE_END.search(text.rstrip()) is not None


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a batch would use threads that other workers need


@dataclass(frozen=True)
class Roles:
    """The ids of the tokens with a role; None for a role without a token."""

    pad: int
    eos: int
    unk: int | None = None
    bos: int | None = None
    mask: int | None = None


class FastTokenizer(TextModel):
    """A model that a tokenizer of the library, `backend`, runs. `roles`: its tokens with a role. Subclasses know its
    files and the texts of its tokens."""

    def __init__(self, backend: tokenizers.Tokenizer, roles: Roles):
        self._backend, self.roles = backend, roles
        self._backend.encode_special_tokens = True

    def __setstate__(self, state: Mapping[str, object]) -> None:
        self.__dict__.update(state)
        self._backend.encode_special_tokens = True  # the library doesn't pickle this setting

    @abstractmethod
    def token_texts(self) -> Iterator[tuple[int, str]]:
        """(id, text) of each id that stands for text; "" for a part of a character."""

    @cached_property
    def tokens(self) -> Mapping[int, str]:
        """The token of each id, as the model spells it."""
        return {id_: token for token, id_ in self._backend.get_vocab(with_added_tokens=True).items()}

    @cached_property
    def size(self) -> int:
        return max(self.tokens) + 1

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """A token whose text starts with white space starts a word. Special tokens and bytes start and end nothing."""
        is_text, starts, ends = (np.zeros(self.size, dtype=bool) for _ in range(3))
        texts = [""] * self.size
        for id_, text in self.token_texts():
            is_text[id_], texts[id_] = True, text
            starts[id_], ends[id_] = starts_word(text), ends_sentence(text)
        roles = asdict(self.roles)
        return Vocabulary(
            size=self.size,
            text=_longest_run(is_text),
            **roles,
            special={name: id_ for id_, name in self.names.items() if id_ not in roles.values()},
            word_starts=starts,
            sentence_ends=ends,
            texts=tuple(texts),
        )

    def backend(self) -> tokenizers.Tokenizer:
        """A copy of the library's tokenizer, which a caller may change."""
        return tokenizers.Tokenizer.from_str(self._backend.to_str())

    def has(self, token: str) -> bool:
        return self._backend.token_to_id(token) is not None

    def encode(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = [[] for _ in texts]
        cut = ((number, part) for number, text in enumerate(texts) for part in self.parts(text))
        for batch in batches(cut, lambda one: len(one[1]), _PART_CHARACTERS):
            encoded = self._backend.encode_batch_fast([part for _, part in batch], add_special_tokens=False)
            for (number, _), one in zip(batch, encoded, strict=True):
                ids[number] += one.ids
        return ids

    def decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def parts(self, text: str) -> Iterable[str]:
        """`text` in parts, to bound the memory of encoding."""
        return parts(text)


def _longest_run(is_text: np.ndarray) -> tuple[int, int]:
    """(first, end) of the longest range of ids that are all text; `is_text` (ids,) marks these ids."""
    ranges = np.flatnonzero(np.diff([False, *is_text, False])).reshape(-1, 2).tolist()
    first, end = max(ranges, key=lambda one: one[1] - one[0], default=(0, 0))
    return first, end


def batches(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """`items` in lists; a list ends when its sizes add up to `most`."""
    batch, total = list[Item](), 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= most:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


class CodePoints:
    """Counts the characters of texts."""

    def __init__(self) -> None:
        self._seen = np.zeros(0, dtype=np.int64)  # how often each code point occurs

    def add(self, text: str) -> None:
        counts = np.bincount(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32))
        if len(counts) > len(self._seen):
            counts, self._seen = self._seen, counts
        self._seen[: len(counts)] += counts

    @property
    def counts(self) -> dict[str, int]:
        """The number of each character, in the order of their code points."""
        return {chr(code): int(self._seen[code]) for code in np.flatnonzero(self._seen)}
