"""What came in, what each rule dropped, and the speed of each stage: report.json and report.md."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from data_pipeline.execution.work_units import Finished
from data_pipeline.foundation.atomic import write_bytes, write_json
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.progress import counted
from data_pipeline.text.tally import EXAMPLES

Json = dict[str, Any]
FILE, FOR_PEOPLE = "report.json", "report.md"
# counted, but no reason to drop anything
_NO_RULES = {"read", "passed", "undecodable", "truncated_xml"}
_LINE, _SPAN = "line_", "span_"
_BAR = 40


def write(corpus: Path, name: str, stages: dict[str, list[Finished]]) -> Json:
    """Writes report.json and report.md for the finished `stages`; returns the content of report.json."""
    documents = [unit.result for unit in stages["documents"]]
    deduplicated = [unit.result for unit in stages.get("deduplicated", [])]
    left = deduplicated or documents
    counts = _sum(result["counts"] for result in documents + deduplicated)
    rules = {rule: n for rule, n in counts.items() if rule not in _NO_RULES}
    report = {
        "name": name,
        "documents": {
            "read": counts["read"],
            "kept": sum(sum(result["documents"].values()) for result in left),
            "dropped": {rule: n for rule, n in rules.items() if not rule.startswith((_LINE, _SPAN))},
        },
        "lines": {"read": _lines_read(counts), "dropped": _of_kind(_LINE, rules)},
        "spans": {"dropped": _of_kind(_SPAN, rules)},
        "undecodable_documents": counts["undecodable"],
        "examples": _examples(documents + deduplicated),
        "lengths": dict(sorted(_sum(result["lengths"] for result in left).items(), key=lambda item: int(item[0]))),
        "languages": _most_common(result["languages"] for result in left),
        "domains": _most_common(result["domains"] for result in left),
        "inputs": [_input(result) for result in documents],
        "pieces": sum(unit.result["pieces"] for unit in stages.get("tokenizer", [])),
        "splits": _splits(stages.get("shards", [])),
        "tokenizer_sample": next((unit.result["sample"] for unit in stages.get("tokenizer", [])), {}),
        "stages": [
            _speed(stage, units, left if stage in ("tokenizer", "tokens", "rows", "shards") else documents)
            for stage, units in stages.items()
            if units
        ],
    }
    write_json(corpus / FILE, report)
    write_bytes(corpus / FOR_PEOPLE, as_markdown(report).encode())
    return report


def read(corpus: Path) -> Json:
    """The content of report.json. Raises UserError if the file is missing, FailedError if it is damaged."""
    path = corpus / FILE
    try:
        report = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; write it with data-pipeline clean, tokenizer or build") from None
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from None
    except ValueError:
        report = None
    if not isinstance(report, dict) or "documents" not in report:
        raise FailedError(f"{path}: damaged; rewrite it with data-pipeline build CORPUS.yaml --repair")
    return {"name": corpus.resolve().name, **report}  # reports of old builds have no name


def summary(report: Json) -> str:
    """One line: how many documents were kept, and how many each rule dropped."""
    documents = report["documents"]
    line = f"documents: {documents['kept']:,} of {documents['read']:,} kept"
    dropped = sum(documents["dropped"].values())
    return line + (f", {dropped:,} dropped: {_rules(documents['dropped'])}" if dropped else "")


def why_nothing_is_left(report: Json) -> str:
    """One line: which rules dropped all documents, and which rules dropped lines."""
    documents, lines = report["documents"], report["lines"]["dropped"]
    if documents["kept"]:
        held_out = counted(documents["kept"], "document")
        return f"no document for training: {held_out} left, all held out (split.validation_fraction)"
    if not documents["read"]:
        return "no document was read from the sources"
    reason = f"no document is left of {documents['read']:,} read; dropped: {_rules(documents['dropped'])}"
    return reason + (f"; lines dropped: {_rules(lines)}" if lines else "")


def _rules(dropped: dict[str, int]) -> str:
    """Counts by rule, the largest first."""
    return ", ".join(f"{rule} {n:,}" for rule, n in sorted(dropped.items(), key=lambda item: (-item[1], item[0])))


def as_markdown(report: Json) -> str:
    """The report for people: tables, three examples of what each rule dropped, histograms."""
    documents, lines = report["documents"], report["lines"]
    parts = [f"# Corpus {report['name']}", f"{documents['kept']:,} of {documents['read']:,} documents kept."]
    parts += _dropped("documents", documents, report["examples"], prefix="")
    parts += _dropped("lines", lines, report["examples"], prefix=_LINE)
    if report["splits"]:
        columns = ("documents", "rows", "tokens", "dropped_tokens", "shards")
        splits = [[split, *(f"{counts[key]:,}" for key in columns)] for split, counts in report["splits"].items()]
        header = ["split", "documents", "rows", "tokens", "tokens in dropped tails", "shards"]
        parts += ["## Splits", _table(header, splits)]
    parts += [
        "## Lengths of documents, in characters",
        _histogram({f"{2 ** int(power):,}–{2 ** (int(power) + 1) - 1:,}": n for power, n in report["lengths"].items()}),
        "## Languages",
        _histogram(report["languages"]),
    ]
    if report["domains"]:
        parts += ["## Domains", _histogram(report["domains"])]
    parts += [
        "## Inputs",
        _table(
            ["input", "MB", "documents", "status"],
            [
                [entry["path"], f"{entry['bytes'] / 1e6:.1f}", f"{entry['documents']:,}", _status(entry)]
                for entry in report["inputs"]
            ],
        ),
        "## Speed",
        _table(
            ["stage", "MB", "core-seconds", "MB per core-second"],
            [[str(stage[key]) for key in stage] for stage in report["stages"]],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _of_kind(prefix: str, rules: dict[str, int]) -> dict[str, int]:
    """How many lines or spans each rule dropped. line_passed and line_seen are counts, not rules."""
    kind = {rule.removeprefix(prefix): n for rule, n in rules.items() if rule.startswith(prefix)}
    return {rule: n for rule, n in kind.items() if rule not in ("passed", "seen")}


def _lines_read(counts: Counter[str]) -> int:
    """Lines that cleaning checked or, if it has no rules for lines, that deduplication checked."""
    cleaned = sum(n for rule, n in counts.items() if rule.startswith(_LINE))
    again = counts["line_seen"] + counts["line_duplicate_line"]
    return cleaned - again or counts["line_seen"]


def _sum(counts: Any) -> Counter[str]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return Counter(dict(sorted(total.items())))


def _most_common(counts: Any, number: int = 20) -> dict[str, int]:
    """The most frequent keys, sorted by count and then by name."""
    return dict(sorted(_sum(counts).items(), key=lambda item: (-item[1], item[0]))[:number])


def _examples(documents: list[dict[str, Any]]) -> dict[str, list[str]]:
    examples: dict[str, list[str]] = {}
    for result in documents:
        for rule, found in result["examples"].items():
            kept = examples.setdefault(rule, [])
            kept += found[: EXAMPLES - len(kept)]
    return dict(sorted(examples.items()))


def _input(result: dict[str, Any]) -> dict[str, Any]:
    start, stop, _ = result["range"]
    part = f" from byte {start}" if start or stop else ""
    damage = [{"position": position, "reason": reason} for position, reason in result["damage"]]
    return {
        "path": f"{result['source']}/{result['file']}{part}",
        "bytes": result.get("bytes", 0),
        "documents": sum(result["documents"].values()),
        "status": result["status"],
        "reason": f"{damage[0]['position']}: {damage[0]['reason']}" if damage else "",
        "damage": damage,
    }


def _splits(shards: list[Finished]) -> dict[str, dict[str, int]]:
    splits: dict[str, dict[str, int]] = {}
    for unit in shards:
        split = splits.setdefault(
            unit.result["split"], {"rows": 0, "tokens": 0, "shards": 0, "documents": 0, "dropped_tokens": 0}
        )
        split["shards"] += 1
        for count in ("rows", "tokens", "documents", "dropped_tokens"):
            split[count] += unit.result[count]
    return splits


def _speed(stage: str, units: list[Finished], documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Megabytes count the input files for the documents stage, and the text for all other stages."""
    size = sum(result.get("bytes", 0) if stage == "documents" else result["text_bytes"] for result in documents) / 1e6
    seconds = sum(unit.seconds for unit in units)
    return {
        "name": stage,
        "megabytes": round(size, 3),
        "core_seconds": round(seconds, 1),
        "megabytes_per_core_second": round(size / seconds, 3) if seconds else None,
    }


def _dropped(what: str, counts: dict[str, Any], examples: dict[str, list[str]], prefix: str) -> list[str]:
    if not counts["dropped"]:
        return []
    rows = [
        [rule, f"{n:,}", f"{n / counts['read']:.2%}", "<br>".join(map(_cell, examples.get(prefix + rule, [])))]
        for rule, n in sorted(counts["dropped"].items(), key=lambda item: -item[1])
    ]
    return [f"## Dropped {what}", _table(["rule", what, "share", "examples"], rows)]


def _status(entry: dict[str, Any]) -> str:
    more = f" (and {len(entry['damage']) - 1} more)" if len(entry["damage"]) > 1 else ""
    return f"{entry['status']} {_cell(entry['reason'])}{more}".strip()


def _cell(text: str) -> str:
    """`text`, escaped for a Markdown table cell."""
    for character in "\\`*_[]<>|#":
        text = text.replace(character, "\\" + character)
    return text


def _histogram(counts: dict[str, int]) -> str:
    most = max(counts.values(), default=1)
    rows = [[key, f"{n:,}", "█" * round(_BAR * n / most)] for key, n in counts.items()]
    return _table(["", "documents", ""], rows)


def _table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(
        [
            "| " + " | ".join(header) + " |",
            "|" + " --- |" * len(header),
            *("| " + " | ".join(row) + " |" for row in rows),
        ]
    )
