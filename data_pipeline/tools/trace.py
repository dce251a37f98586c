"""`data-pipeline trace`: what happened to the documents with an id or a URL, as text and as JSON."""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict

from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import counted
from data_pipeline.tools.document_trace import DocumentTrace, Drop, StepTrace, trace_records
from data_pipeline.tools.finished_build import FinishedBuild, records_named

_WIDTH, _NAME, _QUOTED = 80, 12, 63  # columns of a line, of a name, of a quotation
_DROPS_SHOWN = 5  # of each rule


def trace(build: FinishedBuild, name: str) -> list[DocumentTrace]:
    """The traces of the records with the id or URL `name`. Raises UserError if there are none."""
    found = list[DocumentTrace]()
    for built, ordinals in records_named(build, name):
        found += trace_records(build, built, ordinals)
    if not found:
        raise UserError(f"{name}: its file has no such record")
    return found


def as_json(found: DocumentTrace) -> dict[str, object]:
    """A trace with every drop in full, and numbers of characters in place of texts."""
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
    }


def as_text(found: DocumentTrace) -> str:
    """A trace in lines of 80 columns."""
    entries = [("file", found.path.removeprefix("file://")), ("url", found.url), ("title", found.title)]
    entries.append(("read", counted(len(found.text), "character") if found.text else ""))
    for step in found.steps:
        entries += _step(step, found)
    if found.dropped_by:
        entries.append(("dropped", f"by {found.dropped_by}"))
    else:
        language = f", language {found.language}" if found.language else ""
        entries.append(("kept", f"split {found.split}{language}"))
    return "\n".join([found.id, *(line for name, text in entries for line in _wrapped(name, text))])


def _step(step: StepTrace, found: DocumentTrace) -> Iterator[tuple[str, str]]:
    left = "the document is dropped" if step.text is None else f"{counted(len(step.text), 'character')} left"
    yield step.step, left if step.drops or step.step == "cleaning" else "nothing dropped"
    by_rule: dict[str, list[Drop]] = {}
    for drop in step.drops:
        by_rule.setdefault(drop.rule, []).append(drop)
    for rule, drops in by_rule.items():
        yield "", f"{rule}: {len(drops):,}" if len(drops) > 1 else rule
        for drop in drops[:_DROPS_SHOWN]:
            if drop.what and drop.what not in (found.url, found.text):
                what = " ".join(drop.what.split())
                yield "", f'"{what}"' if len(what) <= _QUOTED else f'"{what[: _QUOTED - 1]}…"'
            if drop.stays_on:
                yield "", f"a copy stays on {drop.stays_on}"
        if len(drops) > _DROPS_SHOWN:
            yield "", f"and {len(drops) - _DROPS_SHOWN:,} more (--json has them all)"


def _wrapped(name: str, text: str) -> list[str]:
    """The lines of `text` beside `name`; none for an empty text."""
    head = f"  {name:{_NAME}} "
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
