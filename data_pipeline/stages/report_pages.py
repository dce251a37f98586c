"""Renders the report of a corpus as a Markdown page, report.md."""

import re
from collections.abc import Iterator, Mapping, Sequence

from data_pipeline.base.formatting import human_size, markdown
from data_pipeline.corpus.tokenizer import normalization
from data_pipeline.stages.report import InputReport, Report, code_points, coverage, cut_pairs, visible
from data_pipeline.text.document import LINE, SPAN, most_common

_ROWS = 20  # maximum number of rows in a chart
_BAR = 40  # characters of the longest bar
_INPUTS = 100  # maximum number of inputs in the table
_MARKUP = re.compile(r"[\\`*\[\]<>|#]|(?<![^\W_])_|_(?![^\W_])")  # an underscore inside a word marks nothing
_ABOUT_CHARACTERS = (
    " A larger tokenizer.character_coverage gives more characters tokens of their own. With tokenizer.byte_fallback "
    "the others are bytes, and no text is lost."
)
_NEXT = (
    "## Next\n\n`data-pipeline show CORPUS` prints rows as a model gets them. `launch init NAME --corpus CORPUS` "
    "writes a run file for this machine, and `launch local NAME.run.yaml` trains."
)

Cell = str | int | float | list[str]  # a list has example texts


def render(report: Report) -> str:
    """The content of report.md."""
    title = f"# Corpus {_escaped(report.name)}"
    read = sum(one.bytes for one in report.sources.values())
    lead = [f"{report.documents.kept:,} of {report.documents.read:,} documents kept, of {human_size(read)} read"]
    lead += [f"{name}: {one.rows:,} rows, {one.tokens:,} tokens" for name, one in report.splits.items()]
    return "\n\n".join([title, "; ".join(lead) + ".", *_tables(report), _NEXT]) + "\n"


def _tables(report: Report) -> Iterator[str]:
    for what, read, dropped, prefix in (
        ("documents", report.documents.read, report.documents.dropped, ""),
        ("lines", report.lines.read, report.lines.dropped, LINE),
        ("spans", 0, report.spans.dropped, SPAN),
    ):
        yield from _table(
            f"Dropped {what}",
            ["rule", what, "share", "", "examples"],
            [
                [
                    rule,
                    n,
                    _share(n, read),
                    _bar(n, {"": read} if read else dropped),
                    [*filter(None, report.examples.get(prefix + rule, []))],
                ]
                for rule, n in most_common(dropped, len(dropped)).items()
            ],
        )
    yield from _table(
        "Evaluation sets",
        ["set", "items", "too short to look for", "found in the text", "share", "documents dropped for them"],
        [
            [name, one.items, one.too_short, one.found, f"{one.share:.2%}", one.documents_dropped]
            for name, one in report.evaluation_sets.items()
        ],
    )
    yield from _chart("Masked personal data", "kind", report.masked)
    yield from _chart("Templates that left a hole in a sentence", "template", report.template_holes)
    yield from _table(
        "Splits",
        ["split", "documents", "rows", "tokens", "tokens in dropped tails", "shards"],
        [
            [name, one.documents, one.rows, one.tokens, one.dropped_tokens, one.shards]
            for name, one in report.splits.items()
        ],
        " ".join(cut_pairs(report)),
    )
    characters, note = report.coverage.characters if report.coverage else {}, coverage(report)
    yield from _table(
        "Characters without a token",
        ["character", "code point", "times", ""],
        [[visible(one), code_points(one), n, _bar(n, characters)] for one, n in characters.items()],
        f"{note[:1].upper()}{note[1:]}.{_ABOUT_CHARACTERS if characters else ''}" if note else "",
    )
    changed = report.coverage.changed if report.coverage else {}
    said = normalization.describe(changed)
    yield from _table(
        "What the tokenizer changes in text",
        ["what", "times", ""],
        [[normalization.name(one), n, _bar(n, changed)] for one, n in changed.items()],
        f"{said[:1].upper()}{said[1:]}." if said else "",
    )
    yield from _chart("Lengths of documents, in characters", "characters", _ranges(report.lengths))
    yield from _chart("Lengths of documents, in tokens", "tokens", _ranges(report.token_lengths))
    yield from _chart("Languages", "language", report.languages)
    yield from _table(
        "Sources",
        ["source", "inputs", "MB read", "documents read", "kept", "share", "MB of text kept"],
        [
            [name, one.inputs, one.bytes / 1e6, one.read, one.kept, _share(one.kept, one.read), one.text_bytes / 1e6]
            for name, one in report.sources.items()
        ],
    )
    for name, one in report.sources.items() if len(report.sources) > 1 else ():
        yield from _chart(f"{name}: lengths in characters", "characters", _ranges(one.lengths))
        yield from _chart(f"{name}: languages", "language", one.languages)
        yield from _chart(f"{name}: dropped documents", "rule", most_common(one.dropped, _ROWS))
    damaged_first = sorted(report.inputs, key=lambda one: one.status == "ok")
    notes = [f"And {len(report.inputs) - _INPUTS:,} more."] if len(report.inputs) > _INPUTS else []
    if report.hidden_inputs:
        notes.append(f"Hidden files and folders left out: {report.hidden_inputs:,}.")
    yield from _table(
        "Inputs",
        ["input", "MB", "documents", "status"],
        [[one.path, one.bytes / 1e6, one.documents, _status(one)] for one in damaged_first[:_INPUTS]],
        " ".join(notes),
    )
    speeds = {one.name: one.megabytes_per_core_second or 0.0 for one in report.stages}
    yield from _table(
        "Speed",
        ["stage", "MB", "core-seconds", "MB per core-second", ""],
        [
            [one.name, one.megabytes, one.core_seconds, f"{speeds[one.name]:,.3f}", _bar(speeds[one.name], speeds)]
            for one in report.stages
        ],
    )
    columns = ("seconds", "core_seconds", "idle_seconds", "ray_start_seconds", "driver_core_seconds")
    timed = [one for one in report.stages if one.seconds is not None]
    times = [[float(getattr(one, column) or 0) for column in columns] for one in timed]
    rows: list[list[Cell]] = [[one.name, one.workers or 0, *own] for one, own in zip(timed, times, strict=True)]
    if timed:
        rows.append(["together", "", *map(sum, zip(*times, strict=True))])
    note = "In seconds, of each stage's last run that had units to do. Idle: the time of all workers without a unit. "
    yield from _table(
        "Where the time went",
        ["stage", "workers", "seconds", "core-seconds of units", "idle", "Ray's start", "driver"],
        rows,
        f"{note}Driver: its processor time." if timed else "",
    )


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[Cell]], note: str = "") -> Iterator[str]:
    """A section with a note and a table; none if both are empty."""
    if rows or note:
        cells = [[_markdown(cell) for cell in row] for row in rows]
        table = ["\n".join(markdown(header, cells, numbers=False))] if rows else []
        yield "\n\n".join([f"## {title}", *([_escaped(note)] if note else []), *table])


def _chart(title: str, what: str, counts: Mapping[str, int]) -> Iterator[str]:
    """A section with a bar for each key."""
    rows: list[list[Cell]] = [[key, n, _bar(n, counts)] for key, n in list(counts.items())[:_ROWS]]
    yield from _table(title, [what, "count", ""], rows)


def _markdown(cell: Cell) -> str:
    if isinstance(cell, list):
        return "<br>".join(map(_escaped, cell))
    if isinstance(cell, str):
        return _escaped(cell)
    return f"{cell:,.1f}" if isinstance(cell, float) else f"{cell:,}"


def _escaped(text: str) -> str:
    return _MARKUP.sub(r"\\\g<0>", text)


def _bar(n: float, beside: Mapping[str, float]) -> str:
    """A bar for `n`; the largest value of `beside` has the longest bar."""
    most = max(beside.values())
    return "█" * round(_BAR * n / most) if most else ""


def _share(n: int, total: int) -> str:
    return f"{n / total:.2%}" if total else ""


def _ranges(powers: Mapping[str, int]) -> dict[str, int]:
    """Counts by range of lengths, without gaps."""
    span = range(min(map(int, powers)), max(map(int, powers)) + 1) if powers else ()
    return {f"{2**power:,}–{2 ** (power + 1) - 1:,}": powers.get(str(power), 0) for power in span}


def _status(entry: InputReport) -> str:
    more = f" (and {len(entry.damage) - 1} more)" if len(entry.damage) > 1 else ""
    return f"{entry.status} {entry.reason}{more}".strip()
