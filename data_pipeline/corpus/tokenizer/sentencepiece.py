"""A sentencepiece model with T5's conventions: pad 0, eos 1, unk 2.

Its normalization is T5's (NFKC, and one space for all white space), or none: then texts come back as they were.
"""

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, compress, takewhile
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import sentencepiece
from pydantic import Field, ValidationInfo, field_validator, model_validator
from sentencepiece import sentencepiece_model_pb2 as protocol

from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.corpus.tokenizer.config import TrainedConfig
from data_pipeline.corpus.tokenizer.text_model import TextModel, byte_of, ends_sentence, parts, starts_word
from data_pipeline.text.vocabulary import Vocabulary

PAD, EOS, UNK = 0, 1, 2
MODEL, LISTING = "spiece.model", "spiece.vocab"
SPACE = "\u2581"  # in pieces
SENTINEL = "<extra_id_{}>"
LINES = ("\n", "\r", "\t")  # pieces of a model that changes nothing: the trainer learns none that has them
_LINE_BYTES = 4000  # the trainer silently skips lines above 4,192 bytes
_LINES = 5_000_000  # lines that the trainer draws from the sample, with a fixed seed; each takes 40 bytes plus its text
_MORE_THAN_ANY = 500_000  # tokens; 1 MB of text gives some 30,000
_TOO_HIGH = r"Vocabulary size too high .* a value <= (\d+)"
THREADS = 8  # another number of threads would train another vocabulary
# Measured with 20, 100 and 166 MB of English and 32,000 tokens: 21.3, 21.1 and 20.9 bytes for each byte of the sample,
# and one for the sample itself; 24.9 in all if lines of digits all differ. Most of it is a suffix array, 20 bytes for
# each character.
MEMORY_PER_BYTE = 26
# By `tokenizer.normalization`. With pieces of spaces alone, an indentation is one token.
_NORMALIZATIONS: dict[str, dict[str, Any]] = {
    "t5": {},  # sentencepiece's defaults, nmt_nfkc among them
    "identity": {
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "user_defined_symbols": [*LINES],
    },
}


_BYTES = 256
_COVERED_WITH_BYTES = 0.9995  # sentencepiece's default


def to_be_trained(size: int) -> Vocabulary:
    """The vocabulary of an untrained model of `size` tokens, each of which may start a word or end a sentence."""
    some = np.ones(size, dtype=bool)
    return Vocabulary(size, (UNK + 1, size), pad=PAD, eos=EOS, unk=UNK, word_starts=some, sentence_ends=some)


class SentencePiece(TextModel):
    kind = "sentencepiece"
    file_names = (MODEL,)
    listings = (LISTING,)

    def __init__(self, model: bytes, origin: str | Path):
        """`origin` names the model in error messages."""
        self._model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise FailedError(f"{origin}: not a sentencepiece model") from None
        if self.own_sentinels:  # no text may contain these pieces
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self._of_text.SerializeToString())
        special = (self._processor.pad_id(), self._processor.eos_id(), self._processor.unk_id())
        if special != (PAD, EOS, UNK):
            raise UserError(f"{origin}: expected pad 0, eos 1, unk 2 as in T5, got pad, eos, unk = {special}")

    @classmethod
    def read(cls, path: Path) -> "SentencePiece":
        """The model in the file at `path`, or in the directory `path`, such as an export's or a corpus's.

        Raises UserError if it can't be read, FailedError if it is damaged.
        """
        if path.is_dir():
            places = [path / MODEL, path / "tokenizer" / MODEL]
            if not (found := [place for place in places if place.exists()]):
                raise UserError(f"{path}: expected {MODEL}, as kind sentencepiece has it; other kinds have other files")
            path = found[0]
        try:
            return cls(path.read_bytes(), path)
        except OSError as error:
            raise UserError(f"{path}: {(error.strerror or 'can not be read').lower()}") from None

    @cached_property
    def own_sentinels(self) -> int:
        """mT5's 100, for example: the last pieces of the file, from ▁<extra_id_99> to ▁<extra_id_0>."""
        size = self._processor.get_piece_size()
        ends = (self._processor.id_to_piece(size - 1 - number).removeprefix(SPACE) for number in range(size))
        return sum(1 for _ in takewhile(lambda end: end[1] == SENTINEL.format(end[0]), enumerate(ends)))

    @property
    def _of_text(self) -> protocol.ModelProto:
        """The model without its own sentinels."""
        model = protocol.ModelProto.FromString(self._model)
        del model.pieces[len(model.pieces) - self.own_sentinels :]
        return model

    @cached_property
    def size(self) -> int:
        return self._processor.get_piece_size()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """A piece that begins with white space starts a word. Byte and special pieces start and end nothing."""
        processor, ids = self._processor, [*range(self.size)]
        is_other = (processor.is_control, processor.is_unknown, processor.is_unused, processor.is_byte)
        others = (any(kinds) for kinds in zip(*(of_kind(ids) for of_kind in is_other), strict=True))
        shown = (piece.replace(SPACE, " ") for piece, _ in self.pieces)
        text = ["" if other else piece for piece, other in zip(shown, others, strict=True)]
        return Vocabulary(
            size=self.size,
            text=(UNK + 1, self.size),
            pad=PAD,
            eos=EOS,
            unk=UNK,
            word_starts=np.array([*map(starts_word, text)]),
            sentence_ends=np.array([*map(ends_sentence, text)]),
            texts=tuple(text),
        )

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        ids = [*range(self.size)]
        return frozenset(compress(ids, self._processor.is_byte(ids)))

    @property
    def token_bytes(self) -> list[bytes]:
        found = [*super().token_bytes]
        for id_ in self.byte_ids:
            found[id_] = byte_of(self.pieces[id_][0])
        return found

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """The model, and a readable list of its pieces with their scores."""
        shown = ((repr(piece)[1:-1] if piece in LINES else piece, score) for piece, score in self.pieces)
        listing = "".join(f"{piece}\t{score:g}\n" for piece, score in shown)
        return {MODEL: self._model, LISTING: listing.encode()}

    @cached_property
    def pieces(self) -> list[tuple[str, float]]:
        """The pieces and their scores, in the order of their ids."""
        ids = [*range(self.size)]
        return [*zip(self._processor.id_to_piece(ids), self._processor.get_score(ids), strict=True)]

    @cached_property
    def normalizer_spec(self) -> protocol.NormalizerSpec:
        """What the model changes in text before it is split."""
        return protocol.ModelProto.FromString(self._model).normalizer_spec

    @cached_property
    def keeps_text(self) -> bool:
        """Whether the model changes nothing: `decode(encode(text))` is the text, but for unknown characters."""
        spec = self.normalizer_spec
        return not (spec.precompiled_charsmap or spec.remove_extra_whitespaces or spec.add_dummy_prefix)

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self._model).hexdigest()

    def has(self, token: str) -> bool:
        return self._processor.id_to_piece(self._processor.piece_to_id(token)) == token

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Long texts are encoded in parts. Ids differ from those of the whole text only if two segmentations have
        nearly equal scores, since sentencepiece adds scores in single precision."""
        return [*map(self._encode_exactly, texts)] if self.keeps_text else self._encode(texts)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        cut = [[*parts(text)] or [""] for text in texts]
        encoded = self._processor.encode([first for first, *_ in cut], num_threads=1)
        return [[*chain(ids, *map(self.encode_rest, rest))] for ids, (_, *rest) in zip(encoded, cut, strict=True)]

    def _encode_exactly(self, text: str) -> list[int]:
        """Ids of a text without normalization: nothing in the text is changed.

        Of several spaces, the first ones are the longest piece: scores don't decide between 16 + 4 and 4 + 16. And ▁ is
        a character like any other, although it is sentencepiece's own mark for a space.
        """
        parts = re.split(f"({'|'.join([SPACE, *self.runs])})", text)
        encoded = iter(self._encode(parts[::2]))
        ids = next(encoded)
        for apart, rest in zip(parts[1::2], encoded, strict=True):
            ids = [*ids, *self._ids_apart[apart], *rest]
        return [id_ for id_, before in zip(ids, [None, *ids], strict=False) if not id_ == before == UNK]

    @cached_property
    def runs(self) -> list[str]:
        """The pieces that are several spaces, the longest first."""
        runs = (piece.replace(SPACE, " ") for piece, _ in self.pieces if not piece.strip(SPACE))
        return sorted((run for run in runs if len(run) > 1), key=len, reverse=True)

    @cached_property
    def _ids_apart(self) -> dict[str, list[int]]:
        mark = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()] if self.byte_ids else [UNK]
        return {SPACE: mark, **{run: [self._processor.piece_to_id(SPACE * len(run))] for run in self.runs}}

    def encode_rest(self, text: str) -> list[int]:
        if self.keeps_text or self._processor.normalize(f"x{text}").startswith(f"{SPACE}x{SPACE}"):
            return self.encode([text])[0]
        ids: list[int] = self._within_words.encode(text)
        return ids

    @cached_property
    def _within_words(self) -> sentencepiece.SentencePieceProcessor:
        """The model without the space that it puts in front of a text."""
        model = self._of_text
        model.normalizer_spec.add_dummy_prefix = False
        return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())

    def decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)

    def glue(self, first: int) -> str:
        """The space that decoding drops from the front of a text."""
        return " " if not self.keeps_text and self._processor.id_to_piece(first).startswith(SPACE) else ""


class SentencePieceConfig(TrainedConfig):
    """A unigram model of sentencepiece with T5's conventions: pad 0, eos 1, unk 2."""

    model: ClassVar[type[TextModel]] = SentencePiece

    kind: Literal["sentencepiece"] = "sentencepiece"
    vocab_size: int = Field(32_000, gt=0, le=1 << 22)  # four times the largest published vocabularies
    """Number of tokens to train, without special tokens and sentinels; an existing tokenizer has its own number."""
    normalization: Literal["t5", "identity"] = "t5"
    """What a model that is trained here changes in text. `t5`: characters become those of NFKC (² becomes 2), and line
    breaks, tabs and runs of spaces one space. `identity`: nothing, so code and tables keep their lines and indentation.
    An existing model has its own."""
    byte_fallback: bool = True
    """Encode characters without a token as UTF-8 bytes, which are 256 of the tokens. false: these characters are
    unknown, and lost."""
    character_coverage: float = Field(None, ge=0.98, le=1, validate_default=True)  # as sentencepiece requires
    """The share of the sample's characters that get tokens of their own; other characters become bytes, or unknown. By
    default 0.9995 with `byte_fallback`, else 1."""

    @property
    def memory(self) -> int:
        return MEMORY_PER_BYTE

    @field_validator("character_coverage", mode="before")
    @classmethod
    def _nothing_is_lost_by_default(cls, coverage: Any, others: ValidationInfo) -> Any:
        return coverage if coverage is not None else _COVERED_WITH_BYTES if others.data.get("byte_fallback") else 1.0

    @model_validator(mode="after")
    def _bytes_fit_into_the_vocabulary(self) -> "SentencePieceConfig":
        others = 6 if self.normalization == "identity" else 3  # it has tokens for the ends of lines and tabs
        if self.path is None and self.byte_fallback and self.vocab_size <= _BYTES + others:
            few = f"tokens are too few for byte_fallback, which takes {_BYTES} of them beside {others} special ones"
            way_out = "ask for more, or set byte_fallback to false, and rare characters are unknown"
            raise ValueError(f"vocab_size: {self.vocab_size} {few}: {way_out}")
        return self

    @property
    def pieces(self) -> int:
        return self.vocab_size if self.path is None else self.existing().size

    @property
    def on_unknown(self) -> str:
        ours = "set tokenizer.byte_fallback to true, or tokenizer.character_coverage to 1, and add text to the sample"
        return ours if self.path is None else super().on_unknown

    def existing(self) -> SentencePiece:
        assert self.path is not None
        model = SentencePiece.read(Path(self.path))
        if self.normalization == "identity" and not model.keeps_text:
            way_out = "train one (path: null), or leave normalization out"
            raise UserError(f"tokenizer.normalization: {self.path} changes text, not identity; {way_out}")
        return model

    def train(self, sample: Sequence[bytes]) -> SentencePiece:
        return train(self, sample)

    def expected(self) -> Vocabulary:
        return to_be_trained(self.vocab_size) if self.path is None else self.existing().vocabulary


def train(config: SentencePieceConfig, sample: Iterable[bytes]) -> SentencePiece:
    """The model trained on the texts of `sample`, in UTF-8.

    The same texts in the same order give the same bytes: the number of threads is fixed, and the model has no paths.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in sample for line in _lines(text, config.normalization)),
            model_writer=model,
            model_type="unigram",
            vocab_size=config.vocab_size,
            character_coverage=config.character_coverage,
            byte_fallback=config.byte_fallback,
            pad_id=PAD,
            eos_id=EOS,
            unk_id=UNK,
            bos_id=-1,
            input_sentence_size=_LINES,
            num_threads=THREADS,
            minloglevel=2,
            **_NORMALIZATIONS[config.normalization],
        )
    except (RuntimeError, OSError) as error:
        raise UserError(f"tokenizer.vocab_size: {_refusal(config, str(error))}") from error
    return SentencePiece(model.getvalue(), "the trained tokenizer")


def largest_vocabulary(config: SentencePieceConfig, sample: Iterable[bytes]) -> int:
    """The largest vocabulary that can be trained on `sample`, at most 1 MB: sentencepiece's refusal names it.

    Raises UserError if none can be trained.
    """
    try:
        train(config.model_copy(update={"vocab_size": _MORE_THAN_ANY}), sample)
    except UserError as error:
        if isinstance(error.__cause__, RuntimeError) and (most := re.search(_TOO_HIGH, str(error.__cause__))):
            return int(most[1])
        raise
    return _MORE_THAN_ANY


def _refusal(config: SentencePieceConfig, error: str) -> str:
    """The message about a vocabulary that sentencepiece can't train."""
    size = config.vocab_size
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", error):
        also, way_out = (" and 256 bytes", ", or set byte_fallback to false") if config.byte_fallback else ("", "")
        return (
            f"{size:,} tokens are too few: the sample's characters{also} need {int(least[1]):,}; ask for more, lower "
            f"character_coverage{way_out}"
        )
    if most := re.search(_TOO_HIGH, error):
        return f"the sample gives at most {int(most[1]):,} tokens, not {size:,}; ask for fewer, or add text"
    return f"sentencepiece can't train {size:,} tokens: {' '.join(error.split())}"


def _lines(text: bytes, normalization: str) -> Iterator[str]:
    """The lines of a text, which may be cut inside a character; long ones are cut at spaces.

    T5's normalization has no other mark at the end of a line than white space; identity has them as characters.
    """
    decoded = text.decode(errors="ignore")
    for line in decoded.splitlines() if normalization == "t5" else decoded.split("\n"):
        yield from _cut(line)


def _cut(line: str) -> Iterator[str]:
    """`line` in parts of at most `_LINE_BYTES` bytes, cut at spaces where there are any."""
    start = 0
    while start < len(line):
        window = line[start : start + _LINE_BYTES + 1]  # a character takes at least a byte
        if len(window.encode()) <= _LINE_BYTES:
            yield window
            return
        head = window.encode()[:_LINE_BYTES].decode(errors="ignore")
        size = head.rfind(" ") if " " in head.strip() else len(head)
        yield head[:size]
        start += size
        while line[start : start + 1].isspace():
            start += 1
