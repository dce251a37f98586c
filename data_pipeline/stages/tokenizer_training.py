"""Trains a sentencepiece unigram model on a sample of the corpus."""

import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

import sentencepiece

from data_pipeline.base import processes
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.config import TokenizerConfig
from data_pipeline.corpus.tokenizer.sentencepiece import EOS, LINES, PAD, UNK, SentencePiece

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


def train(config: TokenizerConfig, sample: Iterable[bytes]) -> SentencePiece:
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


def largest_vocabulary(config: TokenizerConfig, sample: Iterable[bytes]) -> int:
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


def _refusal(config: TokenizerConfig, error: str) -> str:
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


def check_memory(sample_bytes: int) -> None:
    """Raises FailedError if training on `sample_bytes` may take more memory than is free on this machine."""
    needed, free = MEMORY_PER_BYTE * sample_bytes, processes.available_memory()
    if needed > free:
        raise FailedError(
            f"tokenizer.sample_bytes: training on {sample_bytes:,} bytes takes up to {needed / 1e9:.1f} GB of memory, "
            f"and {free / 1e9:.1f} GB are free; set it to {free // MEMORY_PER_BYTE:,} or less, "
            "or use a machine with more memory"
        )


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
