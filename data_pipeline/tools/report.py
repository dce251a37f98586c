"""The page of a corpus's report, in Markdown and in HTML, which reads nothing from the network."""

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from data_pipeline.foundation.formatting import markdown
from data_pipeline.report import HTML, LINE, MARKDOWN, SPAN, InputReport, Report, coverage, cut_pairs, visible
from data_pipeline.text.tally import most_common

_ROWS = 20  # the most rows of a chart
_BAR = 40  # characters of its longest bar
_INPUTS = 100  # the most inputs in the table
_MARKUP = re.compile(r"[\\`*\[\]<>|#]|(?<![^\W_])_|_(?![^\W_])")  # an underscore inside a word marks nothing
_STYLE = """
:root { color-scheme: light dark; } body { max-width: 1180px; margin: auto; padding: 24px;
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; } h2 { margin-top: 36px; font-size: 18px; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid #8884; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; } td:not(:first-child, :last-child) { white-space: nowrap; }
"""


def render(report: Report) -> dict[str, str]:
    """report.md and report.html by name."""
    from markdown_it import MarkdownIt  # slow to import

    title = f"Corpus {_escaped(report.name)}"
    lead = f"{report.documents.kept:,} of {report.documents.read:,} documents kept."
    page = "\n\n".join([f"# {title}", lead, *_tables(report)]) + "\n"
    body = MarkdownIt().enable("table").render(page)
    return {
        MARKDOWN: page,
        HTML: f"<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<title>{escape(report.name)}</title>\n"
        f"<style>{_STYLE}</style>\n{body}</html>\n",
    }


Cell = str | int | list[str]  # a list has example texts


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[Cell]], note: str = "") -> str:
    cells = [[_markdown(cell) for cell in row] for row in rows]
    table = ["\n".join(markdown(header, cells, numbers=False))] if rows else []
    return "\n\n".join([f"## {title}", *([_escaped(note)] if note else []), *table])


def _markdown(cell: Cell) -> str:
    if isinstance(cell, list):
        return "<br>".join(map(_escaped, cell))
    return f"{cell:,}" if isinstance(cell, int) else _escaped(cell)


def _escaped(text: str) -> str:
    return _MARKUP.sub(r"\\\g<0>", text)


def _bar(n: float, most: float) -> str:
    return "█" * round(_BAR * n / most) if most else ""


def _tables(report: Report) -> Iterator[str]:
    rows: list[list[Cell]]
    yield from _dropped("documents", report.documents.read, report.documents.dropped, report.examples, "")
    yield from _dropped("lines", report.lines.read, report.lines.dropped, report.examples, LINE)
    yield from _dropped("spans", 0, report.spans.dropped, report.examples, SPAN)
    if report.evaluation_sets:
        header = ["set", "items", "too short to look for", "found in the text", "share", "documents dropped for them"]
        rows = [
            [name, one.items, one.too_short, one.found, f"{one.share:.2%}", one.documents_dropped]
            for name, one in report.evaluation_sets.items()
        ]
        yield _table("Evaluation sets", header, rows)
    yield from _chart("Masked personal data", "kind", report.masked)
    yield from _chart("Templates that left a hole in a sentence", "template", report.template_holes)
    if report.splits:
        header = ["split", "documents", "rows", "tokens", "tokens in dropped tails", "shards"]
        rows = [
            [name, one.documents, one.rows, one.tokens, one.dropped_tokens, one.shards]
            for name, one in report.splits.items()
        ]
        yield _table("Splits", header, rows, " ".join(cut_pairs(report)))
    if report.coverage:
        note = coverage(report)
        rows = [
            [visible(one), f"U+{ord(one):04X}", n, _bar(n, max(report.coverage.characters.values()))]
            for one, n in report.coverage.characters.items()
        ]
        header = ["character", "code point", "times", ""]
        yield _table("Characters without a token", header, rows, f"{note[:1].upper()}{note[1:]}.")
    yield from _chart("Lengths of documents, in characters", "characters", _ranges(report.lengths))
    yield from _chart("Lengths of documents, in tokens", "tokens", _ranges(report.token_lengths))
    yield from _chart("Languages", "language", report.languages)
    yield from _chart("Domains", "domain", report.domains)
    yield from _sources(report)
    yield _inputs(report.inputs)
    yield from _speed(report)


def _dropped(
    what: str, read: int, dropped: Mapping[str, int], examples: Mapping[str, list[str]], prefix: str
) -> Iterator[str]:
    """How many each rule dropped, and a few of the texts."""
    if dropped:
        most = max(dropped.values())
        rows: list[list[Cell]] = [
            [rule, n, _share(n, read), _bar(n, most), [text for text in examples.get(prefix + rule, []) if text]]
            for rule, n in most_common(dropped, len(dropped)).items()
        ]
        yield _table(f"Dropped {what}", ["rule", what, "share", "", "examples"], rows)


def _share(n: int, total: int) -> str:
    return f"{n / total:.2%}" if total else ""


def _ranges(powers: Mapping[str, int]) -> dict[str, int]:
    """Counts by the range of lengths, without gaps."""
    span = range(min(map(int, powers)), max(map(int, powers)) + 1) if powers else ()
    return {f"{2**power:,}–{2 ** (power + 1) - 1:,}": powers.get(str(power), 0) for power in span}


def _chart(title: str, what: str, counts: Mapping[str, int]) -> Iterator[str]:
    """A bar for each key."""
    if counts:
        rows: list[list[Cell]] = [[key, n, _bar(n, max(counts.values()))] for key, n in list(counts.items())[:_ROWS]]
        yield _table(title, [what, "count", ""], rows)


def _sources(report: Report) -> Iterator[str]:
    """The sources and, if there are several, the distributions of each."""
    header = ["source", "inputs", "MB read", "documents read", "kept", "share", "MB of text kept"]
    rows: list[list[Cell]] = [
        [
            name,
            one.inputs,
            _megabytes(one.bytes),
            one.read,
            one.kept,
            _share(one.kept, one.read),
            _megabytes(one.text_bytes),
        ]
        for name, one in report.sources.items()
    ]
    yield _table("Sources", header, rows)
    for name, one in report.sources.items() if len(report.sources) > 1 else ():
        yield from _chart(f"{name}: lengths in characters", "characters", _ranges(one.lengths))
        yield from _chart(f"{name}: languages", "language", one.languages)
        yield from _chart(f"{name}: dropped documents", "rule", most_common(one.dropped, _ROWS))


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f}"


def _inputs(inputs: list[InputReport]) -> str:
    """The damaged inputs and the first others, as many as a page can show."""
    shown = sorted(inputs, key=lambda entry: entry.status == "ok")[:_INPUTS]
    rows: list[list[Cell]] = [[one.path, _megabytes(one.bytes), one.documents, _status(one)] for one in shown]
    more = f"And {len(inputs) - _INPUTS:,} more." if len(inputs) > _INPUTS else ""
    return _table("Inputs", ["input", "MB", "documents", "status"], rows, more)


def _status(entry: InputReport) -> str:
    more = f" (and {len(entry.damage) - 1} more)" if len(entry.damage) > 1 else ""
    return f"{entry.status} {entry.reason}{more}".strip()


def _speed(report: Report) -> Iterator[str]:
    speeds = [stage.megabytes_per_core_second or 0.0 for stage in report.stages]
    rows: list[list[Cell]] = [
        [one.name, f"{one.megabytes:,.1f}", f"{one.core_seconds:,.1f}", f"{speed:,.3f}", _bar(speed, max(speeds))]
        for one, speed in zip(report.stages, speeds, strict=True)
    ]
    yield _table("Speed", ["stage", "MB", "core-seconds", "MB per core-second", ""], rows)
    if timed := [stage for stage in report.stages if stage.seconds is not None]:
        names = ("seconds", "core_seconds", "idle_seconds", "ray_start_seconds", "driver_core_seconds")
        times = [[float(getattr(stage, name) or 0) for name in names] for stage in timed]
        rows = [[stage.name, stage.workers or 0, *map(_seconds, own)] for stage, own in zip(timed, times, strict=True)]
        rows.append(["together", "", *(_seconds(sum(column)) for column in zip(*times, strict=True))])
        header = ["stage", "workers", "seconds", "core-seconds of units", "idle", "Ray's start", "driver"]
        note = (
            "In seconds, of each stage's last run that had units to do. Idle: the time of all workers without a unit. "
            "Driver: its processor time."
        )
        yield _table("Where the time went", header, rows, note)


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}"
