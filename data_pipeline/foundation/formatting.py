"""Numbers, names and tables as people read them."""

from collections.abc import Sequence

from rich import filesize


def counted(number: int, noun: str) -> str:
    """1, "unit" -> "1 unit"; 2000, "unit" -> "2,000 units"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def duration(seconds: float) -> str:
    """90.0 -> "90 s", 5400.0 -> "1 h 30 min", 777600.0 -> "9.0 days"."""
    minutes = round(max(seconds, 0) / 60)
    if minutes < 2:
        return f"{max(seconds, 0):.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes / 1440:,.1f} days"


def human_size(size: float) -> str:
    """4_100_000 bytes -> "4.1 MB"."""
    return filesize.decimal(round(size))


def printable(text: str) -> str:
    r"""A name from a file as one line without control characters: "a\nb" -> r"a\nb"."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


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
