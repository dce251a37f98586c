"""The tokenizer stage: one unit makes the tokenizer from a sample of the corpus, or copies an existing tokenizer.

The sample has the first documents in the order of a hash. The size of a corpus gives a bound for these hashes. In a
large corpus, a stage before has many units select the documents below the bound, and the tokenizer reads only these.
One core would need half an hour to read all documents of C4.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from data_pipeline.base import packages, processes
from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.errors import FailedError
from data_pipeline.base.progress import Activity
from data_pipeline.base.store import Store
from data_pipeline.corpus.documents import SCHEMA, read_documents
from data_pipeline.corpus.objectives.randomness import hashed
from data_pipeline.corpus.tokenizer.config import AnyTokenizer, TokenizerConfig, TrainedConfig
from data_pipeline.corpus.tokenizer.sentencepiece import MEMORY_PER_BYTE, THREADS
from data_pipeline.corpus.tokenizer.tokenizer import FOLDER, Tokenizer, with_more_ids
from data_pipeline.engine.context import Context
from data_pipeline.engine.work_units import Finished, Result, Unit, outputs_of
from data_pipeline.stages.dedup import left
from data_pipeline.stages.kinds import DOCUMENTS, SAMPLE, TOKENIZER
from data_pipeline.stages.parts import Part, PartsWritten, part_file, parts_of
from data_pipeline.stages.stage import Stage
from data_pipeline.text.vocabulary import Vocabulary

_NOT_OF_THE_MODEL = {"sentinels", "special_tokens"}
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
    if not isinstance(config, TrainedConfig) or not config.is_trained:
        return []
    text, documents = sum(part.text_bytes for part in parts), sum(sum(part.documents.values()) for part in parts)
    is_large = text > _LARGE * config.sample_bytes or documents > _LARGE * config.sample_documents
    if not is_large:
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


def keep_candidates(context: Context, spec: SamplingSpec) -> Candidates:
    """Writes the training documents whose hashes are below the bound."""
    with part_file(context.store, spec.output) as file:
        for document in read_documents(context.store, spec.parts, SCHEMA.names):
            if document.split == "train" and sample_rank(spec.seed, document.id) < spec.below:
                file.add(document)
    return Candidates(file.documents.total(), file.text_bytes)


def files_to_read(config: TrainedConfig, parts: Sequence[Part], units: Sequence[Finished[Candidates]]) -> list[str]:
    """The files with the selected documents if these are enough for the sample, else the files of all documents."""
    kept, text = sum(unit.result.kept for unit in units), sum(unit.result.bytes for unit in units)
    if kept >= config.sample_documents or text >= config.sample_bytes:
        return list(outputs_of(units))
    return [part.path for part in parts]


SAMPLING = Stage(
    "tokenizer-sample",
    2,
    keep_candidates,
    "lower tokenizer.sample_bytes",
    plan=lambda build: plan_sampling(build.config.tokenizer, build.config.seed, parts_of(left(build))),
    unit="a group of parts, if there is four times as much text as the sample takes",
    reads=(DOCUMENTS,),
    writes=SAMPLE,
)


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer to train on a sample of the documents in the files `parts`. `text_bytes`: of all documents."""

    config: AnyTokenizer
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
    to_read: list[str] = []
    if isinstance(config, TrainedConfig) and config.is_trained:
        inputs: list[Any] = [config.model_dump(exclude=_NOT_OF_THE_MODEL), seed, [part.checksums for part in parts]]
        to_read = files_to_read(config, parts, candidates)
    else:
        inputs = [Tokenizer(config.existing(), config.special_tokens, config.sentinels).sha256]
    if package := packages.offering("tokenizers", config.kind):
        inputs.append(package)
    spec = TokenizerSpec(config, seed, to_read, sum(part.text_bytes for part in parts))
    outputs = tuple(f"{FOLDER}/{file}" for file in (*config.model.file_names, *config.model.listings))
    # A unit for each kind, so that a change of kind removes the old files.
    memory = config.memory * config.trained_on(spec.text_bytes)
    return [Unit(config.kind, spec, fingerprint(inputs), outputs, memory=memory)]


def identity(config: TokenizerConfig, trained: Finished[Result]) -> list[str]:
    """What decides which ids a text gets: the files of the tokenizer that the unit `trained` has written. With a kind
    that a package offers, also the unit's fingerprint, since such a kind's code may change and its files stay."""
    if packages.offering("tokenizers", config.kind):
        return [*trained.checksums, trained.fingerprint]
    return trained.checksums


def make_tokenizer(context: Context, spec: TokenizerSpec) -> TokenizerResult:
    """Writes the tokenizer's files."""
    store, progress, config, sample = context.store, context.progress, spec.config, Sample()
    if not isinstance(config, TrainedConfig) or not config.is_trained:
        model = config.existing()
    else:
        check_memory(config, config.trained_on(spec.text_bytes))
        texts = draw_sample(store, spec.parts, spec.seed, config.sample_documents, config.sample_bytes, progress)
        sample = Sample(len(texts), sum(map(len, texts)))
        progress.doing = f"training on {sample.bytes / 1e6:,.1f} MB of text"
        model = config.train(texts)
    Tokenizer(model, config.special_tokens, config.sentinels)  # refuses special tokens that were trained as pieces
    for file, content in model.files.items():
        store.write(f"{FOLDER}/{file}", content)
    return TokenizerResult(model.size, sample)


def draw_sample(
    store: Store, parts: list[str], seed: int, documents: int, sample_bytes: int, progress: Activity | None = None
) -> list[bytes]:
    """The first training documents of `parts` in the order of a hash of (seed, id), as UTF-8.

    They are at most `documents` documents and `sample_bytes` bytes; the last document is cut to fit. `progress` says
    which part is read.
    """
    progress = progress or Activity("")
    heap: list[tuple[int, bytes]] = []  # the last document is on top
    size = 0
    for number, part in enumerate(parts, 1):
        progress.doing = f"reading part {number:,} of {len(parts):,}"
        for document in read_documents(store, [part], ["id", "text", "target", "split"]):
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
    config: TokenizerConfig, trained: Finished[TokenizerResult], documents: Sequence[Finished[PartsWritten]]
) -> str:
    """A line: how much of the corpus is the training sample, or how many tokens an existing tokenizer has."""
    sample = trained.result.sample
    if not sample.documents:
        path, size = getattr(config, "path", None), getattr(config, "vocab_size", None)
        trains = isinstance(config, TrainedConfig)
        given = trains and "vocab_size" in config.model_fields_set and size not in (None, trained.result.pieces)
        said = f"; tokenizer.vocab_size ({size:,}) is for one that is trained" if given else ""
        return f"tokenizer: {trained.result.pieces:,} tokens, as {path or config.kind} has them{said}"
    there = sum(unit.result.documents.get("train", 0) for unit in documents)
    text = sum(unit.result.text_bytes for unit in documents)
    size = f"{sample.bytes / 1e6:,.1f} of {text / 1e6:,.1f} MB of text"
    limits = " (tokenizer.sample_documents, tokenizer.sample_bytes)" if sample.documents < there else ""
    return f"tokenizer: trained on {sample.documents:,} of {there:,} training documents, {size}{limits}"


def expected(config: TokenizerConfig) -> Vocabulary:
    """The vocabulary of the tokenizer, before it is trained."""
    return with_more_ids(config.expected(), config.special_tokens, config.sentinels, config.model.sentinels_ascend)


def check_memory(config: TrainedConfig, sample_bytes: int) -> None:
    """Raises FailedError if training on `sample_bytes` may take more memory than is free on this machine."""
    needed, free = config.memory * sample_bytes, processes.available_memory()
    if needed > free:
        raise FailedError(
            f"tokenizer.sample_bytes: training on {sample_bytes:,} bytes takes up to {needed / 1e9:.1f} GB of memory, "
            f"and {free / 1e9:.1f} GB are free; set it to {free // config.memory:,} or less, "
            "or use a machine with more memory"
        )


STAGE = Stage(
    "tokenizer",
    3,
    make_tokenizer,
    "lower tokenizer.sample_bytes",
    cpus=THREADS,
    plan=lambda build: plan(build.config.tokenizer, build.config.seed, parts_of(left(build)), build.of(SAMPLING)),
    unit="the whole sample",
    reads=(DOCUMENTS, SAMPLE),
    writes=TOKENIZER,
    memory=f"{MEMORY_PER_BYTE} bytes for each byte of the sample, 80 for BPE with a pattern",
    completes=(TOKENIZER,),
)
