"""What came in, what each rule dropped, and the speed of each stage: report.json, report.md and report.html."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_pipeline.execution import timing
from data_pipeline.execution.parts import PartsResult
from data_pipeline.execution.work_units import Finished, Result
from data_pipeline.foundation.atomic import write_bytes, write_json
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.progress import counted
from data_pipeline.report_page import as_html, named
from data_pipeline.stages.built import Built
from data_pipeline.stages.deduplication import DecontaminationResult
from data_pipeline.stages.documents import DocumentsResult, InputResult
from data_pipeline.stages.evaluation_sets import EvaluationSetsResult
from data_pipeline.stages.shards import ShardResult
from data_pipeline.stages.tokens import TokensResult
from data_pipeline.text.tally import NO_RULES, most_common, smallest

Json = dict[str, Any]
FILE, FOR_PEOPLE, PAGE = "report.json", "report.md", "report.html"
_LINE, _SPAN, _MASKED = "line_", "span_", "masked_"
_NO_DOCUMENTS = (_LINE, _SPAN, _MASKED)
_BAR = 40


def write(corpus: Path, name: str, built: Built) -> Json:
    """Writes the three files for the stages that have run; returns the content of report.json."""
    documents = [unit.result for unit in built.documents]
    left = [unit.result for unit in built.left]
    cleaned = [unit.result for unit in (*built.documents, *built.deduplicated)]
    counts = _sum(result.counts for result in cleaned)
    # The stage of documents works on the input files, and all others on the text.
    input_bytes = sum(result.bytes for result in documents)
    text_read, text_left = (sum(result.text_bytes for result in results) for results in (documents, left))
    of_corpus = ("tokenizer-sample", "tokenizer", "tokens", *built.merged, "rows", "shards")
    sizes = {"documents": input_bytes} | dict.fromkeys(of_corpus, text_left)
    evaluation_sets = _evaluation_sets([unit.result for units in built.steps.values() for unit in units])
    sizes["evaluation-sets"] = sum(own["bytes"] for own in evaluation_sets.values())
    rules = {rule: n for rule, n in counts.items() if rule not in NO_RULES}
    report = {
        "name": name,
        "documents": {
            "read": counts["read"],
            "kept": sum(sum(result.documents.values()) for result in left),
            "dropped": {rule: n for rule, n in rules.items() if not rule.startswith(_NO_DOCUMENTS)},
        },
        "lines": {"read": _lines_read(counts), "dropped": _of_kind(_LINE, rules)},
        "spans": {"dropped": _of_kind(_SPAN, rules), "substring_words": counts["substring_words"]},
        "masked": _of_kind(_MASKED, rules),
        "template_holes": _most_common(result.template_holes for result in documents),
        "evaluation_sets": evaluation_sets,
        "undecodable_documents": counts["undecodable"],
        "examples": _examples(cleaned),
        "lengths": _by_power(result.lengths for result in left),
        "token_lengths": _by_power(unit.result.lengths for unit in built.tokens),
        "coverage": _coverage([unit.result for unit in built.tokens]),
        "languages": _most_common(result.languages for result in left),
        "domains": _most_common(result.domains for result in left),
        "sources": _sources(documents, left, [unit.result for unit in built.deduplicated]),
        "inputs": [_input(result.source, of) for result in documents for of in result.inputs],
        "pieces": sum(unit.result.pieces for unit in built.tokenizer),
        "splits": _splits([unit.result for unit in built.shards]),
        "tokenizer_sample": next(
            (asdict(unit.result.sample) for unit in built.tokenizer if unit.result.sample.documents), {}
        ),
        "stages": [
            _speed(stage, units, sizes.get(stage, text_read)) | _times(corpus, stage)
            for stage, units in built.by_stage.items()
        ],
    }
    pages = {FOR_PEOPLE: as_markdown(report).encode(), PAGE: as_html(report).encode()}
    for file, content in pages.items():
        write_bytes(corpus / file, content)
    report["files"] = {file: hashlib.sha256(content).hexdigest() for file, content in pages.items()}
    write_json(corpus / FILE, report, sealed=True)
    return report


def read(corpus: Path) -> Json:
    """The content of report.json. Raises UserError if the file is missing, FailedError if it is damaged."""
    path = corpus / FILE
    try:
        report = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; write it with data-pipeline documents, tokenizer or build") from None
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from None
    except ValueError:
        report = None
    if not isinstance(report, dict) or "documents" not in report:
        raise FailedError(f"{path}: damaged; rewrite it with data-pipeline build CORPUS.yaml --repair")
    return {"name": corpus.resolve().name, **report}  # reports of old builds have no name


def summary(report: Json) -> str:
    """One line: how many files and documents were read, how many were kept, and how many each rule dropped."""
    documents = report["documents"]
    files = sum(source["inputs"] for source in report["sources"].values())
    line = f"documents: {counted(files, 'file')} → {counted(documents['read'], 'document')}, {documents['kept']:,} kept"
    dropped = sum(documents["dropped"].values())
    return line + (f", {dropped:,} dropped: {_rules(documents['dropped'])}" if dropped else "")


def coverage(report: Json) -> str:
    """One line: how many tokens are unknown or bytes, and the characters behind most of them; "" before tokens."""
    if not (found := report.get("coverage")):
        return ""
    tokens, unknown, in_bytes = (found[key] for key in ("tokens", "unknown", "bytes"))
    if not unknown + in_bytes:
        return f"tokens: {tokens:,}, none of them unknown or a byte of a character without a token"
    shown = ", ".join(f"{named(character)} {n:,}" for character, n in found["characters"].items())
    return (
        f"tokens: {tokens:,}, {unknown:,} of them unknown ({unknown / tokens:.3%}) and {in_bytes:,} bytes "
        f"({in_bytes / tokens:.3%}) of characters without a token, most often {shown}"
    )


def cut_pairs(report: Json) -> list[str]:
    """One line for each split in which inputs or targets of pairs are longer than the objective allows."""
    return [
        f"warning: {split}: {counts['cut_inputs']:,} inputs and {counts['cut_targets']:,} targets of "
        f"{counts['documents']:,} pairs are longer than rows.objective allows (inputs_length, targets_length) "
        "and lost their end"
        for split, counts in report["splits"].items()
        if counts.get("cut_inputs") or counts.get("cut_targets")
    ]


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
    parts += _dropped("spans", {"read": 0, **report["spans"]}, report["examples"], prefix=_SPAN)
    if report["evaluation_sets"]:
        columns = ("items", "too_short", "found", "share", "documents_dropped")
        header = ["set", "items", "too short to look for", "found in the text", "share", "documents dropped for them"]
        found = [
            [_cell(name), *(f"{own[key]:.2%}" if key == "share" else f"{own[key]:,}" for key in columns)]
            for name, own in report["evaluation_sets"].items()
        ]
        parts += ["## Evaluation sets", _table(header, found)]
    if masked := report.get("masked"):
        parts += [
            "## Masked personal data",
            _table(["kind", "places"], [[kind, f"{n:,}"] for kind, n in masked.items()]),
        ]
    if holes := report.get("template_holes"):
        parts += [
            "## Templates that left a hole in a sentence",
            _table(["template", "places"], [[_cell(name), f"{n:,}"] for name, n in holes.items()]),
        ]
    if report["splits"]:
        columns = ("documents", "rows", "tokens", "dropped_tokens", "shards")
        splits = [[split, *(f"{counts[key]:,}" for key in columns)] for split, counts in report["splits"].items()]
        header = ["split", "documents", "rows", "tokens", "tokens in dropped tails", "shards"]
        parts += ["## Splits", _table(header, splits), *cut_pairs(report)]
    if told := coverage(report):
        characters = report["coverage"]["characters"]
        rows = [[_cell(named(one)), f"U+{ord(one):04X}", f"{n:,}"] for one, n in characters.items()]
        parts += ["## Characters without a token", f"{_cell(told[:1].upper() + told[1:])}."]
        parts += [_table(["character", "code point", "times"], rows)] if rows else []
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
            [
                [str(stage[key]) for key in ("name", "megabytes", "core_seconds", "megabytes_per_core_second")]
                for stage in report["stages"]
            ],
        ),
    ]
    if timed := [stage for stage in report["stages"] if "seconds" in stage]:
        keys = ("seconds", "workers", "core_seconds", "idle_seconds", "ray_start_seconds", "driver_core_seconds")
        header = ["stage", "seconds", "workers", "core-seconds of units", "idle", "Ray's start", "driver"]
        sums = [f"{sum(stage[key] for stage in timed):.1f}" if key != "workers" else "" for key in keys]
        rows = [[stage["name"], *(str(stage[key]) for key in keys)] for stage in timed]
        parts += [
            "## Where the time went",
            "In seconds, of each stage's last run that had units to do. Idle: workers without a unit, added up. "
            "Driver: its time of the processor.",
            _table(header, [*rows, ["together", *sums]]),
        ]
    return "\n\n".join(parts) + "\n"


def _of_kind(prefix: str, rules: dict[str, int]) -> dict[str, int]:
    """How many lines or spans each rule dropped, or how often each kind of personal data was masked."""
    return {rule.removeprefix(prefix): n for rule, n in rules.items() if rule.startswith(prefix)}


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


def _coverage(parts: Sequence[TokensResult]) -> Json:
    """Tokens in all, unknown ones and bytes, and the ten most frequent characters behind these."""
    if not any(part.uncovered for part in parts):  # not yet, or by an earlier version
        return {}
    uncovered = _sum(part.uncovered for part in parts)
    return {
        "tokens": sum(sum(part.tokens.values()) for part in parts),
        **{key: uncovered[key] for key in ("unknown", "bytes")},
        "characters": _most_common((part.characters for part in parts), 10),
    }


def _most_common(counts: Any, number: int = 20) -> dict[str, int]:
    """The most frequent keys of several counts, added."""
    return most_common(_sum(counts), number)


def _examples(results: Sequence[PartsResult]) -> dict[str, list[str]]:
    """For each rule, three texts that it dropped, with single spaces."""
    examples: dict[str, list[str]] = {}
    for result in results:
        for rule, found in result.examples.items():
            examples[rule] = smallest([*examples.get(rule, []), *found])
    return {rule: [" ".join(text.split()) for text in texts] for rule, texts in sorted(examples.items())}


def _sources(
    documents: list[DocumentsResult], left: Sequence[PartsResult], deduplicated: list[PartsResult]
) -> dict[str, Json]:
    """For each source: its inputs, and its documents as in the whole report."""
    sources: dict[str, Json] = {}
    for name in dict.fromkeys(result.source for result in documents):
        own = [result for result in documents if result.source == name]
        later = [result for result in deduplicated if result.parts[0].source == name]
        kept = [result for result in left if result.parts[0].source == name]
        counts = _sum(result.counts for result in (*own, *later))
        sources[name] = {
            "inputs": sum(of.range.start == 0 for result in own for of in result.inputs),
            "bytes": sum(result.bytes for result in own),
            "text_read_bytes": sum(result.text_bytes for result in own),
            "text_bytes": sum(result.text_bytes for result in kept),
            "read": counts["read"],
            "kept": sum(sum(result.documents.values()) for result in kept),
            "dropped": {
                rule: n for rule, n in counts.items() if rule not in NO_RULES and not rule.startswith(_NO_DOCUMENTS)
            },
            "lengths": _by_power(result.lengths for result in kept),
            "languages": _most_common(result.languages for result in kept),
        }
    return sources


def _evaluation_sets(results: Sequence[Result]) -> dict[str, Json]:
    """For each evaluation set: its items, those too short to look for, those found, the documents dropped for them."""
    searched = [result for result in results if isinstance(result, DecontaminationResult)]
    sets: dict[str, Json] = {}
    for of in (of for result in results if isinstance(result, EvaluationSetsResult) for of in result.sets):
        found = {item for result in searched for item in result.found.get(of.name, [])}
        sets[of.name] = {
            "bytes": of.bytes,
            "items": of.items,
            "too_short": of.too_short,
            "found": len(found),
            "share": round(len(found) / of.items, 6),
            "documents_dropped": sum(result.documents.get(of.name, 0) for result in searched),
        }
    return sets


def _by_power(counts: Any) -> dict[str, int]:
    """Histograms by powers of two, added."""
    return dict(sorted(_sum(counts).items(), key=lambda item: int(item[0])))


def _input(source: str, result: InputResult) -> Json:
    start, stop, _ = result.range
    part = f" from byte {start}" if start or stop else ""
    return {
        "path": f"{source}/{result.file}{part}",
        "bytes": result.bytes,
        "documents": result.documents,
        "status": result.status,
        "reason": ": ".join(result.damage[0]) if result.damage else "",
        "damage": [damage._asdict() for damage in result.damage],
    }


def _splits(shards: list[ShardResult]) -> dict[str, dict[str, int]]:
    splits: dict[str, dict[str, int]] = {}
    for shard in shards:
        split = splits.setdefault(
            shard.split,
            {"rows": 0, "tokens": 0, "shards": 0, "documents": 0, "dropped_tokens": 0}
            | {"cut_inputs": 0, "cut_targets": 0},
        )
        split["rows"] += shard.rows
        split["tokens"] += shard.tokens
        split["shards"] += 1
        split["documents"] += shard.documents
        split["dropped_tokens"] += shard.dropped_tokens
        split["cut_inputs"] += shard.cut_inputs
        split["cut_targets"] += shard.cut_targets
    return splits


def _speed(stage: str, units: Sequence[Finished[Result]], size: int) -> Json:
    """`size`: the bytes that the stage worked on."""
    megabytes, seconds = size / 1e6, sum(unit.seconds for unit in units)
    written = sum(output.bytes for unit in units for output in unit.outputs.values())
    return {
        "name": stage,
        "megabytes": round(megabytes, 3),
        "core_seconds": round(seconds, 1),
        "megabytes_per_core_second": round(megabytes / seconds, 3) if seconds else None,
        "units": len(units),
        "written_megabytes": round(written / 1e6, 3),
    }


def _times(corpus: Path, stage: str) -> Json:
    """Where the wall time of the stage's last run went; the times of units are those of the processor."""
    found = timing.noted(corpus, stage)
    if found is None:
        return {}
    return {
        "seconds": round(found.seconds, 1),
        "workers": found.workers,
        "idle_seconds": round(found.idle, 1),
        "ray_start_seconds": round(found.waited, 1),
        "driver_core_seconds": round(found.driver, 1),
    }


def _dropped(what: str, counts: dict[str, Any], examples: dict[str, list[str]], prefix: str) -> list[str]:
    if not counts["dropped"]:
        return []
    rows = [
        [rule, f"{n:,}", _share(n, counts["read"]), "<br>".join(map(_cell, examples.get(prefix + rule, [])))]
        for rule, n in sorted(counts["dropped"].items(), key=lambda item: -item[1])
    ]
    return [f"## Dropped {what}", _table(["rule", what, "share", "examples"], rows)]


def _share(n: int, of: int) -> str:
    return f"{n / of:.2%}" if of else ""


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
