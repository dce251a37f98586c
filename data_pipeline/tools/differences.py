"""`data-pipeline diff`: for each document in which two corpora differ, the rule that decided."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache

from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.formatting import counted
from data_pipeline.foundation.progress import track
from data_pipeline.foundation.store import Store
from data_pipeline.stages.parts import read_documents
from data_pipeline.tools.document_trace import DocumentTrace, Drop, trace_records
from data_pipeline.tools.finished_build import BuiltInput, FinishedBuild

ONLY_A, ONLY_B, TEXT, SPLIT = "only_in_a", "only_in_b", "text_differs", "split_differs"
Documents = dict[str, tuple[bytes, str]]  # by id, the hash of the text and the split
_TITLES = {ONLY_A: "in A only", ONLY_B: "in B only", TEXT: "with another text", SPLIT: "in another split"}


@dataclass(frozen=True)
class _Side:
    """An input as one of the two corpora, called `name`, has it: in `ranges`, or in none."""

    name: str
    build: FinishedBuild
    input: str

    @property
    def ranges(self) -> list[BuiltInput]:
        return self.build.inputs.get(self.input, [])

    @property
    def checksum(self) -> str:
        return next((built.result.sha256 for built in self.ranges if built.result.range.start == 0), "")

    def kept(self, documents_of: Callable[[Store, str], dict[str, Documents]]) -> Documents:
        """The documents of the input that are in the corpus."""
        kept: Documents = {}
        for built in self.ranges:
            for part in built.unit.result.parts:
                kept |= documents_of(self.build.corpus, self.build.files[part.name]).get(built.name, {})
        return kept

    def traces(self, ids: set[str]) -> Iterator[DocumentTrace]:
        """Those of the documents `ids`, from the ranges that have them, which are read again."""
        ordinals = {int(identity.rpartition("/")[2]) for identity in ids}
        for built, own in self.build.records(self.input, ordinals):
            yield from trace_records(self.build, built, own)

    def dropping(self, ids: set[str]) -> dict[str, str]:
        """The rule by which the corpus has dropped each of the documents `ids`."""
        if not self.ranges:
            return dict.fromkeys(ids, f"{self.name} doesn't have the input")
        rules = {trace.id: f"{trace.dropped_by} in {self.name}" for trace in self.traces(ids)}
        return {identity: rules.get(identity, f"{self.name} has no such record") for identity in ids}


@dataclass
class RuleCount:
    """The documents that differ by `rule`, with the smallest ids of them."""

    rule: str
    documents: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Summary:
    """How many documents are the `same` in both corpora; by kind of difference, the rules, the most frequent first."""

    a: str
    b: str
    same: int
    rules: dict[str, list[RuleCount]]

    def as_json(self) -> dict[str, object]:
        rules = {kind: [asdict(rule) for rule in found] for kind, found in self.rules.items()}
        return {"a": self.a, "b": self.b, "same": self.same, **rules}

    def as_text(self) -> str:
        """The summary in lines."""
        lines = [f"A {self.a}", f"B {self.b}", f"{counted(self.same, 'document')} the same in both"]
        for kind, title in _TITLES.items():
            if found := self.rules[kind]:
                lines.append(f"{counted(sum(rule.documents for rule in found), 'document')} {title}")
            for rule in found:
                lines.append(f"  {rule.documents:>9,}  {rule.rule}")
                lines += [f"             {identity}" for identity in rule.examples]
        return "\n".join(lines)


def summary(a: FinishedBuild, b: FinishedBuild, limit: int) -> Summary:
    """The counts by kind and rule, each with the smallest ids, `limit` at most.

    Documents are compared by id, an input at a time. Inputs with documents that differ are read again.
    """
    same = 0
    rules: dict[str, dict[str, RuleCount]] = {kind: {} for kind in _TITLES}
    inputs = sorted(a.inputs | b.inputs, key=lambda name: f"{name}/")
    documents_of = lru_cache(maxsize=2)(_documents_of)  # small inputs share parts, and come one after the other
    for name in track(inputs, len(inputs), "comparing"):
        sides = _Side("A", a, name), _Side("B", b, name)
        equal, found = _compare(*sides, *(side.kept(documents_of) for side in sides))
        same += equal
        for kind, rule, identity in found:
            one = rules[kind].setdefault(rule, RuleCount(rule))
            one.documents += 1
            if one.documents <= limit:
                one.examples.append(identity)
    by_frequency = {kind: sorted(rules[kind].values(), key=lambda one: (-one.documents, one.rule)) for kind in rules}
    return Summary(str(a.corpus), str(b.corpus), same, by_frequency)


def _compare(a: _Side, b: _Side, in_a: Documents, in_b: Documents) -> tuple[int, list[tuple[str, str, str]]]:
    """How many documents are the same; the kind of difference, the rule that decided, and the id of each other one."""
    both = set(in_a) & set(in_b)
    only_a, only_b = set(in_a) - both, set(in_b) - both
    changed = {identity for identity in both if in_a[identity][0] != in_b[identity][0]}
    moved = {identity for identity in both - changed if in_a[identity][1] != in_b[identity][1]}
    if a.ranges and b.ranges and a.checksum != b.checksum:
        rules = dict.fromkeys(only_a | only_b | changed, "the input itself differs")
    else:
        rules = b.dropping(only_a) | a.dropping(only_b) | _changing(a, b, changed)
    kinds = dict.fromkeys(only_a, ONLY_A) | dict.fromkeys(only_b, ONLY_B) | dict.fromkeys(changed, TEXT)
    found = [(kinds[identity], rules[identity], identity) for identity in sorted(kinds)]
    found += [(SPLIT, "split.validation_fraction", identity) for identity in sorted(moved)]
    return len(both) - len(changed) - len(moved), found


def _documents_of(corpus: Store, part: str) -> dict[str, Documents]:
    """The documents of a part, by input."""
    if not corpus.exists(part):
        raise FailedError(f"{corpus.at(part)}: missing; run data-pipeline build")
    inputs: dict[str, Documents] = {}
    for document in read_documents(corpus, [part], ["id", "text", "target", "split"]):
        documents = inputs.setdefault(document.id.rpartition("/")[0], {})
        documents[document.id] = document.digest, document.split
    return inputs


def _changing(a: _Side, b: _Side, ids: set[str]) -> dict[str, str]:
    """The first rule that made the texts of the documents `ids` differ."""
    in_a, in_b = ({trace.id: trace for trace in side.traces(ids)} for side in (a, b))
    return {identity: _first_difference(in_a[identity], in_b[identity]) for identity in ids}


def _first_difference(a: DocumentTrace, b: DocumentTrace) -> str:
    """What made two texts differ: "line_policy in B", "dedup.lines in A (white space)".

    It is the first drop that only one of them has, or the first step that changed one of them without a drop: it took
    white space or, by `cleaning.web_rules`, citation marks.
    """
    text_a, text_b = a.text, b.text
    for name in dict.fromkeys(step.step for step in (*a.steps, *b.steps)):
        before = text_a
        if text_a != text_b:
            break
        (text_a, drops_a), (text_b, drops_b) = (_after(trace, name, before) for trace in (a, b))
        for corpus, drops, others in (("A", drops_a, drops_b), ("B", drops_b, drops_a)):
            left = Counter(map(_what, drops)) - Counter(map(_what, others))
            for drop in drops:
                if _what(drop) in left:
                    return f"{drop.rule} in {corpus}"
        if text_a != text_b:
            corpus, changed = ("A", text_a) if text_a != before else ("B", text_b)
            if changed.split() != before.split():
                return f"cleaning.web_rules in {corpus} (citation marks)"
            return f"{'cleaning' if name == 'cleaning' else f'dedup.{name}'} in {corpus} (white space)"
    return "sources.options (read differently)"


def _after(trace: DocumentTrace, name: str, before: str) -> tuple[str, list[Drop]]:
    """The text of a document after the step `name`, and what the step dropped; as `before` if it has no such step."""
    return next(((step.text or "", step.drops) for step in trace.steps if step.step == name), (before, []))


def _what(drop: Drop) -> str:
    return drop.what or drop.rule
