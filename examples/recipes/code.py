"""Code: the Python files of the standard library, and masked identifiers and expressions in held-out files.

CodeT5 (Wang et al. 2021) fills identifiers; two thirds of this module find them.

    python -m examples.recipes.code data data/python
    python -m examples.recipes.code measure runs/code-bpe data/python
"""

import ast
import hashlib
import io
import keyword
import math
import random
import re
import shutil
import sysconfig
import tokenize
import warnings
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.base.command import path_argument, path_option, run_command
from data_pipeline.base.errors import UserError
from examples.recipes.masked_spans import Masked, bits, fillings, others, prompts, share, show
from pretrain.cli.app import Checkpoint
from pretrain.engine.checkpoint.index import checkpoint_in
from pretrain.tools.evaluate import opened_checkpoint

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

LEFT_OUT = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages"}  # tests, tables, pages of help
_HELD_OUT = 10  # one module or package in so many
_CONTEXT = 130  # characters on each side of a masked span
_EXPRESSION = range(3, 9)  # lexical tokens
_LONGEST = 48  # tokens of an answer: bytes of the longest masked span
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


@app.command("data", epilog="Example: python -m examples.recipes.code data data/python")
def _data(
    out: Annotated[Path, path_argument("OUT", "The new folder.")],
    library: Annotated[Path | None, path_option("--library", "Another library than this Python's own.")] = None,
) -> None:
    """Copy the Python files of the standard library to OUT/train and OUT/held-out.

    A module or a package is held out as a whole, by the md5 of its name. Tests, tables of encodings and pages of help
    are left out, and so are files that aren't UTF-8 or don't parse.
    """
    if out.exists():
        raise UserError(f"{out}: exists")
    source = library or Path(sysconfig.get_path("stdlib"))
    sizes: Counter[str] = Counter()
    for path in sorted(source.rglob("*.py")):
        inside = path.relative_to(source)
        if LEFT_OUT & {*inside.parts} or not _parses(read(path)):
            continue
        split = "held-out" if is_held_out(inside) else "train"
        copy = out / split / inside
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        sizes[split] += copy.stat().st_size
    for split, size in sizes.items():
        files = sum(1 for _ in (out / split).rglob("*.py"))
        print(f"{out / split}: {files:,} files, {size / 1e6:.2f} MB")


def is_held_out(inside: Path) -> bool:
    """Whether the module or package at the top of a path, such as `json` of json/decoder.py, is held out."""
    top = inside.parts[0].removesuffix(".py")
    return int(hashlib.md5(top.encode()).hexdigest(), 16) % _HELD_OUT == 0


def read(path: Path) -> str:
    """The text of a file; empty if the file isn't UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def _parses(text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as of an escape sequence in a filled string
        try:
            return bool(ast.parse(text).body)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return False


@dataclass(frozen=True)
class Token:
    """A lexical token of a file: text[start:end]."""

    start: int
    end: int
    string: str
    is_name: bool


def lines_of_tokens(text: str) -> list[list[Token]]:
    """The lexical tokens of each logical line, without comments and white space."""
    starts = line_starts(text)
    lines: list[list[Token]] = [[]]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            lines.append([])
        elif token.type not in _NO_CODE and token.string:
            (row, column), (last_row, last_column) = token.start, token.end
            is_name = token.type == tokenize.NAME and not keyword.iskeyword(token.string)
            end = starts[last_row - 1] + last_column
            lines[-1].append(Token(starts[row - 1] + column, end, token.string, is_name))
    return [line for line in lines if line]


def line_starts(text: str) -> list[int]:
    """Where each line begins."""
    return [0, *accumulate(map(len, text.splitlines(keepends=True)))]


def tokens_of(text: str) -> list[list[Token]]:
    """`lines_of_tokens`, or nothing for a file with other line breaks than \\n."""
    return [] if re.search("[\r\f\v\x1c-\x1e\x85\u2028\u2029]", text) else lines_of_tokens(text)


@dataclass(frozen=True)
class Span:
    """A masked span of a file: an identifier, or an expression of several lexical tokens.

    Attributes:
        statement: (start, end) of the statement at the top level of the file, such as a class, that has the span.
    """

    text: str
    start: int
    end: int
    tokens: int
    statement: tuple[int, int]

    @property
    def masked(self) -> Masked:
        """With the characters around the span. A space before the span belongs to the span, as in tokens of BPE."""
        start = self.start - (self.text[self.start - 1 : self.start] == " ")
        before = self.text[max(0, start - _CONTEXT) : start]
        return Masked(before, self.text[start : self.end], self.text[self.end : self.end + _CONTEXT])

    def parses(self, filling: str) -> bool:
        """Whether the statement parses with another filling."""
        start, end = self.statement
        return _parses(self.text[start : self.start] + filling.strip() + self.text[self.end : end])


def statements(text: str) -> list[tuple[int, int]]:
    """(start, end) of the statements at the top level of a file, in lines."""
    starts = line_starts(text)
    nodes = ast.parse(text).body
    return [
        (starts[min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))]) - 1],
         starts[node.end_lineno or node.lineno])
        for node in nodes
    ]  # fmt: skip


def spans(folder: Path, kind: str, number: int, seed: int) -> list[Span]:
    """`number` masked spans of the files in `folder`: kind `identifiers` or `expressions`. A file has them by its size.

    Raises UserError for a folder without Python files.
    """
    found = []
    for path in sorted(folder.rglob("*.py")):
        text = read(path)
        if kind == "identifiers":
            names = [token for line in tokens_of(text) for token in line if token.is_name]
            places = [(token.start, token.end, 1) for token in names]
        else:
            places = expressions(text)
        if places:
            wholes = statements(text)
            for start, end, size in places:
                whole = wholes[bisect_right(wholes, start, key=itemgetter(0)) - 1]
                found.append(Span(text, start, end, size, whole))
    if not found:
        raise UserError(f"{folder}: no Python files with {kind}")
    short = [span for span in found if len(span.masked.middle.encode()) <= _LONGEST]
    return random.Random(f"{seed}/{kind}").sample(short, min(number, len(short)))


def expressions(text: str) -> list[tuple[int, int, int]]:
    """(start, end, lexical tokens) of each expression of a file that has 3 to 8 tokens on one line.

    Names, constants and bare tuples aren't counted, nor lines with characters beyond ASCII.
    """
    lines = tokens_of(text)
    if not lines:
        return []
    starts = line_starts(text)
    begins = {token.start: number for number, token in enumerate(chain.from_iterable(lines))}
    ends = {token.end: number for number, token in enumerate(chain.from_iterable(lines), 1)}
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.expr) and not isinstance(node, ast.Name | ast.Constant | ast.Tuple):
            line = starts[node.lineno - 1]
            start, end = line + node.col_offset, line + (node.end_col_offset or 0)
            if node.end_lineno == node.lineno and text[line:end].isascii() and start in begins and end in ends:
                size = ends[end] - begins[start]
                if size in _EXPRESSION:
                    found.append((start, end, size))
    return found


def frequent(folder: Path) -> tuple[str, Mapping[int, str], Mapping[int, float]]:
    """Of the files in `folder`: the most frequent identifier, the most frequent expression of each number of tokens,
    and −log₂ of the share of each byte in them.

    Raises UserError for a folder without Python files.
    """
    names: Counter[str] = Counter()
    by_size: dict[int, Counter[str]] = defaultdict(Counter)
    of_bytes: Counter[int] = Counter()
    for path in sorted(folder.rglob("*.py")):
        text = read(path)
        of_bytes.update(text.encode())
        names.update(token.string for line in tokens_of(text) for token in line if token.is_name)
        for start, end, size in expressions(text):
            by_size[size][text[start:end]] += 1
    if not names:
        raise UserError(f"{folder}: no Python files with identifiers")
    costs = {byte: -math.log2((of_bytes[byte] + 0.5) / (of_bytes.total() + 128)) for byte in range(256)}
    return names.most_common(1)[0][0], {size: one.most_common(1)[0][0] for size, one in by_size.items()}, costs


def leading_identifier(filling: str) -> str:
    """The identifier that a filling begins with, as masked spans of training may be longer; else the filling."""
    found = re.match(r"\s*([^\W\d]\w*)", filling)
    return found[1] if found else filling


def nearest_frequent(span: Span) -> str:
    """The identifier that is most frequent around a masked one, of the 130 characters on each side."""
    around = f"{span.masked.before} {span.masked.after}"
    names = Counter(name for name in re.findall(r"[^\W\d]\w*", around) if not keyword.iskeyword(name))
    return names.most_common(1)[0][0] if names else ""


@app.command("measure", epilog="Example: python -m examples.recipes.code measure runs/code-bpe data/python")
def _measure(
    checkpoint: Checkpoint,
    folder: Annotated[Path, path_argument("DATA", "The folder that `data` has written.")],
    number: Annotated[int, typer.Option(min=2, help="Number of masked spans of each kind.")] = 500,
    seed: Annotated[int, typer.Option(help="Determines which spans are masked.")] = 0,
    out: Annotated[Path | None, path_option("--out", "A CSV file. Default: the table is printed.")] = None,
) -> None:
    """Fill masked identifiers and expressions of held-out files, and compare with what is frequent."""
    name, by_size, costs = frequent(folder / "train")
    rows = []
    with opened_checkpoint(checkpoint_in(checkpoint), 32) as session:
        for kind in ("identifiers", "expressions"):
            chosen = spans(folder / "held-out", kind, number, seed)
            masked = [span.masked for span in chosen]
            answers = fillings(session, masked, _LONGEST)
            if kind == "identifiers":
                answers = [leading_identifier(answer) for answer in answers]
            asked = prompts(session, masked)
            swapped = [type(one)(other.encoder, one.prefix, one.scored)
                       for one, other in zip(asked, others(asked), strict=True)]  # fmt: skip
            length = sum(len(one.middle.encode()) for one in masked)
            unigram = sum(costs[byte] for one in masked for byte in one.middle.encode())
            common = [name if span.tokens == 1 else by_size.get(span.tokens, name) for span in chosen]
            per_byte = [f"{sum(bits(session, some)) / length:.2f}" for some in (asked, swapped)]
            rows.append([kind, "model", *_scores(chosen, answers), per_byte[0]])
            rows.append([kind, "model, with another span's input", *_scores(chosen, others(answers)), per_byte[1]])
            rows.append([kind, "the most frequent in training", *_scores(chosen, common), f"{unigram / length:.2f}"])
            if kind == "identifiers":
                near = [nearest_frequent(span) for span in chosen]
                rows.append([kind, "the most frequent around it", *_scores(chosen, near), ""])
    show(["masked", "filled by", "exact, %", "parses, %", "bits per byte"], rows, out)


def _scores(chosen: Sequence[Span], answers: Sequence[str]) -> list[str]:
    exact = [answer.strip() == span.text[span.start : span.end] for answer, span in zip(answers, chosen, strict=True)]
    return [share(exact), share([span.parses(answer) for answer, span in zip(answers, chosen, strict=True)])]


if __name__ == "__main__":
    run_command(app)
