"""`data-pipeline trace`: what happened to the documents with an id or a URL, as text and as JSON."""

import textwrap
from dataclasses import asdict

from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import counted
from data_pipeline.tools.provenance.document_trace import DocumentTrace, Drop, StepTrace, trace_records
from data_pipeline.tools.provenance.finished_build import FinishedBuild, records_named
from data_pipeline.tools.provenance.token_location import TokenLocation, locate_tokens

_WIDTH, _INDENT, _NAME = 80, 2, 12
_DROPS_SHOWN = 5  # of each rule


def trace(build: FinishedBuild, name: str) -> list[DocumentTrace]:
    """The records that have the id or URL `name`. Raises UserError if no input has one."""
    found = []
    for built, ordinals in records_named(build, name):
        for _, record in sorted(trace_records(build, built, ordinals, find_copies=True).items()):
            if not record.dropped_by:
                record.location = locate_tokens(build, record.id, record.split)
            found.append(record)
    if not found:
        raise UserError(f"{name}: its file has no such record")
    return found


def as_json(found: DocumentTrace) -> dict[str, object]:
    """A trace with every drop in full, but the number of characters for each text."""
    return {
        "id": found.id,
        "file": found.path,
        "url": found.url,
        "title": found.title,
        "kept": not found.dropped_by,
        "rule": found.dropped_by,
        "characters": len(found.text),
        "steps": [
            {
                "step": step.step,
                "characters": None if step.text is None else len(step.text),
                "dropped": [asdict(drop) for drop in step.drops],
            }
            for step in found.steps
        ],
        "language": found.language,
        "split": found.split,
        "place": asdict(found.location) if found.location else None,
    }


def as_text(found: DocumentTrace) -> str:
    """A trace in lines of 80 columns."""
    lines = [found.id, *_entry("file", found.path.removeprefix("file://"))]
    for name, value in (("url", found.url), ("title", found.title)):
        lines += _entry(name, value) if value else []
    if found.text:
        lines += _entry("read", f"{counted(len(found.text), 'character')}")
    for step in found.steps:
        lines += _step(step, found)
    if found.dropped_by:
        return "\n".join([*lines, *_entry("dropped", f"by {found.dropped_by}")])
    lines += _entry("kept", f"split {found.split}" + (f", language {found.language}" if found.language else ""))
    return "\n".join([*lines, *(_location(found.location) if found.location else [])])


def _step(step: StepTrace, found: DocumentTrace) -> list[str]:
    by_rule: dict[str, list[Drop]] = {}
    for drop in step.drops:
        by_rule.setdefault(drop.rule, []).append(drop)
    left = "the document is dropped" if step.text is None else f"{counted(len(step.text), 'character')} left"
    lines = _entry(step.step, left if step.drops or step.step == "cleaning" else "nothing dropped")
    for rule, drops in by_rule.items():
        lines.append(" " * 2 * _INDENT + (f"{rule}: {len(drops):,}" if len(drops) > 1 else rule))
        for drop in drops[:_DROPS_SHOWN]:
            if drop.what and drop.what not in (found.url, found.text):
                lines.append(_shortened(drop.what, 3 * _INDENT))
            if drop.stays_on:
                lines += _wrapped(f"a copy stays on {drop.stays_on}", 3 * _INDENT)
        if len(drops) > _DROPS_SHOWN:
            lines.append(" " * 3 * _INDENT + f"and {len(drops) - _DROPS_SHOWN:,} more (--json has them all)")
    return lines


def _location(location: TokenLocation) -> list[str]:
    lines = _entry("tokens", f"{location.tokens:,}")
    if location.rows is None:
        return lines + _entry("rows", f"of {location.shard}; they mix sentences of several documents")
    if not location.rows:
        return lines + _entry("rows", f"none: the tokens are in the tail of {location.shard} that fills no row")
    first, last = location.rows
    lines += _entry("rows", f"{first:,}" if first == last else f"{first:,} to {last:,}")
    lines += _entry("shard", location.shard)
    for block in location.blocks:
        lines += _entry("block", f"{block.number:,}: bytes {block.offset:,} to {block.offset + block.length - 1:,}")
    return lines


def _entry(name: str, value: str) -> list[str]:
    head = " " * _INDENT + f"{name:{_NAME}} "
    return _wrapped(value, len(head), head)


def _wrapped(text: str, indent: int, head: str = "") -> list[str]:
    margin = " " * indent
    lines = textwrap.wrap(text, _WIDTH, initial_indent=head or margin, subsequent_indent=margin, break_on_hyphens=False)
    return lines or [head.rstrip()]


def _shortened(text: str, indent: int) -> str:
    room = _WIDTH - indent - 2
    shown = " ".join(text.split())
    return " " * indent + '"' + (shown if len(shown) <= room else shown[: room - 1] + "…") + '"'
