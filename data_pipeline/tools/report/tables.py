"""Tables in Markdown and in HTML. The HTML page has no script, reads nothing from the network, and is light or dark."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from data_pipeline.foundation.tables import markdown

_BAR = 40  # characters of the longest bar in Markdown
_MARKUP = re.compile(r"[\\`*\[\]<>|#]|(?<![^\W_])_|_(?![^\W_])")  # an underscore inside a word marks nothing
_STYLE = """
:root { color-scheme: light dark; --soft: #60646c; --line: #e0e1e6; --page: #fff; --bar: #5b8def; }
@media (prefers-color-scheme: dark) { :root { --soft: #a6adb8; --line: #363a3f; --page: #121315; --bar: #6f9cf5; } }
body { max-width: 1180px; margin: auto; padding: 24px; background: var(--page);
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
h1 { margin: 0 0 4px; font-size: 26px; } h2 { margin: 36px 0 12px; font-size: 18px; } p { color: var(--soft); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top;
  font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
td i { display: block; height: 10px; margin-top: 5px; border-radius: 3px; background: var(--bar); }
td.bar { width: 240px; min-width: 120px; } td.examples { text-align: left; min-width: 18em; }
blockquote { margin: 0 0 4px; padding: 1px 10px; border-left: 3px solid var(--line); color: var(--soft);
  overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Bar:
    """A bar that shows a number beside the largest one."""

    value: float
    most: float

    @property
    def share(self) -> float:
        return self.value / self.most if self.most else 0.0


Cell = str | int | Bar | list[str]  # a list has example texts


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


def as_markdown(title: str, lead: str, tables: Sequence[Table]) -> str:
    parts = [f"# {title}", lead]
    for table in tables:
        parts += [f"## {table.title}", *([_escaped(table.note)] if table.note else [])]
        rows = [list(map(_markdown, row)) for row in table.rows]
        parts += ["\n".join(markdown(table.header, rows, numbers=False))] if rows else []
    return "\n\n".join(parts) + "\n"


def as_html(title: str, lead: str, tables: Sequence[Table]) -> str:
    """The page, with every text escaped."""
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(lead)}</p>"]
    for table in tables:
        head = "".join(f"<th>{escape(name)}</th>" for name in table.header)
        rows = "".join(f"<tr>{''.join(map(_html, row))}</tr>" for row in table.rows)
        parts += [f"<h2>{escape(table.title)}</h2>", *([f"<p>{escape(table.note)}</p>"] if table.note else [])]
        parts += [f"<div class=scroll><table><tr>{head}</tr>{rows}</table></div>"] if table.rows else []
    body = "\n".join(parts)
    return (
        "<!doctype html>\n<html lang=en>\n<head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _markdown(cell: Cell) -> str:
    match cell:
        case Bar():
            return "█" * round(_BAR * cell.share)
        case list():
            return "<br>".join(map(_escaped, cell))
        case int():
            return f"{cell:,}"
        case _:
            return _escaped(cell)


def _escaped(text: str) -> str:
    return _MARKUP.sub(r"\\\g<0>", text)


def _html(cell: Cell) -> str:
    match cell:
        case Bar():
            return f"<td class=bar><i style='width:{100 * cell.share:.1f}%'></i></td>"
        case list():
            return f"<td class=examples>{''.join(f'<blockquote>{escape(text)}</blockquote>' for text in cell)}</td>"
        case int():
            return f"<td>{cell:,}</td>"
        case _:
            return f"<td>{escape(cell)}</td>"
