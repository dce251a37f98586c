"""What came in, what each rule dropped, and the speed of each stage: report.json and report.md."""

import json
from pathlib import Path
from typing import Any

from data_pipeline.atomic import write_bytes, write_json
from data_pipeline.work_units import Finished


def write(corpus: Path, name: str, stages: dict[str, list[Finished]]) -> dict[str, Any]:
    """Writes report.json and report.md of a finished build; returns the former."""
    documents = [unit.result for unit in stages["documents"]]
    splits: dict[str, dict[str, int]] = {}
    for unit in stages["shards"]:
        split = splits.setdefault(
            unit.result["split"], {"rows": 0, "tokens": 0, "shards": 0, "documents": 0, "dropped_tokens": 0}
        )
        split["shards"] += 1
        for count in ("rows", "tokens", "documents", "dropped_tokens"):
            split[count] += unit.result[count]
    dropped: dict[str, int] = {}
    for result in documents:
        for rule, count in result["dropped"].items():
            dropped[rule] = dropped.get(rule, 0) + count
    report = {
        "documents": {
            "read": sum(result["read"] for result in documents),
            "kept": sum(sum(result["documents"].values()) for result in documents),
            "dropped": dict(sorted(dropped.items())),
        },
        "inputs": [
            {
                "path": f"{result['source']}/{result['file']}",
                "bytes": result["bytes"],
                "documents": sum(result["documents"].values()),
                "status": result["status"],
                "reason": result["reason"],
            }
            for result in documents
        ],
        "splits": splits,
        "stages": [_speed(stage, units, documents) for stage, units in stages.items()],
    }
    write_json(corpus / "report.json", report)
    write_bytes(corpus / "report.md", as_markdown(name, report).encode())
    return report


def read(corpus: Path) -> dict[str, Any]:
    return json.loads((corpus / "report.json").read_text())


def _speed(stage: str, units: list[Finished], documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Megabytes are those of the input files for the documents stage and of the text for all others."""
    size = sum(result["bytes" if stage == "documents" else "text_bytes"] for result in documents) / 1e6
    seconds = sum(unit.seconds for unit in units)
    return {
        "name": stage,
        "megabytes": round(size, 3),
        "core_seconds": round(seconds, 1),
        "megabytes_per_core_second": round(size / seconds, 3) if seconds else None,
    }


def as_markdown(name: str, report: dict[str, Any]) -> str:
    documents = report["documents"]
    lines = [f"# Corpus {name}", "", f"{documents['kept']:,} of {documents['read']:,} documents kept.", ""]
    lines += _table(["dropped because", "documents"], [[rule, f"{n:,}"] for rule, n in documents["dropped"].items()])
    lines += _table(
        ["split", "documents", "rows", "tokens", "tokens in dropped tails", "shards"],
        [
            [split, *(f"{counts[key]:,}" for key in ("documents", "rows", "tokens", "dropped_tokens", "shards"))]
            for split, counts in report["splits"].items()
        ],
    )
    lines += _table(
        ["input", "MB", "documents", "status"],
        [
            [
                entry["path"],
                f"{entry['bytes'] / 1e6:.1f}",
                f"{entry['documents']:,}",
                f"{entry['status']} {entry['reason']}",
            ]
            for entry in report["inputs"]
        ],
    )
    lines += _table(
        ["stage", "MB", "core-seconds", "MB per core-second"],
        [[str(stage[key]) for key in stage] for stage in report["stages"]],
    )
    return "\n".join(lines)


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(header) + " |",
        "|" + " --- |" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]
