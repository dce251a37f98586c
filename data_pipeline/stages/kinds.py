"""The kinds of files that the stages of a build read and write."""

from dataclasses import dataclass
from typing import Literal


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
    "clean documents in Parquet files: if nothing is deduplicated or looked for, in `documents/`; otherwise",
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
