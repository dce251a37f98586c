"""A sentencepiece model with T5's conventions: pad 0, eos 1, unk 2."""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from itertools import chain, compress, islice
from pathlib import Path

import numpy as np
import sentencepiece

from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.corpus.tokenizer.text_model import TextModel, ends_sentence, parts
from data_pipeline.text.vocabulary import Vocabulary

PAD, EOS, UNK = 0, 1, 2
MODEL, LISTING = "spiece.model", "spiece.vocab"
_SPACE = "\u2581"


def to_be_trained(size: int) -> Vocabulary:
    """The vocabulary of an untrained model of `size` tokens, each of which may start a word or end a sentence."""
    some = np.ones(size, dtype=bool)
    return Vocabulary(size, (UNK + 1, size), pad=PAD, eos=EOS, unk=UNK, word_starts=some, sentence_ends=some)


class SentencePiece(TextModel):
    kind = "sentencepiece"
    glue = " "

    def __init__(self, model: bytes, origin: str | Path):
        """`origin` names the model in error messages."""
        self._model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise FailedError(f"{origin}: not a sentencepiece model") from None
        special = (self._processor.pad_id(), self._processor.eos_id(), self._processor.unk_id())
        if special != (PAD, EOS, UNK):
            raise UserError(f"{origin}: expected pad 0, eos 1, unk 2 as in T5, got pad, eos, unk = {special}")

    @classmethod
    def read(cls, path: Path) -> "SentencePiece":
        """The model in the file at `path`. Raises UserError if it can't be read, FailedError if it is damaged."""
        try:
            return cls(path.read_bytes(), path)
        except OSError as error:
            raise UserError(f"{path}: {(error.strerror or 'can not be read').lower()}") from None

    @cached_property
    def size(self) -> int:
        return self._processor.get_piece_size()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """A piece with the space mark in front starts a word. Byte and special pieces start and end nothing."""
        processor, ids = self._processor, [*range(self.size)]
        is_other = (processor.is_control, processor.is_unknown, processor.is_unused, processor.is_byte)
        others = (any(kinds) for kinds in zip(*(of_kind(ids) for of_kind in is_other), strict=True))
        text = ["" if other else piece for piece, other in zip(processor.id_to_piece(ids), others, strict=True)]
        return Vocabulary(
            size=self.size,
            text=(UNK + 1, self.size),
            pad=PAD,
            eos=EOS,
            unk=UNK,
            word_starts=np.array([piece.startswith(_SPACE) for piece in text]),
            sentence_ends=np.array([ends_sentence(piece) for piece in text]),
            texts=tuple(piece.replace(_SPACE, " ") for piece in text),
        )

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        ids = [*range(self.size)]
        return frozenset(compress(ids, self._processor.is_byte(ids)))

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """The model, and a readable list of its pieces with their scores."""
        ids = [*range(self.size)]
        scores = zip(self._processor.id_to_piece(ids), self._processor.get_score(ids), strict=True)
        listing = "".join(f"{piece}\t{score:g}\n" for piece, score in scores)
        return {MODEL: self._model, LISTING: listing.encode()}

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self._model).hexdigest()

    def has(self, token: str) -> bool:
        return self._processor.id_to_piece(self._processor.piece_to_id(token)) == token

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Long texts are encoded in parts. Ids differ from those of the whole text only if two segmentations have
        nearly equal scores, since sentencepiece adds scores in single precision."""
        cut = [list(parts(text)) for text in texts]
        encoded = iter(self._processor.encode([part for text in cut for part in text], num_threads=1))
        return [list(chain.from_iterable(islice(encoded, len(text)))) for text in cut]

    def decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)
