"""The tokens stage: writes the token ids of each unit's documents, in the order of the global shuffle.

Documents are sorted by a hash of (seed, id). A bucket, a range of hashes, is then a slice of every file, and becomes a
shard. Runs of `together` pieces of a text file stay in order.

If there are many files, they are merged (`engine.merging`). A merged file has the documents of several files in the
order of hashes, and documents with equal hashes in the order of the files. So merging changes neither a bucket's
documents nor their order.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.errors import UserError
from data_pipeline.base.safetensors_file import Arrays, growing_arrays, write_arrays
from data_pipeline.base.store import Store
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus import tokenizer
from data_pipeline.corpus.documents import read_documents
from data_pipeline.corpus.objectives.randomness import hashed
from data_pipeline.corpus.packing import Documents
from data_pipeline.corpus.tokenizer.config import TokenizerConfig
from data_pipeline.corpus.tokenizer.normalization import Changes
from data_pipeline.corpus.tokenizer.sentencepiece import MODEL, SentencePiece
from data_pipeline.corpus.tokenizer.text_model import TextModel, batches
from data_pipeline.engine.context import Context
from data_pipeline.engine.merging import MergeSpec
from data_pipeline.engine.work_units import Finished, Result, Unit, outputs_of
from data_pipeline.stages import tokenizer as tokenizer_stage
from data_pipeline.stages.dedup import left
from data_pipeline.stages.kinds import DOCUMENTS, TOKENIZER, TOKENS
from data_pipeline.stages.parts import Part, grouped, parts_of
from data_pipeline.stages.stage import Stage, merged
from data_pipeline.text.document import Document, most_common

SPLITS = ("train", "validation")
_ENCODE_CHARACTERS = 8_000_000  # encoded at once
_LEAST_CHARACTERS = _ENCODE_CHARACTERS // 512  # what a document counts as at least: at most 512 are encoded at once
_ORDER_BITS = 12  # of a hash: the place in a run of documents that stay together
_CHARACTERS_AT_ONCE = 1 << 20  # of texts whose characters without a token are counted together
_CHARACTERS_IN_RESULT = 1000
_BYTES_AT_ONCE = 1 << 27  # of tokens, merged in memory
_LAST = 2**64 - 1  # the hash in the row of an index that ends the last document
_TIMES_HELD = 3  # how often the ids of a unit are in memory


@dataclass(frozen=True)
class TokensSpec:
    """Neighbouring parts of one source, and the settings of their tokens. `together` as in the source."""

    parts: list[str]
    output: str
    together: int
    config: CorpusConfig


@dataclass(frozen=True, slots=True)
class TokensWritten(Result):
    """What the driver keeps of a unit's result: the number of tokens by split."""

    tokens: dict[str, int]


@dataclass(frozen=True)
class TokensResult(TokensWritten):
    """Counts of tokens and documents.

    Attributes:
        lengths: number of documents by the power of two of their tokens.
        uncovered: number of unknown tokens, and of tokens that are a byte of a character without a token.
        characters: number of each character without a token.
        changed: number of each character that the tokenizer's normalization changes, and of runs of spaces.
    """

    lengths: dict[str, int] = field(default_factory=dict)
    uncovered: dict[str, int] = field(default_factory=dict)
    characters: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)


class Coverage:
    """Counts unknown tokens, tokens that are bytes of a character without a token, and these characters; and what the
    model's normalization changes.

    Characters are counted in the texts that have such tokens. These texts wait until they have `_CHARACTERS_AT_ONCE`
    characters.
    """

    def __init__(self, model: TextModel):
        self._model = model
        self._kinds = np.zeros(model.size, dtype=np.uint8)
        self._kinds[sorted(model.byte_ids)] = 2
        if model.vocabulary.unk is not None:
            self._kinds[model.vocabulary.unk] = 1
        self._tokens = np.zeros(3, dtype=np.int64)
        self._seen: Counter[str] = Counter()
        normalizes = isinstance(model, SentencePiece) and not model.keeps_text
        self._changes = Changes(model.files[MODEL]) if normalizes else None
        self._waiting, self._size = list[str](), 0

    def add(self, ids: np.ndarray, *texts: str) -> None:
        """Counts `ids` (n,), the tokens of `texts` without special tokens."""
        if self._changes:
            for text in texts:
                self._changes.add(text)
        kinds = self._kinds[ids]
        if kinds.any():
            self._tokens += np.bincount(kinds, minlength=3)
            self._waiting += texts
            self._size += sum(map(len, texts))
            if self._size >= _CHARACTERS_AT_ONCE:
                self._see()

    @property
    def tokens(self) -> dict[str, int]:
        """The numbers of unknown tokens and of bytes."""
        return {"unknown": int(self._tokens[1]), "bytes": int(self._tokens[2])}

    @property
    def characters(self) -> dict[str, int]:
        """The number of each of the 1,000 most frequent characters without a token, by count and then by name."""
        self._see()
        return most_common(self._seen, _CHARACTERS_IN_RESULT)

    @property
    def changed(self) -> dict[str, int]:
        """The number of each of the 1,000 most frequent characters that are changed, and of runs of spaces."""
        return most_common(self._changes.counts if self._changes else {}, _CHARACTERS_IN_RESULT)

    def _see(self) -> None:
        self._seen.update(self._model.without_token(self._waiting))
        self._waiting, self._size = [], 0


def plan(config: CorpusConfig, parts: Sequence[Part], trained: Finished) -> list[Unit[TokensSpec]]:
    """One unit for each group of parts."""
    units = []
    together = {source.name: source.together for source in config.sources}
    tokenizer_of = tokenizer_stage.identity(config.tokenizer, trained)
    bytes_of_token = _TIMES_HELD * id_bytes(config.tokenizer)
    for group in grouped(parts, config):
        output = f".stages/tokens/{group[0].name}.safetensors"
        spec = TokensSpec([part.path for part in group], output, together[group[0].source], config)
        settings = [config.seed, spec.together, config.rows.end_of_document, config.pairs, config.tokenizer.layout]
        inputs = [settings, [checksum for part in group for checksum in part.checksums], tokenizer_of]
        size = sum(part.text_bytes for part in group)
        memory = bytes_of_token * math.ceil(config.tokenizer.tokens_per_byte * size)
        units.append(Unit(group[0].name, spec, fingerprint(inputs), (output,), size, memory))
    return units


def _id_type(ids: int) -> type[np.uint16] | type[np.uint32]:
    """The type of token ids in files, if the tokenizer has so many `ids`."""
    return np.uint16 if ids <= 65_536 else np.uint32


def id_bytes(config: TokenizerConfig) -> int:
    """Bytes of a token id in files, at most."""
    return np.dtype(_id_type(tokenizer_stage.expected(config).size)).itemsize


def tokenize(context: Context, spec: TokensSpec) -> TokensResult:
    """Writes the token ids of a unit's documents, by split and in the order of hashes.

    A row of the index is a document: its hash, where its tokens begin and, in pairs, the number of tokens before the
    target. One more row has the end of the last document.
    """
    store, config, pairs = context.store, spec.config, spec.config.pairs
    model = context.cached("tokenizer", lambda: tokenizer.in_corpus(store, **config.tokenizer.layout))
    dtype = _id_type(model.size)
    tokens: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    hashes: dict[str, list[int]] = {split: [] for split in SPLITS}
    targets: dict[str, list[int]] = {split: [] for split in SPLITS}
    documents = read_documents(store, spec.parts, ["id", "split", "text", "target"])
    end = np.array([model.vocabulary.eos] if config.rows.end_of_document else [], dtype)
    coverage = Coverage(model.model)
    for batch in batches(documents, lambda one: max(len(one.text), _LEAST_CHARACTERS), _ENCODE_CHARACTERS):
        ids_of_batch = _encoded(model.model, batch, "text")
        nothing = np.zeros(0, dtype)
        of_targets = _encoded(model.model, batch, "target") if pairs else [nothing] * len(batch)
        for document, text, target in zip(batch, ids_of_batch, of_targets, strict=True):
            ids = np.concatenate([text, target, end], dtype=dtype, casting="unsafe")
            coverage.add(ids[: len(text) + len(target)], document.text, document.target)
            tokens[document.split].append(ids)
            hashes[document.split].append(shuffle_hash(config.seed, document.id, spec.together))
            targets[document.split].append(len(text))
    arrays: dict[str, np.ndarray] = {}
    for split in SPLITS:
        order = np.argsort(np.array(hashes[split], dtype=np.uint64), kind="stable")
        pieces = [tokens[split][position] for position in order]
        columns = [np.append(np.array(hashes[split], dtype=np.uint64)[order], np.uint64(_LAST))]
        columns.append(np.cumsum([0, *(len(piece) for piece in pieces)], dtype=np.uint64))
        if pairs:
            columns.append(np.append(np.array(targets[split], dtype=np.uint64)[order], np.uint64(0)))
        arrays[f"{split}.index"] = np.column_stack(columns)
        arrays[f"{split}.tokens"] = np.concatenate([np.zeros(0, dtype), *pieces])
    with store.put(spec.output) as path:
        write_arrays(path, arrays)
    powers = Counter(len(piece).bit_length() - 1 for pieces in tokens.values() for piece in pieces if len(piece))
    return TokensResult(
        {split: len(arrays[f"{split}.tokens"]) for split in SPLITS},
        {str(power): n for power, n in sorted(powers.items())},
        coverage.tokens,
        coverage.characters,
        coverage.changed,
    )


def _encoded(model: TextModel, documents: Sequence[Document], field: str) -> list[np.ndarray]:
    """The ids (n,) of a field of each document. Raises UserError, which names the document, for text that has none."""
    texts = [getattr(document, field) for document in documents]
    try:
        return model.encode_to_arrays(texts)
    except UserError:
        for document, text in zip(documents, texts, strict=True):
            try:
                model.encode([text])
            except UserError as error:
                raise UserError(f"{document.id}: {field}: {error}") from None
        raise


def shuffle_hash(seed: int, identity: str, together: int) -> int:
    """The place of the document `identity` in the global shuffle.

    Runs of `together` consecutive documents of a file stay together, in order.
    """
    if together == 1:
        return hashed(f"{seed}/shuffle/{identity}")
    file, _, ordinal = identity.rpartition("/")
    run, place = divmod(int(ordinal), together)
    return hashed(f"{seed}/shuffle/{file}/{run}") >> _ORDER_BITS << _ORDER_BITS | place


@dataclass(frozen=True)
class TokenBucket:
    """Range `number` of `count` equal ranges of the shuffle's hashes: the documents of one shard."""

    split: str
    number: int
    count: int

    @property
    def bounds(self) -> tuple[int, int]:
        """The first and the last hash."""
        return -(-(self.number << 64) // self.count), -(-((self.number + 1) << 64) // self.count) - 1


def _found(file: Arrays, bucket: TokenBucket) -> np.ndarray:
    """The rows (n + 1, columns) of the index of a token file that have the bucket's n documents and the row after them.

    Hashes are spread evenly, so the place of a bucket's hashes is nearly known. If the estimate is wrong, more rows
    are read.
    """
    name, (low, high) = f"{bucket.split}.index", bucket.bounds
    total = file.shape(name)[0] - 1
    more = 64 + 4 * math.isqrt(total)
    start, stop = max(0, (total * low >> 64) - more), min(total, (total * (high + 1) >> 64) + more)
    while True:
        (rows,) = file.slices((name, start, stop + 1))
        hashes = rows[:-1, 0]
        before = start > 0 and (not len(hashes) or int(hashes[0]) >= low)
        after = stop < total and (not len(hashes) or int(hashes[-1]) <= high)
        if not before and not after:
            break
        more *= 4
        start, stop = max(0, start - before * more), min(total, stop + after * more)
    first = int(np.searchsorted(hashes, np.uint64(low)))
    last = int(np.searchsorted(hashes, np.uint64(high), side="right"))
    return rows[first : last + 1]


def count_tokens(store: Store, files: Sequence[str], buckets: Sequence[TokenBucket]) -> list[int]:
    """Number of tokens in each of `buckets`, which are all buckets. The time grows with the number of documents, not
    with files times buckets."""
    counts = {split: np.zeros(sum(bucket.split == split for bucket in buckets), np.int64) for split in SPLITS}
    for name in files:
        with Arrays.opened(store, name) as file:
            for split, tokens in counts.items():
                index = file[f"{split}.index"]
                lengths = np.diff(index[:, 1].astype(np.int64))
                np.add.at(tokens, bucket_numbers(index[:-1, 0], len(tokens)), lengths)
    return [int(counts[bucket.split][bucket.number]) for bucket in buckets]


def bucket_numbers(hashes: np.ndarray, count: int) -> np.ndarray:
    """Numbers (n,) of the buckets of `hashes` (n,): hash * count >> 64, computed in 32-bit halves."""
    buckets, half, low = np.uint64(count), np.uint64(32), np.uint64(2**32 - 1)
    return ((hashes >> half) * buckets + ((hashes & low) * buckets >> half)) >> half


def read_bucket(store: Store, files: Sequence[str], bucket: TokenBucket) -> Documents:
    """The documents of a bucket from all `files`, in shuffled order."""

    def of_file(name: str) -> _Documents:
        with Arrays.opened(store, name) as file:
            return _documents(file, bucket)

    return _gathered(store.each(of_file, files))[1]


def merge_tokens(context: Context, spec: MergeSpec) -> Result:
    """Merges token files, a range of hashes at a time."""
    store = context.store
    files = store.each(partial(Arrays, store), spec.files)
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {}
    for split in SPLITS:
        index, ids = f"{split}.index", f"{split}.tokens"
        length = sum(file.shape(index)[0] - 1 for file in files) + 1
        shapes[index] = np.uint64, (length, files[0].shape(index)[1])
        shapes[ids] = files[0].dtype(ids), (sum(file.shape(ids)[0] for file in files),)
    with store.put(spec.output) as path, growing_arrays(path, shapes) as append:
        for split in SPLITS:
            index, ids = f"{split}.index", f"{split}.tokens"
            kind, (total,) = shapes[ids]
            ranges, end = max(1, -(-total * np.dtype(kind).itemsize // _BYTES_AT_ONCE)), 0
            for number in range(ranges):
                own = partial(_documents, bucket=TokenBucket(split, number, ranges))
                hashes, documents = _gathered(store.each(own, files))
                if not len(hashes):
                    continue
                columns = [hashes, end + documents.starts[:-1].astype(np.uint64)]
                if documents.targets is not None:
                    columns.append(documents.targets.astype(np.uint64))
                append(index, np.column_stack(columns))
                append(ids, documents.tokens)
                end += len(documents.tokens)
            append(index, np.array([_LAST, end, 0][: shapes[index][1][1]], np.uint64))
    return Result()


_Documents = tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]


def _documents(file: Arrays, bucket: TokenBucket) -> _Documents:
    """(hashes (n,), tokens of each document, [starts of targets (n,)]) of a bucket in a token file."""
    index = _found(file, bucket)
    hashes, (offsets, *targets) = index[:-1, 0], index[:, 1:].T.astype(np.int64)
    if not len(hashes):
        return hashes, [], []
    (tokens,) = file.slices((f"{bucket.split}.tokens", int(offsets[0]), int(offsets[-1])))
    return hashes, np.split(tokens, offsets[1:-1] - offsets[0]), [starts[:-1] for starts in targets]


def _gathered(found: Sequence[_Documents]) -> tuple[np.ndarray, Documents]:
    """(hashes (n,), documents) of a bucket, `found` in each file, in the order of hashes and then of files."""
    hashes = [of_file for of_file, _, _ in found]
    documents = [tokens for _, of_file, _ in found for tokens in of_file]
    targets = [starts for _, _, of_file in found for starts in of_file]
    if not documents:
        nothing = np.zeros(0, np.int64)
        return np.zeros(0, np.uint64), Documents(np.zeros(0, np.uint16), np.zeros(1, np.int64), nothing)
    joined = np.concatenate(hashes)
    order = np.argsort(joined, kind="stable")
    ordered = [documents[position] for position in order]
    starts = np.cumsum([0, *(len(document) for document in ordered)], dtype=np.int64)
    of_pairs = np.concatenate(targets)[order] if targets else None
    return joined[order], Documents(np.concatenate(ordered), starts, of_pairs)


STAGE: Stage[TokensSpec, TokensWritten] = Stage(
    "tokens",
    5,
    tokenize,
    "lower characters_per_part",
    plan=lambda build: plan(build.config, parts_of(left(build)), *build.of(tokenizer_stage.STAGE)),
    unit="a part, or a group of small ones",
    reads=(DOCUMENTS, TOKENIZER),
    writes=TOKENS,
    memory=f"{2 * _TIMES_HELD} bytes for each token, {4 * _TIMES_HELD} if there are more than 65,536 ids",
    keeps=TokensWritten,
)


def buckets_of(config: CorpusConfig, tokenized: Sequence[Finished[TokensWritten]]) -> list[TokenBucket]:
    """The buckets of all splits; each becomes a shard. The number of a split's tokens gives its number of buckets."""
    buckets = []
    for split in SPLITS:
        count = config.buckets(sum(unit.result.tokens[split] for unit in tokenized))
        buckets += [TokenBucket(split, number, count) for number in range(count)]
    return buckets


MERGED = merged(
    STAGE,
    merge_tokens,
    lambda build: (outputs_of(build.of(STAGE)), len(buckets_of(build.config, build.of(STAGE)))),
)
