"""`data-pipeline trace`: the story of the documents with an id or a URL, for people and as JSON."""

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.progress import counted
from data_pipeline.tools.provenance.finished_build import FinishedBuild
from data_pipeline.tools.provenance.place import Place, place_of
from data_pipeline.tools.provenance.search import records_named
from data_pipeline.tools.provenance.stories import Passage, Story, stories
from data_pipeline.tools.provenance.trail import Drop

_WIDTH, _INDENT, _NAME = 80, 2, 12
_DROPS_SHOWN = 5  # of each rule


@dataclass(frozen=True)
class Traced:
    """A story, and where the document's tokens lie, if it is in the corpus and the corpus has shards."""

    story: Story
    place: Place | None


def trace(build: FinishedBuild, name: str) -> list[Traced]:
    """The records that have the id or URL `name`. Raises UserError if no input has one."""
    found = []
    for of, ordinals in records_named(build, name):
        for _, story in sorted(stories(build, of, ordinals, winners=True).items()):
            place = None if story.dropped_by else place_of(build, story.id, story.split)
            found.append(Traced(story, place))
    if not found:
        raise UserError(f"{name}: its file has no such record")
    return found


def as_json(traced: Traced) -> dict[str, Any]:
    """A story with every drop in full, but the number of characters for each text."""
    story = traced.story
    return {
        "id": story.id,
        "file": story.path,
        "url": story.url,
        "title": story.title,
        "kept": not story.dropped_by,
        "rule": story.dropped_by,
        "characters": len(story.text),
        "steps": [
            {
                "step": passage.step,
                "characters": None if passage.text is None else len(passage.text),
                "dropped": [asdict(drop) for drop in passage.drops],
            }
            for passage in story.passages
        ],
        "language": story.language,
        "split": story.split,
        "place": asdict(traced.place) if traced.place else None,
    }


def as_text(traced: Traced) -> str:
    """A story in lines of 80 columns."""
    story, place = traced.story, traced.place
    lines = [story.id]
    lines += _entry("file", story.path.removeprefix("file://"))
    for name, value in (("url", story.url), ("title", story.title)):
        lines += _entry(name, value) if value else []
    if story.text:
        lines += _entry("read", f"{counted(len(story.text), 'character')}")
    for passage in story.passages:
        lines += _passage(passage, story)
    if story.dropped_by:
        return "\n".join([*lines, *_entry("dropped", f"by {story.dropped_by}")])
    lines += _entry("kept", f"split {story.split}" + (f", language {story.language}" if story.language else ""))
    return "\n".join([*lines, *(_place(place) if place else [])])


def _passage(passage: Passage, story: Story) -> list[str]:
    by_rule: dict[str, list[Drop]] = {}
    for drop in passage.drops:
        by_rule.setdefault(drop.rule, []).append(drop)
    left = "the document is dropped" if passage.text is None else f"{counted(len(passage.text), 'character')} left"
    lines = _entry(
        "page-filters" if passage.step == "filters" else passage.step,
        left if passage.drops or passage.step == "cleaning" else "nothing dropped",
    )
    for rule, drops in by_rule.items():
        lines.append(" " * 2 * _INDENT + f"{rule}: {len(drops):,}" if len(drops) > 1 else " " * 2 * _INDENT + rule)
        for drop in drops[:_DROPS_SHOWN]:
            if drop.what and drop.what not in (story.url, story.text):
                lines.append(_shortened(drop.what, 3 * _INDENT))
            if drop.stays_on:
                lines += _wrapped(f"a copy stays on {drop.stays_on}", 3 * _INDENT)
        if len(drops) > _DROPS_SHOWN:
            lines.append(" " * 3 * _INDENT + f"and {len(drops) - _DROPS_SHOWN:,} more (--json has them all)")
    return lines


def _place(place: Place) -> list[str]:
    lines = _entry("tokens", f"{place.tokens:,}")
    if place.rows is None:
        return lines + _entry("rows", f"of {place.shard}; they mix sentences of several documents")
    if not place.rows:
        return lines + _entry("rows", f"none: the tokens are in the tail of {place.shard} that fills no row")
    first, last = place.rows
    lines += _entry("rows", f"{first:,}" if first == last else f"{first:,} to {last:,}")
    lines += _entry("shard", place.shard)
    for block in place.blocks:
        lines += _entry("block", f"{block.number:,}: bytes {block.offset:,} to {block.offset + block.length - 1:,}")
    return lines


def _entry(name: str, value: str) -> list[str]:
    head = " " * _INDENT + f"{name:{_NAME}} "
    return _wrapped(value, len(head), head)


def _wrapped(text: str, indent: int, head: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head or " " * indent,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    ) or [head.rstrip()]


def _shortened(text: str, indent: int) -> str:
    room = _WIDTH - indent - 2
    shown = " ".join(text.split())
    return " " * indent + '"' + (shown if len(shown) <= room else shown[: room - 1] + "…") + '"'
