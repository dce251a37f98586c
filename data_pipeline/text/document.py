"""A document of text from any source, its URL as C4 compares it, and counts of what each rule drops."""

import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

_SCHEME = re.compile(r"https?://(www\.)?")
_TRACKING = re.compile(r"\?(utm_|ref|feed).*")


@dataclass(frozen=True, slots=True)
class Document:
    """A document as it is stored in `documents/*.parquet`. A field is "" if the source lacks it or it wasn't read.

    Attributes:
        id: the source's name, the path from its root and the ordinal of the record: the same on all machines.
        text: the text after cleaning; of a text-to-text pair, the input.
        url, title: the page's.
        language: the BCP 47 tag that the source states or has in the corpus file.
        source: the source's name in the corpus file.
        split: "train" or "validation".
        timestamp: when the page was fetched or edited, in ISO 8601.
        target: of a text-to-text pair, the target.
    """

    id: str = ""
    text: str = ""
    url: str = ""
    title: str = ""
    language: str = ""
    source: str = ""
    split: str = ""
    timestamp: str = ""
    target: str = ""

    def with_text(self, text: str) -> "Document":
        """This document with another text. `dataclasses.replace` takes three times as long."""
        return Document(
            self.id,
            text,
            self.url,
            self.title,
            self.language,
            self.source,
            self.split,
            self.timestamp,
            self.target,
        )

    @property
    def digest(self) -> bytes:
        """A hash of text and target, 16 bytes."""
        return hashlib.blake2b(f"{self.text}\0{self.target}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Dropped:
    """Why a step drops a document.

    Attributes:
        rule: the name under which the document is counted.
        example: what reports show of the document; "": nothing.
        found: what the rule has found in the document.
        kept: the document that stays in its place, unit << 32 | number; None if there is none.
    """

    rule: str
    example: str = ""
    found: str = ""
    kept: int | None = None


def normalize_url(url: str) -> str:
    """`url` without scheme, `www.`, tracking parameters and trailing slashes; letter case stays (TFDS `c4_utils`).

    https://www.Example.com/a/?utm_source=x  ->  Example.com/a
    """
    return _TRACKING.sub("", _SCHEME.sub("", url)).rstrip("/")


def is_chosen(text: str, numerator: int, denominator: int) -> bool:
    """Whether `text` belongs to a share of all texts, chosen as in TFDS: md5 mod `denominator` below `numerator`."""
    digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    return int(digest, 16) % denominator < numerator


EXAMPLES = 3
_NO_HASH = 1 << 32  # above all
_EXAMPLE_CHARACTERS = 200
LINE, SPAN = "line_", "span_"
"""Prefixes of the names of rules that don't drop whole documents, in examples."""


@dataclass
class Counts:
    """Counts of records, documents, lines and words that a unit read, dropped or masked.

    Attributes:
        read: records.
        undecodable: documents with bytes that couldn't be decoded.
        truncated_xml: files.
        lines_passed: lines that cleaning kept.
        lines_seen: lines that deduplication checked.
        substring_words: words of dropped substrings.
        dropped_documents, dropped_lines, dropped_spans: by rule.
        masked_data: by kind.
        contaminated: number of documents with an item of an evaluation set, by set.
        items: the numbers of the items that were found, ascending, by evaluation set.
        examples: up to three dropped texts, by the rule's name ("line_policy").
    """

    read: int = 0
    undecodable: int = 0
    truncated_xml: int = 0
    lines_passed: int = 0
    lines_seen: int = 0
    substring_words: int = 0
    dropped_documents: Counter[str] = field(default_factory=Counter)
    dropped_lines: Counter[str] = field(default_factory=Counter)
    dropped_spans: Counter[str] = field(default_factory=Counter)
    masked_data: Counter[str] = field(default_factory=Counter)
    contaminated: Counter[str] = field(default_factory=Counter)
    items: dict[str, list[int]] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)


Listener = Callable[[str, Document, Dropped], None]
"""Gets (name of the step, the document before the step, why it is dropped)."""
LeftOut = Callable[[str, str], None]
"""Gets (rule, example) of a record that a reader leaves out."""


class Tally(Counts):
    """Counts while documents are read, cleaned and deduplicated.

    The examples of a rule are the three different texts with the smallest hashes, cut to 200 characters. So examples
    don't depend on the order of texts, and `add` of two tallies gives the examples of one tally of everything.

    tally.line("policy", "See our privacy policy for more.")  ->  tally.dropped_lines["policy"] == 1
    """

    def __init__(self, listener: Listener | None = None, left_out: LeftOut | None = None):
        super().__init__()
        self._listener, self._left_out = listener, left_out
        self._items: dict[str, set[int]] = {}
        self._largest: dict[str, int] = {}  # for each rule that has enough examples, their largest hash

    def document(self, rule: str, example: str = "", number: int = 1) -> None:
        """Counts `number` records that a reader leaves out, and tells `left_out` of each; `rule` says why."""
        self._count(rule, example, number)
        if self._left_out:
            for _ in range(number):
                self._left_out(rule, example)

    def drop(self, step: str, document: Document, why: Dropped) -> None:
        """Counts a document that a step drops, and tells the listener."""
        self._count(why.rule, why.example)
        if self._listener:
            self._listener(step, document, why)

    def found(self, evaluation_set: str, item: int) -> None:
        """Notes an item of an evaluation set that is in a document."""
        self._items.setdefault(evaluation_set, set()).add(item)

    def line(self, rule: str, example: str) -> None:
        self.dropped_lines[rule] += 1
        self._note(LINE + rule, example)

    def span(self, rule: str, example: str) -> None:
        self.dropped_spans[rule] += 1
        self._note(SPAN + rule, example)

    def masked(self, kind: str) -> None:
        """Counts a piece of personal data. It must not become an example, since reports show examples."""
        self.masked_data[kind] += 1

    def add(self, other: Counts) -> None:
        """Adds other counts and their examples. The listeners don't get them."""
        for one in fields(Counts):
            value = getattr(other, one.name)
            if isinstance(value, Counter):
                getattr(self, one.name).update(value)
            elif isinstance(value, int):
                setattr(self, one.name, getattr(self, one.name) + value)
        for name, items in other.items.items():
            self._items.setdefault(name, set()).update(items)
        for name, texts in other.examples.items():
            for text in texts:
                self._keep(name, text)

    def recorded(self) -> Counts:
        """The counts so far, without the listeners, to be written to a file."""
        self.items = {name: sorted(items) for name, items in sorted(self._items.items())}
        return Counts(**{one.name: getattr(self, one.name) for one in fields(Counts)})

    def _count(self, rule: str, example: str, number: int = 1) -> None:
        self.dropped_documents[rule] += number
        self._note(rule, example)

    def _note(self, name: str, text: str) -> None:
        if text:
            self._keep(name, text[:_EXAMPLE_CHARACTERS])

    def _keep(self, name: str, example: str) -> None:
        key = _hash(example)
        if key >= self._largest.get(name, _NO_HASH):  # most texts end here
            return
        kept = self.examples.setdefault(name, [])
        if example not in kept:
            kept[:] = sorted([*kept, example], key=_hash)[:EXAMPLES]
        if len(kept) == EXAMPLES:
            self._largest[name] = _hash(kept[-1])


def most_common(counts: Mapping[str, int], number: int) -> dict[str, int]:
    """The `number` most frequent keys with their counts, sorted by count and then by name."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:number])


def _hash(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))  # fast: many lines are dropped
