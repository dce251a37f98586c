"""The tokenizer stage: one unit trains the tokenizer on a sample of the corpus, or copies an existing tokenizer.

The sample has the first documents in the order of a hash. The size of a corpus gives a bound for these hashes. In a
large corpus, a stage before has many units select the documents below the bound, and the tokenizer reads only these.
One core would need half an hour to read all documents of C4.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.errors import UserError
from data_pipeline.base.progress import set_activity
from data_pipeline.base.store import Store
from data_pipeline.config import TokenizerConfig
from data_pipeline.corpus.documents import SCHEMA, read_documents
from data_pipeline.corpus.objectives.randomness import hashed
from data_pipeline.corpus.tokenizer import byte_level_bpe, sentencepiece, tokenizer_json, wordpiece
from data_pipeline.corpus.tokenizer.text_model import TextModel
from data_pipeline.corpus.tokenizer.tokenizer import FOLDER, Tokenizer, with_more_ids
from data_pipeline.engine.work_units import Finished, Result, Unit, outputs_of
from data_pipeline.stages.parts import Part, PartsResult, part_file
from data_pipeline.stages.stage import DOCUMENTS, SAMPLE, TOKENIZER, Stage
from data_pipeline.stages.tokenizer_training import MEMORY_PER_BYTE, THREADS, check_memory, train
from data_pipeline.text.vocabulary import Vocabulary

# Unit, files and reader by kind. Each kind has a unit of its own, so that a change of kind removes the old files.
_KINDS: dict[str, tuple[str, tuple[str, ...], Callable[[Path], TextModel]]] = {
    "sentencepiece": ("spiece", (sentencepiece.MODEL, sentencepiece.LISTING), sentencepiece.SentencePiece.read),
    "byte_level_bpe": (
        "byte-level-bpe",
        (byte_level_bpe.VOCABULARY, byte_level_bpe.MERGES),
        byte_level_bpe.ByteLevelBPE.read,
    ),
    "wordpiece": ("wordpiece", (wordpiece.LISTING, wordpiece.SETTINGS), wordpiece.WordPiece.read),
    "tokenizer_json": (
        "tokenizer-json",
        (tokenizer_json.MODEL, tokenizer_json.CONFIG, tokenizer_json.ROLES),
        tokenizer_json.read,
    ),
}
_NOT_OF_THE_MODEL = {"sentinels", "special_tokens", "normalization"}
_MORE = 2  # times the sample: documents differ in length, and some are held out
_LARGE = 4  # times the sample: in a smaller corpus, half of all documents or more would be selected
_UNIT_BYTES, _MOST_UNITS = 64_000_000, 1000  # least text of a unit, and most units: each writes a file


@dataclass(frozen=True)
class SamplingSpec:
    """Some parts, and the bound `below` which the hashes of selected documents are."""

    parts: list[str]
    seed: int
    below: int
    output: str


@dataclass(frozen=True)
class Candidates(Result):
    """How many documents a unit has selected, and the bytes of their text."""

    kept: int
    bytes: int


def plan_sampling(config: TokenizerConfig, seed: int, parts: Sequence[Part]) -> list[Unit[SamplingSpec]]:
    """A unit for each group of neighbouring parts; none if no tokenizer is trained, or the corpus has at most 4 times
    the text and the documents of the sample."""
    text, documents = sum(part.text_bytes for part in parts), sum(sum(part.documents.values()) for part in parts)
    is_large = text > _LARGE * config.sample_bytes or documents > _LARGE * config.sample_documents
    if config.path is not None or not is_large:
        return []
    share = min(config.sample_bytes / text, config.sample_documents / documents)
    below = int(_MORE * share * 2**64)
    ends = accumulate(part.text_bytes for part in parts)
    count = min(_MOST_UNITS, max(1, text // _UNIT_BYTES))
    numbers = [max(0, end - 1) * count // text for end in ends]
    units = []
    for number, group in groupby(zip(numbers, parts, strict=True), key=lambda pair: pair[0]):
        own = [part for _, part in group]
        name = f"part-{number:05d}"
        output = f".stages/{SAMPLING.name}/{name}.parquet"
        inputs = fingerprint([seed, below, [part.checksums for part in own]])
        spec = SamplingSpec([part.path for part in own], seed, below, output)
        units.append(Unit(name, spec, inputs, (output,), bytes=sum(part.text_bytes for part in own)))
    return units


def keep_candidates(corpus: Store, spec: SamplingSpec) -> Candidates:
    """Writes the training documents whose hashes are below the bound."""
    with part_file(corpus, spec.output) as file:
        for document in read_documents(corpus, spec.parts, SCHEMA.names):
            if document.split == "train" and sample_rank(spec.seed, document.id) < spec.below:
                file.add(document)
    return Candidates(file.documents.total(), file.text_bytes)


def files_to_read(config: TokenizerConfig, parts: Sequence[Part], units: Sequence[Finished[Candidates]]) -> list[str]:
    """The files with the selected documents if these are enough for the sample, else the files of all documents."""
    kept, text = sum(unit.result.kept for unit in units), sum(unit.result.bytes for unit in units)
    if kept >= config.sample_documents or text >= config.sample_bytes:
        return list(outputs_of(units))
    return [part.path for part in parts]


SAMPLING = Stage(
    "tokenizer-sample",
    1,
    keep_candidates,
    "lower tokenizer.sample_bytes",
    unit="a group of parts, if there is four times as much text as the sample takes",
    reads=(DOCUMENTS,),
    writes=SAMPLE,
    units=lambda amounts: len(plan_sampling(amounts.config.tokenizer, amounts.config.seed, amounts.left)),
    applies=lambda config: config.tokenizer.path is None,
)


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer to train on a sample of the documents in the files `parts`. `text_bytes`: of all documents."""

    config: TokenizerConfig
    seed: int
    parts: list[str]
    text_bytes: int


@dataclass(frozen=True)
class Sample:
    """The size of the training sample; 0 if the tokenizer wasn't trained."""

    documents: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class TokenizerResult(Result):
    """The number of the model's pieces, and the training sample."""

    pieces: int
    sample: Sample


def plan(
    config: TokenizerConfig, seed: int, parts: Sequence[Part], candidates: Sequence[Finished[Candidates]] = ()
) -> list[Unit[TokenizerSpec]]:
    """The only unit of this stage. `candidates`: the units that have selected documents for the sample."""
    if config.path is not None:
        tokenizer = Tokenizer(_existing(config), config.special_tokens, config.sentinels)
        inputs: list[Any] = [tokenizer.sha256]
    else:
        inputs = [config.model_dump(exclude=_NOT_OF_THE_MODEL), seed, [part.checksums for part in parts]]
        inputs += [] if config.normalization == "t5" else [config.normalization]
    to_read = files_to_read(config, parts, candidates)
    spec = TokenizerSpec(config, seed, to_read, sum(part.text_bytes for part in parts))
    name, files, _ = _KINDS[config.kind]
    outputs = tuple(f"{FOLDER}/{file}" for file in files)
    return [Unit(name, spec, fingerprint(inputs), outputs, size=_trained_on(config, spec.text_bytes))]


def make_tokenizer(corpus: Store, spec: TokenizerSpec) -> TokenizerResult:
    """Writes the tokenizer's files."""
    config, sample = spec.config, Sample()
    if config.path is not None:
        model = _existing(config)
    else:
        check_memory(min(config.sample_bytes, spec.text_bytes))
        texts = draw_sample(corpus, spec.parts, spec.seed, config.sample_documents, config.sample_bytes)
        sample = Sample(len(texts), sum(map(len, texts)))
        set_activity(f"training on {sample.bytes / 1e6:,.1f} MB of text")
        model = train(config, texts)
    Tokenizer(model, config.special_tokens, config.sentinels)  # refuses special tokens that were trained as pieces
    for file, content in model.files.items():
        corpus.write(f"{FOLDER}/{file}", content)
    return TokenizerResult(model.size, sample)


def draw_sample(corpus: Store, parts: list[str], seed: int, documents: int, sample_bytes: int) -> list[bytes]:
    """The first training documents of `parts` in the order of a hash of (seed, id), as UTF-8.

    They are at most `documents` documents and `sample_bytes` bytes; the last document is cut to fit.
    """
    heap: list[tuple[int, bytes]] = []  # the last document is on top
    size = 0
    for number, part in enumerate(parts, 1):
        set_activity(f"reading part {number:,} of {len(parts):,}")
        for document in read_documents(corpus, [part], ["id", "text", "target", "split"]):
            if document.split != "train":
                continue
            rank = -sample_rank(seed, document.id)
            full = len(heap) == documents or size >= sample_bytes
            if full and rank < heap[0][0]:
                continue
            text = "\n".join(filter(None, (document.text, document.target))).encode()  # both sides of a pair
            heapq.heappush(heap, (rank, text))
            size += len(text)
            while len(heap) > documents or size - len(heap[0][1]) >= sample_bytes:
                size -= len(heapq.heappop(heap)[1])
    sample = [text for _, text in sorted(heap, reverse=True)]
    if size > sample_bytes:
        sample[-1] = sample[-1][: len(sample[-1]) + sample_bytes - size]
    return sample


def sample_rank(seed: int, identity: str) -> int:
    """The place of a document in the order of the sample: a hash of (seed, id) below 2⁶⁴."""
    return hashed(f"{seed}/tokenizer/{identity}")


def describe(
    config: TokenizerConfig, trained: Finished[TokenizerResult], documents: Sequence[Finished[PartsResult]]
) -> str:
    """A line: how much of the corpus is the training sample, or how many tokens an existing tokenizer has."""
    sample = trained.result.sample
    if not sample.documents:
        given = "vocab_size" in config.model_fields_set and config.vocab_size != trained.result.pieces
        said = f"; tokenizer.vocab_size ({config.vocab_size:,}) is for one that is trained" if given else ""
        return f"tokenizer: {trained.result.pieces:,} tokens, as {config.path} has them{said}"
    there = sum(unit.result.documents.get("train", 0) for unit in documents)
    text = sum(unit.result.text_bytes for unit in documents)
    size = f"{sample.bytes / 1e6:,.1f} of {text / 1e6:,.1f} MB of text"
    limits = " (tokenizer.sample_documents, tokenizer.sample_bytes)" if sample.documents < there else ""
    return f"tokenizer: trained on {sample.documents:,} of {there:,} training documents, {size}{limits}"


def expected(config: TokenizerConfig) -> Vocabulary:
    """The vocabulary of the tokenizer, before it is trained."""
    own = sentencepiece.to_be_trained(config.vocab_size) if config.path is None else _existing(config).vocabulary
    return with_more_ids(own, config.special_tokens, config.sentinels)


def _trained_on(config: TokenizerConfig, text_bytes: int) -> int:
    return 0 if config.path else min(config.sample_bytes, text_bytes)


STAGE = Stage(
    "tokenizer",
    3,
    make_tokenizer,
    "lower tokenizer.sample_bytes",
    memory=MEMORY_PER_BYTE,
    cpus=THREADS,
    unit="the whole sample",
    reads=(DOCUMENTS, SAMPLE),
    writes=TOKENIZER,
    units=lambda amounts: 1,
    most=lambda amounts: _trained_on(amounts.config.tokenizer, sum(part.text_bytes for part in amounts.left)),
    sized_by="byte of the sample",
    ends="tokenizer",
)


def _existing(config: TokenizerConfig) -> TextModel:
    assert config.path is not None
    _, _, read = _KINDS[config.kind]
    model = read(Path(config.path))
    if config.normalization == "identity" and isinstance(model, sentencepiece.SentencePiece) and not model.keeps_text:
        way_out = "train one (path: null), or leave normalization out"
        raise UserError(f"tokenizer.normalization: {config.path} changes text, not identity; {way_out}")
    if config.sentinels and isinstance(model, tokenizer_json.TokenizerJson):
        model, _ = tokenizer_json.without_sentinels(model)  # they come again above the special tokens
    return model
