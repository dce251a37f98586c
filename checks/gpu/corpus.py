"""A corpus made without Ray, in a second: real text and a trained vocabulary.

It is written with the project's own blocks, packing and tokenizer, and read by the training code as any corpus is.
"""

import gzip
import hashlib
import io
import itertools
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import sentencepiece

import data_pipeline
from data_pipeline.base.atomic import fingerprint, sha256, write_json
from data_pipeline.corpus import FORMAT_VERSION
from data_pipeline.corpus.blocks import add, count_rows, of_rows
from data_pipeline.corpus.corpus import LINEAGE, Lineage
from data_pipeline.corpus.objectives.objective import Objective
from data_pipeline.corpus.objectives.span_corruption import SpanCorruption
from data_pipeline.corpus.packing import PACKINGS, Documents, Rows, Rules
from data_pipeline.corpus.tokenizer import Tokenizer, save
from data_pipeline.corpus.tokenizer.sentencepiece import EOS, PAD, UNK, SentencePiece

_SAMPLE = Path(data_pipeline.__file__).parent / "samples" / "c4-train.00000-of-01024-first1000.json.gz"
_ROWS_PER_BLOCK = 64


def make(directory: Path, inputs: int = 32, documents: int = 150, pieces: int = 500) -> Path:
    """Makes a corpus for span corruption with `inputs` tokens a row; returns its directory.

    Its text is `documents` documents of the shipped sample.
    """
    texts = _texts(documents)
    tokenizer = Tokenizer(_trained(texts, pieces), sentinels=100)
    objective = SpanCorruption(inputs_length=inputs)
    encoded = tokenizer.encode(texts)
    tokens = np.array(list(itertools.chain.from_iterable(encoded)), dtype=np.int32)
    starts = np.append(0, np.cumsum([len(one) for one in encoded]))
    save(tokenizer, directory)
    cut = int(len(tokens) * 0.9)
    halves = {"train": slice(0, cut), "validation": slice(cut, len(tokens))}
    blocks: list[dict[str, object]] = []
    splits = {}
    for split, half in halves.items():
        rules = Rules(objective, tokenizer.vocabulary, split == "validation", f"{split}/0-of-1", 0)
        inside = starts[(starts >= half.start) & (starts < half.stop)] - half.start
        rows = PACKINGS["concatenate"](Documents(tokens[half], np.append(inside, half.stop - half.start)), rules)
        written = _write_shard(directory, split, rows)
        name = f"shards/{split}/shard-00000.tar"
        blocks += [{"split": split, "shard": name, **block} for block in written]
        shard = {"name": name, "rows": len(rows), "bytes": (directory / name).stat().st_size}
        shards = [{**shard, "sha256": sha256(directory / name)}]
        splits[split] = {"rows": len(rows), "tokens": int(rows.offsets[-1]), "documents": len(inside), "shards": shards}
    pq.write_table(pa.Table.from_pylist(blocks), directory / "blocks.parquet")
    pq.write_table(Lineage([], []).table(), directory / LINEAGE)
    _write_manifest(directory, tokenizer, objective, splits)
    return directory


def _texts(documents: int) -> list[str]:
    with gzip.open(_SAMPLE, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in itertools.islice(lines, documents)]


def _trained(texts: list[str], pieces: int) -> SentencePiece:
    model = io.BytesIO()
    lines = (line for text in texts for line in text.splitlines())
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        vocab_size=pieces,
        pad_id=PAD,
        eos_id=EOS,
        unk_id=UNK,
        bos_id=-1,
        minloglevel=2,
    )
    return SentencePiece(model.getvalue(), "the trained tokenizer")


def _write_shard(directory: Path, split: str, rows: Rows) -> list[dict[str, object]]:
    """Writes the rows as one tar; returns what blocks.parquet says of each block."""
    path = directory / f"shards/{split}/shard-00000.tar"
    path.parent.mkdir(parents=True)
    written = []
    with path.open("wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for first in range(0, len(rows), _ROWS_PER_BLOCK):
            last = min(first + _ROWS_PER_BLOCK, len(rows))
            block = of_rows(rows.tokens, rows.offsets[first : last + 1], rows.documents, {})
            offset = tar.offset
            add(tar, block, first)
            length = tar.offset - offset
            written.append({"offset": offset, "length": length, "first_row": first, "rows": count_rows(block)})
    content = path.read_bytes()
    for one in written:
        one["sha256"] = hashlib.sha256(content[one["offset"] :][: one["length"]]).hexdigest()
    return written


def _write_manifest(directory: Path, tokenizer: Tokenizer, objective: Objective, splits: dict[str, object]) -> None:
    tables = {"blocks": "blocks.parquet", "lineage": LINEAGE}
    manifest = {
        "format_version": FORMAT_VERSION,
        "name": "gpu",
        "seed": 0,
        "tokenizer": vars(tokenizer.describe()),
        "rows": {
            "packing": "concatenate",
            "end_of_document": False,
            "apply_at": "load",
            "raw_length": objective.raw_length,
            "objective": objective.model_dump(),
        },
        "splits": splits,
        **{name: {"file": file, "sha256": sha256(directory / file)} for name, file in tables.items()},
    }
    write_json(directory / "manifest.json", {**manifest, "fingerprint": fingerprint(manifest)}, sealed=True)
