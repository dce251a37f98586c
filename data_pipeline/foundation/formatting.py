"""Numbers, and names of others, as people read them."""

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
