"""Tables of text: aligned for a terminal, or in Markdown."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, the first column to the left and the others to the right. A column that is empty in all rows
    but the first, the headings, is left out; headings alone are kept."""
    headings, *others = rows
    columns = [column for column in range(len(headings)) if not others or any(row[column] for row in others)]
    widths = [max(len(row[column]) for row in rows) for column in columns]
    lines = []
    for row in rows:
        first, *numbers = (row[column] for column in columns)
        lines.append(" ".join([first.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])]).rstrip())
    return lines


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = True) -> list[str]:
    """The lines of a Markdown table. With `numbers`, all columns but the first are aligned to the right."""
    lines = [headings, ["---", *["--:" if numbers else "---"] * (len(headings) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
