"""The shards stage: each bucket of tokens becomes one WebDataset tar of blocks of rows.

A tar sample is a block: flat token arrays with row offsets. Its key is the row id of its first row. `decode_block` is
the one reader of a block's bytes.
"""

import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline import tokenizer
from data_pipeline.atomic import atomic_file, fingerprint
from data_pipeline.config import CorpusConfig, RowsConfig
from data_pipeline.objectives.objective import Objective, Padded
from data_pipeline.objectives.randomness import row_keys
from data_pipeline.rows import SPLITS, Bucket, count_tokens, read_bucket
from data_pipeline.vocabulary import Vocabulary
from data_pipeline.work_units import Finished, Stage, Unit

Block = dict[str, np.ndarray]
_KEY_DIGITS = 12


def noise_keys(seed: int, split: str, epoch: int | np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(n,) uint64 keys of the noise of `rows` (n,) of a split: at build time the same as for epoch 0 at load time."""
    return row_keys(seed, f"noise/{split}", epoch, rows)


def plan(config: CorpusConfig, corpus: Path, tokenized: list[Finished], trained: Finished) -> list[Unit]:
    """One unit for each bucket. Their number follows from the tokens of a split; row ids run through the split."""
    files = [name for unit in tokenized for name in unit.outputs]
    checksums = [checksum for unit in tokenized for checksum in unit.checksums]
    units = []
    for split in SPLITS:
        tokens = sum(unit.result["tokens"][split] for unit in tokenized)
        count = config.buckets(tokens)
        buckets = [Bucket(split, number, count) for number in range(count)]
        in_buckets = count_tokens(corpus, files, buckets)
        rows = np.array([len(row_offsets(config.rows.objective, split, tokens)) - 1 for tokens in in_buckets.tolist()])
        first_rows = np.cumsum(rows) - rows
        for bucket, first_row in zip(buckets, first_rows.tolist(), strict=True):
            output = f"shards/{split}/shard-{bucket.number:05d}.tar"
            settings = {
                "split": split,
                "bucket": bucket.number,
                "buckets": count,
                "first_row": first_row,
                "seed": config.seed,
                "rows": config.rows.model_dump(),
                "rows_per_block": config.shards.rows_per_block,
                "tokenizer": config.tokenizer.layout,
            }
            spec = {**settings, "files": files, "output": output}
            name = f"{split}-{bucket.number:05d}"
            units.append(Unit(name, spec, fingerprint([settings, checksums, trained.checksums]), (output,)))
    return units


def write_shard(corpus: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Cuts one bucket into rows and writes them; returns the shard's blocks and counts."""
    import webdataset  # imports torch, which readers of a manifest don't need

    settings = RowsConfig.model_validate(spec["rows"])
    tokens, documents = read_bucket(corpus, spec["files"], Bucket(spec["split"], spec["bucket"], spec["buckets"]))
    offsets = row_offsets(settings.objective, spec["split"], len(tokens))
    rows = len(offsets) - 1
    used = tokens[: offsets[-1]]
    vocabulary = tokenizer.load(corpus, spec["tokenizer"]).vocabulary
    blocks: list[dict[str, Any]] = []
    path = corpus / spec["output"]
    with atomic_file(path) as file:
        with webdataset.TarWriter(file, mtime=0) as writer:
            for start in range(0, rows, spec["rows_per_block"]):
                count = min(spec["rows_per_block"], rows - start)
                own = offsets[start : start + count + 1]
                flat = used[own[0] : own[-1]]
                first_row = spec["first_row"] + start
                if settings.apply_at == "build":
                    block = _corrupted(settings.objective, flat, own - own[0], first_row, spec, vocabulary)
                else:
                    block = _raw(flat, own - own[0], documents - own[0])
                offset = writer.tarstream.offset
                writer.write({"__key__": f"{first_row:0{_KEY_DIGITS}d}", **_as_members(block)})
                blocks.append(
                    {
                        "offset": offset,
                        "length": writer.tarstream.offset - offset,
                        "first_row": first_row,
                        "rows": count,
                        "tokens": sum(values.size for name, values in block.items() if not name.endswith("offsets")),
                    }
                )
        _add_checksums(Path(file.name), blocks)
    return {
        "shard": path.name,
        "split": spec["split"],
        "rows": rows,
        "tokens": len(used),
        "documents": int(np.count_nonzero(documents < len(used))),
        "dropped_tokens": len(tokens) - len(used),
        "blocks": blocks,
    }


STAGE = Stage("shards", 2, write_shard)


def decode_block(content: bytes) -> Block:
    """The arrays of one block from its bytes in the tar, by name ("tokens", "row_offsets", …). Reads no pickles."""
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as members:
        return {
            member.name.split(".", 1)[1].removesuffix(".npy"): np.load(
                io.BytesIO(members.extractfile(member).read()),  # type: ignore[union-attr]
                allow_pickle=False,
            )
            for member in members
        }


def row_offsets(objective: Objective, split: str, tokens: int) -> np.ndarray:
    """(rows + 1,) int64: where the rows of a bucket of `tokens` begin and end.

    All rows are equally long but for the last of a validation bucket: its tail is a shorter row, if it can be masked.
    The tail of a training bucket is dropped.
    """
    offsets = np.arange(0, tokens + 1, objective.raw_length, dtype=np.int64)
    if split == "validation" and objective.accepts(tokens - int(offsets[-1])):
        offsets = np.append(offsets, tokens)
    return offsets


def block_rows(block: Block, name: str, offsets: str, chosen: np.ndarray) -> Padded:
    """The `chosen` rows (n,) of a flat array of a block."""
    starts, lengths = block[offsets][:-1][chosen], np.diff(block[offsets])[chosen]
    flat, longest = block[name], int(lengths.max(initial=0))
    places = starts[:, None] + np.arange(longest)
    if (lengths == longest).all():
        return Padded(flat[places], lengths)
    rows = Padded(flat[np.minimum(places, len(flat) - 1)], lengths)
    rows.values[~rows.filled] = 0
    return rows


def _raw(flat: np.ndarray, offsets: np.ndarray, documents: np.ndarray) -> Block:
    inside = documents[(documents >= 0) & (documents < len(flat))]
    return {"tokens": flat, "row_offsets": offsets, "document_offsets": inside}


def _corrupted(
    objective: Objective,
    flat: np.ndarray,
    offsets: np.ndarray,
    first_row: int,
    spec: dict[str, Any],
    vocabulary: Vocabulary,
) -> Block:
    chosen = np.arange(len(offsets) - 1)
    rows = block_rows({"tokens": flat, "row_offsets": offsets}, "tokens", "row_offsets", chosen)
    keys = noise_keys(spec["seed"], spec["split"], 0, first_row + chosen)
    examples = objective.apply(rows, keys, vocabulary, {})
    block: Block = {}
    for name, side in (("input", examples.inputs), ("target", examples.targets)):
        block[f"{name}s"] = side.values[side.filled]
        block[f"{name}_offsets"] = np.append(0, np.cumsum(side.lengths)).astype(np.int64)
    return block


def _as_members(block: Block) -> dict[str, np.ndarray]:
    return {f"{name}.npy": values for name, values in block.items()}


def _add_checksums(path: Path, blocks: list[dict[str, Any]]) -> None:
    with path.open("rb") as file:
        for block in blocks:
            file.seek(block["offset"])
            block["sha256"] = hashlib.sha256(file.read(block["length"])).hexdigest()
