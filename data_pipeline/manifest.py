"""The manifest of a built corpus: shards, blocks, counts, checksums and lineage."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.config import CorpusConfig
from data_pipeline.corpus.corpus import DOCUMENTS, FORMAT_VERSION
from data_pipeline.foundation.atomic import atomic_path, fingerprint, sha256, write_json
from data_pipeline.foundation.code_version import code_version
from data_pipeline.foundation.json_file import read_sound_json
from data_pipeline.foundation.secrets import masked_values
from data_pipeline.sources import OPTIONS
from data_pipeline.stages.built import Built
from data_pipeline.tokenizer import load

SETTINGS = ".stages/config.json"
_BLOCK_SCHEMA = pa.schema(
    [
        ("split", pa.string()),
        ("shard", pa.string()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("first_row", pa.int64()),
        ("rows", pa.int64()),
        ("tokens", pa.int64()),
        ("sha256", pa.string()),
    ]
)


def write(config: CorpusConfig, corpus: Path, built: Built) -> None:
    """Writes blocks.parquet, then manifest.json, which completes the corpus."""
    tokenizer = load(corpus, config.tokenizer.layout)
    rows = {**config.rows.model_dump(), "raw_length": config.rows.objective.raw_length}
    splits: dict[str, dict[str, Any]] = {}
    blocks = []
    for unit in built.shards:
        shard = unit.result
        split = splits.setdefault(shard.split, {"rows": 0, "tokens": 0, "documents": 0, "shards": []})
        split["rows"] += shard.rows
        split["tokens"] += shard.tokens
        split["documents"] += shard.documents
        ((name, output),) = unit.outputs.items()
        split["shards"].append({"name": name, "rows": shard.rows, **asdict(output)})
        blocks += [{"split": shard.split, "shard": name, **asdict(block)} for block in shard.blocks]
    with atomic_path(corpus / "blocks.parquet") as path:
        pq.write_table(pa.Table.from_pylist(blocks, _BLOCK_SCHEMA), path)
    identity = {
        "tokenizer": [tokenizer.sha256, config.tokenizer.layout],
        "rows": rows,
        "seed": config.seed,
        "shards": [checksum for unit in built.shards for checksum in unit.checksums],
    }
    write_json(
        corpus / "manifest.json",
        {
            "format_version": FORMAT_VERSION,
            "name": config.name,
            "fingerprint": fingerprint(identity),
            "seed": config.seed,
            "tokenizer": tokenizer.describe(),
            "rows": rows,
            "splits": splits,
            "inputs": [
                {
                    "source": unit.result.source,
                    "file": of.file,
                    "bytes": of.bytes,
                    "sha256": of.sha256,
                    "status": of.status,
                }
                for unit in built.documents
                for of in unit.result.inputs
                if of.range.start == 0
            ],
            "config": lineage(config),
            "documents": [
                {"name": name, **asdict(output)}
                for unit in (*built.documents, *built.deduplicated)
                for name, output in unit.outputs.items()
                if name.startswith(DOCUMENTS)
            ],
            "blocks": {"file": "blocks.parquet", "sha256": sha256(corpus / "blocks.parquet")},
            "code_version": code_version(),
        },
        sealed=True,
    )


def write_settings(config: CorpusConfig, corpus: Path) -> None:
    """Writes the settings with the paths of the sources, for commands that read the sources again.

    The file is the build's own, below `.stages`: no copy of a corpus needs it. Passwords in URLs are left out.
    """
    settings = config.model_dump(mode="json", exclude_unset=True)
    for source, given in zip(settings["sources"], config.sources, strict=True):
        source["path"] = _absolute(given.path)
    for given_set, of in zip(
        settings.get("decontamination", {}).get("sets", []), config.decontamination.sets, strict=False
    ):
        given_set["path"] = _absolute(of.path)
    settings = masked_values({**settings, "output": str(corpus.absolute())})
    if read_sound_json(corpus / SETTINGS, dict[str, Any]) != settings:
        write_json(corpus / SETTINGS, settings)


def _absolute(path: str | list[str]) -> list[str]:
    found = [path] if isinstance(path, str) else path
    return [one if "://" in one else str(Path(one).absolute()) for one in found]


def lineage(config: CorpusConfig) -> dict[str, Any]:
    """The settings that the documents, the tokenizer and the shards were made with, defaults included, as in JSON.

    It has no paths: the manifest's `inputs` list the files that were read, by name and checksum.
    """
    settings = {
        "sources": [
            {
                **source.model_dump(include={"name", "format", "language"}),
                "options": OPTIONS[source.format].model_validate(source.options).model_dump(),
                "cleaning": config.cleaning_of(source).described(),
            }
            for source in config.sources
        ],
        "dedup": config.dedup.model_dump(),
        "decontamination": config.decontamination.model_dump(exclude={"sets": {"__all__": {"path"}}}),
        "split": config.split.model_dump(),
        "tokenizer": config.tokenizer.model_dump(exclude={"path", "dictionary"}),
        "shards": config.shards.model_dump(),
        "bytes_per_shared_unit": config.bytes_per_shared_unit,
        "bytes_per_unit": config.bytes_per_unit,
        "characters_per_part": config.characters_per_part,
    }
    as_json: dict[str, Any] = json.loads(json.dumps(settings))  # keys are text, so that it equals what is read back
    return as_json
