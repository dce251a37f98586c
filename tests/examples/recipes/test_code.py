"""Masked spans of code are what Python's own tokenizer and parser say, and a filling is tried in its statement."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

from data_pipeline.base.errors import UserError
from examples.recipes.code import (
    Span,
    expressions,
    frequent,
    is_held_out,
    lines_of_tokens,
    nearest_frequent,
    spans,
    statements,
)

SOURCE = """\
import os


def size(path, unit=1024):  # a comment
    total = os.stat(path).st_size
    return total // unit if unit else total
"""


def test_lexical_tokens_are_those_of_tokenize_at_their_places():
    found = [token for line in lines_of_tokens(SOURCE) for token in line]
    assert all(SOURCE[token.start : token.end] == token.string for token in found)
    names = [token.string for token in tokenize.generate_tokens(io.StringIO(SOURCE).readline) if token.type == 1]
    assert [token.string for token in found if token.is_name] == [
        name for name in names if name not in ("import", "def", "return", "if", "else")
    ]


def test_expressions_are_nodes_of_the_syntax_tree_of_three_to_eight_tokens():
    found = [(SOURCE[start:end], size) for start, end, size in expressions(SOURCE)]
    assert sorted(found) == [
        ("os.stat", 3),
        ("os.stat(path)", 6),
        ("os.stat(path).st_size", 8),
        ("total // unit", 3),
        ("total // unit if unit else total", 7),
    ]
    assert expressions("é = f(a)\nb = f(c)\n") == [(13, 17, 4)]  # no column is in bytes


def test_a_masked_span_takes_the_space_before_it_and_its_statement_is_parsed():
    start = SOURCE.index("os.stat(path)")
    whole = statements(SOURCE)[1]
    assert SOURCE[slice(*whole)] == SOURCE[SOURCE.index("def") :]
    span = Span(SOURCE, start, start + len("os.stat(path)"), 6, whole)
    assert span.masked.middle == " os.stat(path)"
    assert span.masked.before.endswith("total =")
    assert span.masked.filled(span.masked.middle) in SOURCE
    assert span.parses("other()")
    assert not span.parses("other(")
    assert not span.parses("")


def test_the_nearest_frequent_identifier_is_counted_around_the_span():
    start = SOURCE.index("unit if")
    assert nearest_frequent(Span(SOURCE, start, start + 4, 1, (0, len(SOURCE)))) == "total"


def test_spans_are_drawn_by_the_seed_from_the_files_below_a_folder(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/module.py").write_text(SOURCE)
    (tmp_path / "other.py").write_bytes(b"\xff")
    found = spans(tmp_path, "identifiers", 5, 0)
    assert found == spans(tmp_path, "identifiers", 5, 0) != spans(tmp_path, "identifiers", 5, 1)
    assert {SOURCE[span.start : span.end] for span in found} <= {
        node.id for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.Name)
    } | {"os", "size", "path", "unit", "stat", "st_size"}
    with pytest.raises(UserError, match="no Python files with expressions"):
        spans(tmp_path / "nowhere", "expressions", 5, 0)
    with pytest.raises(UserError, match="nowhere: no Python files with identifiers"):
        frequent(tmp_path / "nowhere")


def test_all_files_of_a_package_are_held_out_or_none():
    packages = [f"package{number}" for number in range(100)]
    held_out = {name for name in packages if is_held_out(Path(name, "a.py"))}
    assert held_out == {name for name in packages if is_held_out(Path(name, "deep", "b.py"))}
    assert held_out == {name for name in packages if is_held_out(Path(f"{name}.py"))}
    assert 0 < len(held_out) < 30
