"""Training a sentencepiece unigram model on a sample of the corpus."""

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

from data_pipeline.config import TokenizerConfig
from data_pipeline.errors import UserError
from data_pipeline.parts import read_documents
from data_pipeline.tokenizer.sentencepiece import EOS, PAD, UNK, SentencePiece

_LINE_BYTES = 4000  # the trainer silently skips lines above 4,192 bytes
_LINES = 5_000_000  # of the sample, drawn by the trainer with its own fixed seed; all of them would fill the memory
_THREADS = 8  # part of the result: another number trains another vocabulary


def train(config: TokenizerConfig, corpus: Path, parts: list[str], seed: int, share: float) -> SentencePiece:
    """The model trained on a seeded `share` of the training documents in `parts`.

    Same lines, same bytes: threads are fixed and no path enters the model.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sample_lines(corpus, parts, seed, share),
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
            num_threads=_THREADS,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"tokenizer.vocab_size: sentencepiece can't train {config.vocab_size} pieces: {reason}"
        ) from None
    return SentencePiece(model.getvalue(), "the trained tokenizer")


def _sample_lines(corpus: Path, parts: list[str], seed: int, share: float) -> Iterator[str]:
    """Lines of a seeded sample of the training documents, of pairs both sides, long ones cut at spaces."""
    for part in parts:
        for document in read_documents(corpus, part, ["id", "text", "target", "split"]):
            if document["split"] == "train" and _position(seed, document["id"]) < share:
                for line in f"{document['text']}\n{document['target']}".splitlines():
                    yield from _cut(line)


def _position(seed: int, identity: str) -> float:
    digest = hashlib.blake2b(f"{seed}/tokenizer/{identity}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _cut(line: str) -> Iterator[str]:
    """`line` in pieces of at most `_LINE_BYTES` bytes, cut at spaces where there are any."""
    while len(line.encode()) > _LINE_BYTES:
        head = line.encode()[:_LINE_BYTES].decode(errors="ignore")
        at = head.rfind(" ") if " " in head.strip() else len(head)
        yield line[:at]
        line = line[at:].lstrip()
    if line:
        yield line
