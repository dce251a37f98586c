"""What each stage of a build declares. `table` lists all stages; plans, reports and docs are made from the table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from data_pipeline.base.store import Store
from data_pipeline.config import CorpusConfig
from data_pipeline.engine import work_units
from data_pipeline.engine.context import Context
from data_pipeline.engine.merging import MergeSpec, merge
from data_pipeline.engine.work_units import Finished, Result, ResultType, Spec
from data_pipeline.stages.parts import Part, grouped


@dataclass(frozen=True)
class Kind:
    """A kind of files that stages read or write.

    Attributes:
        of: the bytes by which the speed of a stage that reads these files is given. `inputs`, `sets`: of the files.
            `read`, `kept`: of the text before and after deduplication.
        holds: what the files contain.
        folder: their folder in the corpus.
        files: a pattern of their names.
    """

    name: str
    of: Literal["inputs", "sets", "read", "kept"]
    holds: str = ""
    folder: str = ""
    files: str = ""


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
DROPPED = Kind(
    "dropped",
    "read",
    "the documents that steps dropped: id, url, step, rule, kept, found, text",
    "dropped",
    "*.parquet",
)
SAMPLE = Kind("sample", "kept", "the documents that may be in it", ".stages")
TOKENIZER = Kind("tokenizer", "kept", "spiece.model and spiece.vocab, or the files of another kind", "tokenizer")
TOKENS = Kind("tokens", "kept", "token ids, sorted by the shuffle's hash", ".stages")
ROWS = Kind("numbers of rows", "kept", "in their records", ".stages")
SHARDS = Kind("shards", "kept", "WebDataset tars of blocks of rows", "shards", "shard-*.tar")
KINDS = (INPUTS, SETS, PARTS, KEYS, DUPLICATES, NGRAMS, DOCUMENTS, DROPPED, SAMPLE, TOKENIZER, TOKENS, ROWS, SHARDS)


@dataclass(frozen=True)
class Amounts:
    """How much a build has to do.

    Attributes:
        inputs: number of units that read inputs.
        parts: the parts of documents before deduplication.
        left: the parts after it.
        documents: number of documents that are read.
        keys: number of keys by step.
        tokens: number of tokens by split.
        sets: bytes of the evaluation sets.
    """

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
        """The parts before deduplication, grouped by unit."""
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
    """A stage, with what plans, reports and commands need to know.

    Attributes:
        unit: what a unit works on.
        units: `units(amounts)` is the number of units.
        most: `most(amounts)` is the `Unit.size` of the largest unit; `sized_by` names what it counts.
        applies: `applies(config)`: whether a build has the stage.
        step: the step of deduplication that the stage belongs to.
        ends: the folder of the corpus (`build --until`) that is complete with this stage.
        merge: the function that merges files of this stage if there are too many for its readers.
        readers: `readers(amounts)` is the number of units that read each file.
    """

    unit: str
    reads: tuple[Kind, ...]
    writes: Kind
    units: Callable[[Amounts], int]
    most: Callable[[Amounts], int] = lambda amounts: 0
    sized_by: str = "byte of text"
    applies: Callable[[CorpusConfig], bool] = lambda config: True
    step: str = ""
    ends: str = ""
    merge: Callable[[Context, MergeSpec], Result] | None = None
    readers: Callable[[Amounts], int] = lambda amounts: 1

    def merged(
        self, files: Mapping[str, str], readers: int, corpus: Store, config: CorpusConfig
    ) -> tuple[list[str], dict[str, Sequence[Finished[Result]]]]:
        """The files that `readers` read, the stage's `files` or merged ones, and the units as of `merging.merge`."""
        assert self.merge is not None
        return merge(self.name, self.merge, files, readers, corpus, config.ray)


AnyStage = Stage[Any, Any]
