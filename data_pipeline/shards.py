"""The shards stage: each bucket of tokens becomes one WebDataset tar of blocks of rows.

A tar sample is a block: flat token arrays with row offsets. Its key is the row id of its first row. `decode_block` is
the one reader of a block's bytes.
"""

import hashlib
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline import tokenizer
from data_pipeline.atomic import atomic_file, fingerprint
from data_pipeline.config import CorpusConfig, RowsConfig
from data_pipeline.objectives.randomness import row_keys
from data_pipeline.rows import SPLITS, Bucket, count_tokens, read_bucket
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
        rows = count_tokens(corpus, files, buckets) // config.rows.objective.raw_length
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
                "sentinels": config.tokenizer.sentinels,
            }
            spec = {**settings, "files": files, "output": output}
            name = f"{split}-{bucket.number:05d}"
            units.append(Unit(name, spec, fingerprint([settings, checksums, trained.checksums]), (output,)))
    return units


def write_shard(corpus: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Cuts one bucket into rows and writes them; returns the shard's blocks and counts."""
    import webdataset  # imports torch, which readers of a manifest don't need

    settings = RowsConfig.model_validate(spec["rows"])
    length = settings.objective.raw_length
    tokens, documents = read_bucket(corpus, spec["files"], Bucket(spec["split"], spec["bucket"], spec["buckets"]))
    rows = len(tokens) // length
    used = tokens[: rows * length]
    model = tokenizer.load(corpus, spec["sentinels"])
    blocks: list[dict[str, Any]] = []
    path = corpus / spec["output"]
    with atomic_file(path) as file:
        with webdataset.TarWriter(file, mtime=0) as writer:
            for start in range(0, rows, spec["rows_per_block"]):
                count = min(spec["rows_per_block"], rows - start)
                flat = used[start * length : (start + count) * length]
                first_row = spec["first_row"] + start
                if settings.apply_at == "build":
                    block = _corrupted(settings, flat, first_row, spec, model)
                else:
                    block = _raw(length, flat, documents - start * length)
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


STAGE = Stage("shards", 1, write_shard)


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


def block_rows(block: Block, name: str, offsets: str, chosen: Sequence[int] | np.ndarray) -> np.ndarray:
    """(n, length): the `chosen` rows of a flat array whose rows are equally long."""
    length = int(block[offsets][1] - block[offsets][0])
    return block[name].reshape(-1, length)[chosen]


def _raw(length: int, flat: np.ndarray, documents: np.ndarray) -> Block:
    inside = documents[(documents >= 0) & (documents < len(flat))]
    return {"tokens": flat, "row_offsets": _offsets(len(flat), length), "document_offsets": inside}


def _corrupted(settings: RowsConfig, flat: np.ndarray, first_row: int, spec: dict, model: tokenizer.Tokenizer) -> Block:
    rows = flat.reshape(-1, settings.objective.raw_length)
    keys = noise_keys(spec["seed"], spec["split"], 0, np.arange(first_row, first_row + len(rows)))
    inputs, targets = settings.objective.apply(rows, keys, model.first_sentinel, tokenizer.EOS)
    return {
        "inputs": inputs.reshape(-1),
        "input_offsets": _offsets(inputs.size, inputs.shape[1]),
        "targets": targets.reshape(-1),
        "target_offsets": _offsets(targets.size, targets.shape[1]),
    }


def _offsets(size: int, length: int) -> np.ndarray:
    return np.arange(0, size + 1, length, dtype=np.int64)


def _as_members(block: Block) -> dict[str, np.ndarray]:
    return {f"{name}.npy": values for name, values in block.items()}


def _add_checksums(path: Path, blocks: list[dict[str, Any]]) -> None:
    with path.open("rb") as file:
        for block in blocks:
            file.seek(block["offset"])
            block["sha256"] = hashlib.sha256(file.read(block["length"])).hexdigest()
