"""The tokenizer: a sentencepiece unigram model with T5's conventions, trained on the corpus or loaded.

pad 0, eos 1, unk 2; the sentinels are no pieces of the model but the ids above it, `<extra_id_0>` the highest. So text
that spells `<extra_id_0>` is ordinary text.
"""

import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import sentencepiece

from data_pipeline.atomic import fingerprint, write_bytes
from data_pipeline.config import TokenizerConfig
from data_pipeline.errors import FailedError, UserError
from data_pipeline.parts import Part, read_documents
from data_pipeline.vocabulary import Vocabulary
from data_pipeline.work_units import Stage, Unit

PAD, EOS, UNK = 0, 1, 2
_MODEL, _VOCABULARY = "tokenizer/spiece.model", "tokenizer/spiece.vocab"
_LINE_BYTES = 4000  # the trainer silently skips lines above 4,192 bytes
_LINES = 5_000_000  # of the sample, drawn by the trainer with its own fixed seed; all of them would fill the memory
_TEXT_CHARACTERS = 1_000_000
_SPACE = re.compile(r"\s")
_THREADS = 8  # part of the result: another number trains another vocabulary


class Tokenizer:
    """A sentencepiece model with `sentinels` ids above its pieces."""

    def __init__(self, path: Path, sentinels: int):
        try:
            self._model = path.read_bytes()
            self.processor = sentencepiece.SentencePieceProcessor(model_proto=self._model)
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None
        except RuntimeError:
            raise FailedError(f"{path}: not a sentencepiece model") from None
        special = (self.processor.pad_id(), self.processor.eos_id(), self.processor.unk_id())
        if special != (PAD, EOS, UNK):
            raise UserError(f"{path}: expected pad 0, eos 1, unk 2 as in T5, got pad, eos, unk = {special}")
        self.sentinels = sentinels

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self._model).hexdigest()

    @cached_property
    def pieces(self) -> int:
        return self.processor.get_piece_size()

    @property
    def size(self) -> int:
        """Ids in all: pieces and sentinels."""
        return self.pieces + self.sentinels

    @property
    def first_sentinel(self) -> int:
        """Id of `<extra_id_0>`; sentinel k is k below it."""
        return self.size - 1

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What the ids are for."""
        return Vocabulary(
            size=self.size,
            text=(UNK + 1, self.pieces),
            pad=PAD,
            eos=EOS,
            unk=UNK,
            first_sentinel=self.first_sentinel,
            sentinels=self.sentinels,
        )

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without end mark.

        A long text is encoded part by part, cut at white space, where no piece of the model reaches across: the model's
        lattice takes some hundred bytes for each character. Only where two segmentations score alike may another one be
        taken than for the whole text, since sentencepiece adds the scores up in single precision.
        """
        if all(len(text) <= _TEXT_CHARACTERS for text in texts):
            return self.processor.encode(texts, num_threads=1)
        return [[id_ for part in _parts(text) for id_ in self.processor.encode(part)] for text in texts]

    def encode_with_sentinels(self, text: str) -> list[int]:
        """Ids of `text` in which `<extra_id_k>` stands for sentinel k, end mark included: an input to fill in."""
        ids: list[int] = []
        start = 0
        for number in range(self.sentinels):
            mark = f"<extra_id_{number}>"
            at = text.find(mark, start)
            if at < 0:
                break
            ids += [*self.processor.encode(text[start:at]), self.first_sentinel - number]
            start = at + len(mark)
        return [*ids, *self.processor.encode(text[start:]), EOS]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; sentinels show as `<extra_id_k>`, pad and eos not at all."""
        parts: list[str] = []
        run: list[int] = []
        for token in [int(token) for token in ids]:
            if token >= self.pieces:
                parts += [self.processor.decode(run), f"<extra_id_{self.first_sentinel - token}>"]
                run = []
            elif token not in (PAD, EOS):
                run.append(token)
        return " ".join(part for part in [*parts, self.processor.decode(run)] if part)

    def describe(self) -> dict[str, Any]:
        """What a manifest says of the tokenizer."""
        return {
            "kind": "sentencepiece",
            "file": _MODEL,
            "sha256": self.sha256,
            "size": self.size,
            "pieces": self.pieces,
            "sentinels": self.sentinels,
            "pad": PAD,
            "eos": EOS,
            "unk": UNK,
            "first_sentinel": self.first_sentinel,
        }


def load(corpus: Path, sentinels: int) -> Tokenizer:
    return Tokenizer(corpus / _MODEL, sentinels)


def plan(config: TokenizerConfig, seed: int, parts: Sequence[Part], documents: int) -> list[Unit]:
    """One unit. `documents`: how many of those in `parts` are for training."""
    if config.path is not None:
        tokenizer = Tokenizer(Path(config.path), config.sentinels)
        if "vocab_size" in config.model_fields_set and config.vocab_size != tokenizer.pieces:
            raise UserError(
                f"tokenizer.vocab_size: {config.path} has {tokenizer.pieces} pieces, not {config.vocab_size}"
            )
        inputs: list[Any] = [tokenizer.sha256]
    else:
        inputs = [config.model_dump(exclude={"sentinels"}), seed, [part.checksums for part in parts]]
    share = min(1.0, config.sample_documents / max(1, documents))
    spec = {"config": config.model_dump(), "seed": seed, "parts": [part.path for part in parts], "share": share}
    return [Unit("spiece", spec, fingerprint(inputs), (_MODEL, _VOCABULARY))]


def make_tokenizer(corpus: Path, spec: dict[str, Any]) -> dict[str, Any]:
    config = TokenizerConfig.model_validate(spec["config"])
    if config.path is not None:
        model = Path(config.path).read_bytes()
    else:
        model = _train(config, _sample_lines(corpus, spec["parts"], spec["seed"], spec["share"]))
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocabulary = "".join(
        f"{processor.id_to_piece(piece)}\t{processor.get_score(piece):g}\n" for piece in range(len(processor))
    )
    write_bytes(corpus / _VOCABULARY, vocabulary.encode())
    write_bytes(corpus / _MODEL, model)
    return {"pieces": len(processor)}


STAGE = Stage("tokenizer", 2, make_tokenizer)


def _train(config: TokenizerConfig, lines: Iterator[str]) -> bytes:
    """The trained model. Same lines, same bytes: threads are fixed and no path enters the model."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
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
    return model.getvalue()


def _sample_lines(corpus: Path, parts: list[str], seed: int, share: float) -> Iterator[str]:
    """Lines of a seeded sample of the training documents, long ones cut at spaces."""
    for part in parts:
        for document in read_documents(corpus, part, ["id", "text", "split"]):
            if document["split"] == "train" and _position(seed, document["id"]) < share:
                for line in document["text"].splitlines():
                    yield from _cut(line)


def _position(seed: int, identity: str) -> float:
    digest = hashlib.blake2b(f"{seed}/tokenizer/{identity}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _parts(text: str) -> Iterator[str]:
    """`text` in parts of about `_TEXT_CHARACTERS`, cut at white space where there is any."""
    start = 0
    while start < len(text):
        space = _SPACE.search(text, start + _TEXT_CHARACTERS, start + 2 * _TEXT_CHARACTERS)
        end = space.start() if space else start + 2 * _TEXT_CHARACTERS
        yield text[start:end]
        start = end


def _cut(line: str) -> Iterator[str]:
    """`line` in pieces of at most `_LINE_BYTES` bytes, cut at spaces where there are any."""
    while len(line.encode()) > _LINE_BYTES:
        head = line.encode()[:_LINE_BYTES].decode(errors="ignore")
        at = head.rfind(" ") if " " in head.strip() else len(head)
        yield line[:at]
        line = line[at:].lstrip()
    if line:
        yield line
