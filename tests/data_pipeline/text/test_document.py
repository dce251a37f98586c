"""What is counted while documents are cleaned: documents, lines, spans and personal data, with examples."""

from pydantic_core import to_json

from data_pipeline.base.json_file import parse_json
from data_pipeline.text.document import Counts, Document, Dropped, Tally


def test_examples_are_chosen_by_hash_whatever_the_order():
    texts = [f"line {n}" for n in range(50)]
    one, other, halves, added = Tally(), Tally(), (Tally(), Tally()), Tally()
    for number, text in enumerate([*texts, *texts]):
        one.document("rule", text)
        other.document("rule", texts[-1 - number % 50])
        halves[number % 2].document("rule", text)
    for half in halves:
        added.add(half)
    assert len(one.examples["rule"]) == 3
    assert one.examples == other.examples
    assert added == one
    assert one.examples["rule"] != texts[:3]


def test_counts_keep_their_kind_whatever_the_rule_is_called_also_in_a_file():
    """Documents, lines, spans and personal data have counts of their own, and listeners hear of each document."""
    heard, left_out = [], []
    tally = Tally(lambda *drop: heard.append(drop), lambda *record: left_out.append(record))
    tally.read += 5
    tally.lines_passed += 2
    tally.document("line_policy", "x" * 300)
    tally.line("policy", "a line")
    tally.span("read", "a span")
    tally.masked("email")
    tally.drop("a step", document := Document("id"), why := Dropped("masked_email"))
    tally.document("masked_email", number=2)
    assert heard == [("a step", document, why)]
    assert left_out == [("line_policy", "x" * 300), ("masked_email", ""), ("masked_email", "")]
    read = parse_json(to_json(tally.recorded()), Counts, "a file")
    assert (read.read, read.lines_passed, read.undecodable) == (5, 2, 0)
    assert read.dropped_documents == {"line_policy": 1, "masked_email": 3}
    assert (read.dropped_lines, read.dropped_spans, read.masked_data) == ({"policy": 1}, {"read": 1}, {"email": 1})
    total = Tally()
    total.add(read)
    total.add(read)
    assert (total.read, total.dropped_documents["masked_email"], total.dropped_lines["policy"]) == (10, 6, 2)
    assert total.examples == read.examples
