"""What the models that the `tokenizers` library runs have in common: byte-level BPE, WordPiece, any tokenizer.json.

Special tokens never match text: text that spells one is encoded like any other.
"""

import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
import tokenizers

from data_pipeline.text.vocabulary import Vocabulary
from data_pipeline.tokenizer.text_model import TextModel, ends_sentence, parts, starts_word

_BATCH_CHARACTERS = 1_000_000

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a batch would use threads that other workers need


@dataclass(frozen=True)
class Roles:
    """The ids of the tokens that have a role; None for a role without a token."""

    pad: int
    eos: int
    unk: int | None = None
    bos: int | None = None
    mask: int | None = None


class FastTokenizer(TextModel):
    """A model that `backend`, a tokenizer of the library, runs. Subclasses know its files and what its tokens mean."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        self._backend.encode_special_tokens = True

    def __setstate__(self, state: Mapping[str, object]) -> None:
        self.__dict__.update(state)
        self._backend.encode_special_tokens = True  # the library doesn't pickle this setting

    @property
    @abstractmethod
    def roles(self) -> Roles:
        """The tokens that have a role."""

    @abstractmethod
    def token_texts(self) -> Iterator[tuple[int, str]]:
        """The ids that stand for text, with the text; "" for a part of a character."""

    @cached_property
    def tokens(self) -> Mapping[int, str]:
        """Each id's token as the model spells it."""
        return {id_: token for token, id_ in self._backend.get_vocab(with_added_tokens=True).items()}

    @cached_property
    def size(self) -> int:
        return max(self.tokens) + 1

    def text_range(self, is_text: np.ndarray) -> tuple[int, int]:
        """(first, end) of the ids of text, of which `is_text` (size,) marks each: from the first to the last one."""
        ids = np.flatnonzero(is_text)
        return (int(ids[0]), int(ids[-1]) + 1) if len(ids) else (0, 0)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """A token whose text starts with white space starts a word. Special tokens and bytes start and end nothing."""
        is_text, starts, ends = (np.zeros(self.size, dtype=bool) for _ in range(3))
        texts = [""] * self.size
        for id_, text in self.token_texts():
            is_text[id_], starts[id_], ends[id_], texts[id_] = True, starts_word(text), ends_sentence(text), text
        roles = asdict(self.roles)
        return Vocabulary(
            size=self.size,
            text=self.text_range(is_text),
            **roles,
            special={name: id_ for id_, name in self.names.items() if id_ not in roles.values()},
            word_starts=starts,
            sentence_ends=ends,
            texts=tuple(texts),
        )

    def backend(self) -> tokenizers.Tokenizer:
        """A new tokenizer of the library with this model, which a caller may change."""
        return tokenizers.Tokenizer.from_str(self._backend.to_str())

    def has(self, token: str) -> bool:
        return self._backend.token_to_id(token) is not None

    def encode(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = [[] for _ in texts]
        for batch in _batches((number, part) for number, text in enumerate(texts) for part in self.parts(text)):
            encoded = self._backend.encode_batch_fast([part for _, part in batch], add_special_tokens=False)
            for (number, _), one in zip(batch, encoded, strict=True):
                ids[number] += one.ids
        return ids

    def decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def parts(self, text: str) -> Iterable[str]:
        """`text` in parts, which bound the memory that encoding takes."""
        return parts(text)


def _batches(parts: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Batches of `parts`, each (index of a text, a part of it), of at most a million characters beside the last one."""
    batch: list[tuple[int, str]] = []
    characters = 0
    for part in parts:
        batch.append(part)
        characters += len(part[1])
        if characters > _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch
