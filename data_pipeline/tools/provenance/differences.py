"""`data-pipeline diff`: for each document in which two corpora differ, the rule that decided."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_pipeline.execution.parts import read_documents
from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.progress import counted, track
from data_pipeline.tools.provenance.finished_build import BuiltInput, FinishedBuild
from data_pipeline.tools.provenance.stories import Passage, deduplicated, ordinal_of, rows_of, stories
from data_pipeline.tools.provenance.trail import Drop

ONLY_A, ONLY_B, TEXT, SPLIT = "only_in_a", "only_in_b", "text_differs", "split_differs"
Documents = dict[str, tuple[bytes, str]]  # by id, the hash of the text and the split
_TITLES = {ONLY_A: "in A only", ONLY_B: "in B only", TEXT: "with another text", SPLIT: "in another split"}


@dataclass(frozen=True)
class Difference:
    """A document in which A and B differ: `kind` says how, and `rule` which rule decided."""

    kind: str
    rule: str
    id: str


def differences(a: FinishedBuild, b: FinishedBuild) -> Iterator[tuple[int, list[Difference]]]:
    """For each input of either corpus: the number of documents that are the same in both, and the differences.

    Documents are compared by id, an input at a time. Inputs are read again only where cleaning decided.
    """
    inputs = sorted(a.inputs | b.inputs, key=lambda name: f"{name}/")
    kept_in = lru_cache(maxsize=2)(_kept_in)  # small inputs share parts, and come one after the other
    for name in track(inputs, len(inputs), "comparing"):
        yield _of_input(a, b, a.inputs.get(name, []), b.inputs.get(name, []), kept_in)


def summary(a: FinishedBuild, b: FinishedBuild, limit: int) -> dict[str, Any]:
    """The counts by kind and rule, the most frequent first, each with the smallest ids, `limit` at most."""
    same = 0
    counts: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], list[str]] = {}
    for equal, found in differences(a, b):
        same += equal
        for difference in found:
            rule = difference.kind, difference.rule
            counts[rule] += 1
            ids = examples.setdefault(rule, [])
            if len(ids) < limit:
                ids.append(difference.id)
    rules: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _TITLES}
    for decided, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        rules[decided[0]].append({"rule": decided[1], "documents": count, "examples": examples[decided]})
    return {"a": str(a.directory), "b": str(b.directory), "same": same, **rules}


def as_text(found: dict[str, Any]) -> str:
    """The summary in lines."""
    lines = [f"A {found['a']}", f"B {found['b']}", f"{counted(found['same'], 'document')} the same in both"]
    for kind, title in _TITLES.items():
        if found[kind]:
            lines.append(f"{counted(sum(rule['documents'] for rule in found[kind]), 'document')} {title}")
        for rule in found[kind]:
            lines.append(f"  {rule['documents']:>9,}  {rule['rule']}")
            lines += [f"             {identity}" for identity in rule["examples"]]
    return "\n".join(lines)


def _of_input(
    a: FinishedBuild,
    b: FinishedBuild,
    of_a: list[BuiltInput],
    of_b: list[BuiltInput],
    kept_in: Callable[[Path], dict[str, Documents]],
) -> tuple[int, list[Difference]]:
    in_a, in_b = _kept(a, of_a, kept_in), _kept(b, of_b, kept_in)
    both = set(in_a) & set(in_b)
    only_a, only_b = set(in_a) - both, set(in_b) - both
    changed = {identity for identity in both if in_a[identity][0] != in_b[identity][0]}
    moved = {identity for identity in both - changed if in_a[identity][1] != in_b[identity][1]}
    if of_a and of_b and _checksum(of_a) != _checksum(of_b):
        rules = dict.fromkeys(only_a | only_b | changed, "the input itself differs")
    else:
        rules = _dropping(b, of_b, only_a, "B") | _dropping(a, of_a, only_b, "A")
        rules |= _changing((a, of_a), (b, of_b), changed)
    kinds = dict.fromkeys(only_a, ONLY_A) | dict.fromkeys(only_b, ONLY_B) | dict.fromkeys(changed, TEXT)
    found = [Difference(kinds[identity], rules[identity], identity) for identity in sorted(kinds)]
    found += [Difference(SPLIT, "split.validation_fraction", identity) for identity in sorted(moved)]
    return len(both) - len(changed) - len(moved), found


def _kept(build: FinishedBuild, ranges: list[BuiltInput], kept_in: Callable[[Path], dict[str, Documents]]) -> Documents:
    """The documents of an input that are in the corpus."""
    kept: Documents = {}
    for of in ranges:
        for part in of.unit.result.parts:
            kept |= kept_in(build.directory / f"documents/{part.name}.parquet").get(of.name, {})
    return kept


def _kept_in(part: Path) -> dict[str, Documents]:
    """The documents of a part, by input."""
    if not part.exists():
        raise FailedError(f"{part}: missing; run data-pipeline build")
    kept: dict[str, Documents] = {}
    for row in read_documents(part.parent, part.name, ["id", "text", "target", "split"]):
        text = f"{row['text']}\0{row['target']}".encode("utf-8", "surrogatepass")
        own = kept.setdefault(row["id"].rpartition("/")[0], {})
        own[row["id"]] = hashlib.blake2b(text, digest_size=16).digest(), row["split"]
    return kept


def _checksum(ranges: list[BuiltInput]) -> str:
    return next((of.result.sha256 for of in ranges if of.result.range.start == 0), "")


def _dropping(build: FinishedBuild, ranges: list[BuiltInput], ids: set[str], name: str) -> dict[str, str]:
    """The rule by which the corpus, called `name`, has dropped each of the documents `ids`."""
    if not ranges:
        return dict.fromkeys(ids, f"{name} doesn't have the input")
    rules = {
        identity: f"{passages[-1].drops[-1].rule} in {name}"
        for identity, passages in _deduplicated(build, ranges, ids).items()
    }
    for of, ordinals in _by_range(ranges, ids - set(rules)):
        for story in stories(build, of, ordinals).values():
            rules[story.id] = f"{story.dropped_by} in {name}"
    return {identity: rules.get(identity, f"{name} has no such record") for identity in ids}


def _changing(
    a: tuple[FinishedBuild, list[BuiltInput]], b: tuple[FinishedBuild, list[BuiltInput]], ids: set[str]
) -> dict[str, str]:
    """The first rule that made the texts of the documents `ids` differ."""
    cleaned_a, cleaned_b = _cleaned(*a, ids), _cleaned(*b, ids)
    in_cleaning = {identity for identity in ids if cleaned_a[identity] != cleaned_b[identity]}
    courses = []
    for (build, ranges), cleaned in ((a, cleaned_a), (b, cleaned_b)):
        later = _deduplicated(build, ranges, ids - in_cleaning)
        found = {identity: (cleaned[identity][0], passages) for identity, passages in later.items()}
        for of, ordinals in _by_range(ranges, in_cleaning):
            found |= {story.id: (story.text, story.passages) for story in stories(build, of, ordinals).values()}
        courses.append(found)
    return {identity: _first_difference(*(found[identity] for found in courses)) for identity in ids}


def _first_difference(a: tuple[str, list[Passage]], b: tuple[str, list[Passage]]) -> str:
    """What made two texts differ, each given with the steps after it: "line_policy in B", "dedup.lines in A (…)".

    It is the first drop that only one of them has, or the first step that changed one of them without a drop: it took
    white space or, by `cleaning.web_rules`, citation marks.
    """
    (text_a, in_a), (text_b, in_b) = a, b
    for step in dict.fromkeys(passage.step for passage in (*in_a, *in_b)):
        before = text_a
        if text_a != text_b:
            break
        of_a, of_b = ([passage for passage in passages if passage.step == step] for passages in (in_a, in_b))
        text_a, text_b = ("".join(passage.text or "" for passage in of) if of else before for of in (of_a, of_b))
        drops_a, drops_b = ([drop for passage in of for drop in passage.drops] for of in (of_a, of_b))
        for name, own, other in (("A", drops_a, drops_b), ("B", drops_b, drops_a)):
            left = Counter(map(_dropped, own)) - Counter(map(_dropped, other))
            for drop in own:
                if _dropped(drop) in left:
                    return f"{drop.rule} in {name}"
        if text_a != text_b:
            name, changed = ("A", text_a) if text_a != before else ("B", text_b)
            if changed.split() != before.split():
                return f"cleaning.web_rules in {name} (citation marks)"
            return f"{'cleaning' if step == 'cleaning' else f'dedup.{step}'} in {name} (white space)"
    return "sources.options (read differently)"


def _dropped(drop: Drop) -> str:
    return drop.what or drop.rule


def _cleaned(build: FinishedBuild, ranges: list[BuiltInput], ids: set[str]) -> dict[str, tuple[str, str]]:
    """The texts and targets of the documents `ids` after cleaning."""
    rows = (row for of in ranges for _, rows in rows_of(build, of, ids) for row in rows.values())
    return {row["id"]: (row["text"], row["target"]) for row in rows}


def _deduplicated(build: FinishedBuild, ranges: list[BuiltInput], ids: set[str]) -> dict[str, list[Passage]]:
    """What the steps of deduplication did to those of `ids` that cleaning has kept."""
    return {
        row["id"]: passages
        for of in ranges
        for part, rows in rows_of(build, of, ids)
        for passages, row in deduplicated(build, part, rows, winners=False)
    }


def _by_range(ranges: list[BuiltInput], ids: set[str]) -> Iterator[tuple[BuiltInput, set[int]]]:
    """The ranges of an input that hold the records `ids`, with their ordinals."""
    ordinals = {ordinal_of(identity) for identity in ids}
    in_order = sorted(ranges, key=lambda of: of.first_ordinal)
    stops = [*(after.first_ordinal for after in in_order[1:]), float("inf")]
    for of, stop in zip(in_order, stops, strict=False):
        if own := {ordinal for ordinal in ordinals if of.first_ordinal <= ordinal < stop}:
            yield of, own
