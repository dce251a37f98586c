"""Settings and training of a sentencepiece unigram model on a sample of the corpus."""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import sentencepiece
from pydantic import Field, ValidationInfo, field_validator, model_validator

from data_pipeline.base.errors import UserError
from data_pipeline.corpus.tokenizer.config import TrainedConfig
from data_pipeline.corpus.tokenizer.sentencepiece import EOS, LINES, PAD, UNK, SentencePiece, to_be_trained
from data_pipeline.corpus.tokenizer.text_model import TextModel
from data_pipeline.text.vocabulary import Vocabulary

_LINE_BYTES = 4000  # the trainer silently skips lines above 4,192 bytes
_LINES = 5_000_000  # lines that the trainer draws from the sample, with a fixed seed; each takes 40 bytes plus its text
_MORE_THAN_ANY = 500_000  # tokens; 1 MB of text gives some 30,000
_TOO_HIGH = r"Vocabulary size too high .* a value <= (\d+)"
THREADS = 8  # another number of threads would train another vocabulary
# Measured with 20, 100 and 166 MB of English and 32,000 tokens: 21.3, 21.1 and 20.9 bytes for each byte of the sample,
# and one for the sample itself. Most of it is a suffix array, 20 bytes for each character.
MEMORY_PER_BYTE = 23
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


class SentencePieceConfig(TrainedConfig):
    """A unigram model of sentencepiece with T5's conventions: pad 0, eos 1, unk 2."""

    model: ClassVar[type[TextModel]] = SentencePiece
    memory: ClassVar[int] = MEMORY_PER_BYTE

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
