"""What each stage of a build declares. `table` has all of them, and what tells of stages is made from it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from data_pipeline.config import CorpusConfig
from data_pipeline.execution import work_units
from data_pipeline.execution.merging import MergeSpec, merge
from data_pipeline.execution.work_units import Finished, Result, ResultType, Spec
from data_pipeline.foundation.store import Store
from data_pipeline.stages.parts import Part, grouped


@dataclass(frozen=True)
class Kind:
    """A kind of files that stages read or write."""

    name: str
    of: Literal["inputs", "sets", "read", "kept"]
    """Whose bytes measure the speed of a stage that reads the files: the inputs', the evaluation sets', or those of the
    text before deduplication (read) or after it (kept)."""
    holds: str = ""  # what the files hold
    folder: str = ""  # in the corpus
    files: str = ""  # a pattern of their names


INPUTS = Kind("input files", "inputs")
SETS = Kind("evaluation sets", "sets")
PARTS = Kind(
    "parts",
    "read",
    "clean documents in Parquet files; if `dedup` is off, those of the corpus",
    ".stages/documents",
    "part-*.parquet",
)
KEYS = Kind("keys", "read", "hashes of documents, lines or spans; what earlier steps changed of the parts", ".stages")
DUPLICATES = Kind("duplicates", "read", "the copies to drop", ".stages")
NGRAMS = Kind("n-grams", "read", "those of the sets' items", ".stages")
DOCUMENTS = Kind(
    "documents",
    "kept",
    "those that are left: id, text, url, title, language, source, split, timestamp, target",
    "documents",
    "part-*.parquet",
)
SAMPLE = Kind("sample", "kept", "the documents that may be in it", ".stages")
TOKENIZER = Kind("tokenizer", "kept", "spiece.model and spiece.vocab, or the files of another kind", "tokenizer")
TOKENS = Kind("tokens", "kept", "token ids, sorted by the shuffle's hash", ".stages")
ROWS = Kind("numbers of rows", "kept", "in their records", ".stages")
SHARDS = Kind("shards", "kept", "WebDataset tars of blocks of rows", "shards", "shard-*.tar")
KINDS = (INPUTS, SETS, PARTS, KEYS, DUPLICATES, NGRAMS, DOCUMENTS, SAMPLE, TOKENIZER, TOKENS, ROWS, SHARDS)


@dataclass(frozen=True)
class Amounts:
    """How much a build has to do: units that read `inputs`, `parts` of documents before deduplication and those `left`
    after it, `documents` in all, `keys` by step, `tokens` by split, and bytes of evaluation `sets`."""

    config: CorpusConfig
    inputs: int
    parts: Sequence[Part]
    left: Sequence[Part]
    documents: int
    keys: Mapping[str, int]
    tokens: Mapping[str, int]
    sets: int

    @cached_property
    def groups(self) -> list[list[Part]]:
        """The parts before deduplication as units read them."""
        return grouped(self.parts, self.config)

    @cached_property
    def groups_left(self) -> list[list[Part]]:
        return grouped(self.left, self.config)

    @property
    def shards(self) -> int:
        return sum(map(self.config.buckets, self.tokens.values()))


def largest(groups: Sequence[Sequence[Part]]) -> int:
    """The bytes of text in the largest of `groups`."""
    return max((sum(part.text_bytes for part in group) for group in groups), default=0)


@dataclass(frozen=True, kw_only=True)
class Stage(work_units.Stage[Spec, ResultType]):
    """A stage, with what plans, reports and commands need to know of it.

    `unit`: what one of its units works on. `applies(config)`: whether a build has the stage. `units(amounts)`: how many
    units that are; `most(amounts)`: the `Unit.size` of the largest, in `sized_by`.

    `step`: the step of deduplication that it belongs to; `of_urls`: it has nothing to do where no document has a URL.
    `ends`: the command that ends with it. `merge` makes one file of several, where there are more than
    each of `readers(amounts)` can open.
    """

    unit: str
    reads: tuple[Kind, ...]
    writes: Kind
    units: Callable[[Amounts], int]
    most: Callable[[Amounts], int] = lambda amounts: 0
    sized_by: str = "byte of text"
    applies: Callable[[CorpusConfig], bool] = lambda config: True
    step: str = ""
    of_urls: bool = False
    ends: str = ""
    merge: Callable[[Store, MergeSpec], Result] | None = None
    readers: Callable[[Amounts], int] = lambda amounts: 1

    def merged(
        self, files: Mapping[str, str], readers: int, corpus: Store, config: CorpusConfig, shown: bool = True
    ) -> tuple[list[str], dict[str, Sequence[Finished[Result]]]]:
        """What `readers` read of the stage's `files`, themselves or merged ones, and the units of `merging.merge`."""
        assert self.merge is not None
        return merge(self.name, self.merge, files, readers, corpus, config.ray, shown)


AnyStage = Stage[Any, Any]
