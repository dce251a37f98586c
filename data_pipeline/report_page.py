"""The report as one HTML page: no script, nothing from the network, light and dark."""

import unicodedata
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

Json = dict[str, Any]
_BARS = 20  # the most bars of a chart
_INPUTS = 100  # the most inputs in the table

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60646c; --line: #e0e1e6; --card: #f9f9fb; --page: #fff;
  --bar: #5b8def; --drop: #e5765b; }
@media (prefers-color-scheme: dark) { :root { --ink: #edeef0; --soft: #a6adb8; --line: #363a3f; --card: #1b1d21;
  --page: #121315; --bar: #6f9cf5; --drop: #e98a72; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 24px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
main { max-width: 1180px; margin: auto; }
h1 { margin: 0 0 4px; font-size: 26px; } h2 { margin: 36px 0 12px; font-size: 18px; }
h3 { margin: 0 0 10px; font-size: 14px; } p { margin: 0; } .soft { color: var(--soft); }
.grid { display: grid; gap: 16px; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }
.card { padding: 14px 16px; border: 1px solid var(--line); border-radius: 8px; background: var(--card); min-width: 0; }
.facts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); margin-top: 18px; }
.facts b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; }
.row { display: grid; grid-template-columns: minmax(0, 13em) 1fr auto; gap: 10px; align-items: center;
  font-size: 13px; line-height: 1.7; }
.row > :first-child { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.row > :last-child { min-width: 4.5em; text-align: right; font-variant-numeric: tabular-nums; }
.track { height: 10px; border-radius: 3px; background: var(--line); overflow: hidden; }
.track i { display: block; height: 100%; min-width: 1px; background: var(--bar); } .drop i { background: var(--drop); }
.rule { margin-bottom: 14px; } .rule:last-child { margin-bottom: 0; }
.rule .row { grid-template-columns: minmax(0, 17em) 1fr auto; font-size: 14px; }
blockquote { margin: 4px 0 0; padding: 1px 10px; border-left: 3px solid var(--line); color: var(--soft);
  font-size: 13px; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
td.long { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 12em; }
@media (max-width: 600px) { body { padding: 14px; } .row { grid-template-columns: minmax(0, 9em) 1fr auto; }
  .rule .row { grid-template-columns: 1fr auto; } .rule .track { order: 3; grid-column: 1 / -1; } }
"""


def as_html(report: Json) -> str:
    """The page of a report (`report.json`)."""
    name, documents = escape(report["name"]), report["documents"]
    parts = [
        f"<h1>Corpus {name}</h1>",
        f"<p class=soft>{documents['kept']:,} of {documents['read']:,} documents kept.</p>",
        _facts(report),
        "<h2>Distributions of the documents that are kept</h2>",
        f"<div class=grid>{''.join(_distributions(report))}</div>",
        *_dropped("Dropped documents", documents, report["examples"], ""),
        *_dropped("Dropped lines", report["lines"], report["examples"], "line_"),
        *_dropped("Dropped spans", {"read": 0, **report["spans"]}, report["examples"], "span_"),
        *_evaluation_sets(report["evaluation_sets"]),
        *_masked(report.get("masked", {})),
        *_sources(report["sources"]),
        "<h2>Speed</h2>",
        f"<div class=grid>{''.join(_speed(report['stages']))}</div>",
        "<h2>Inputs</h2>",
        _inputs(report["inputs"]),
    ]
    return (
        "<!doctype html>\n<html lang=en>\n<head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>Corpus {name}</title>\n<style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body>\n</html>\n"
    )


def _facts(report: Json) -> str:
    facts = {"inputs": f"{len(report['inputs']):,}"}
    facts["MB read"] = f"{sum(entry['bytes'] for entry in report['inputs']) / 1e6:,.1f}"
    facts["MB of text kept"] = f"{sum(source['text_bytes'] for source in report['sources'].values()) / 1e6:,.1f}"
    for split, counts in report["splits"].items():
        facts |= {f"{split} tokens": f"{counts['tokens']:,}", f"{split} rows": f"{counts['rows']:,}"}
    shown = (f"<div class=card><b>{value}</b><span class=soft>{name}</span></div>" for name, value in facts.items())
    return f"<div class=facts>{''.join(shown)}</div>"


def _distributions(report: Json) -> Iterable[str]:
    yield _chart("Length in characters", _lengths(report["lengths"]))
    if report["token_lengths"]:
        yield _chart("Length in tokens", _lengths(report["token_lengths"]))
    if report.get("coverage"):
        yield _coverage(report["coverage"])
    yield _chart("Language", report["languages"])
    if report["domains"]:
        yield _chart("Domain", report["domains"])
    if holes := report.get("template_holes"):
        yield _chart("Templates that left a hole in a sentence", holes, "drop")


def named(character: str) -> str:
    """A character, and its code point if it doesn't show by itself: "K", "U+00AD"."""
    shows = character.isprintable() and not character.isspace() and not unicodedata.combining(character)
    return character if shows else f"U+{ord(character):04X}"


def _coverage(found: Json) -> str:
    told = f"{found['unknown']:,} of {found['tokens']:,} tokens are unknown, {found['bytes']:,} are bytes"
    characters = {named(character): n for character, n in found["characters"].items()}
    return _chart("Characters without a token", characters).replace("</h3>", f"</h3><p class=soft>{told}</p>", 1)


def _lengths(powers: Mapping[str, int]) -> dict[str, int]:
    """Counts by the range of lengths, without gaps."""
    if not powers:
        return {}
    span = range(min(map(int, powers)), max(map(int, powers)) + 1)
    return {f"{2**power:,}–{2 ** (power + 1) - 1:,}": powers.get(str(power), 0) for power in span}


def _chart(title: str, counts: Mapping[str, float], kind: str = "") -> str:
    """A card with a bar for each key; the longest is as wide as the card."""
    most = max(counts.values(), default=0) or 1
    bars = "".join(
        f"<div class=row><span title='{escape(key)}'>{escape(key)}</span>{_bar(n / most, kind)}<span>{n:,}</span></div>"
        for key, n in list(counts.items())[:_BARS]
    )
    return f"<div class=card><h3>{escape(title)}</h3>{bars or '<p class=soft>none</p>'}</div>"


def _bar(share: float, kind: str = "") -> str:
    width = f"<i style='width:{100 * share:.1f}%'></i>" if share > 0 else ""
    return f"<div class='track {kind}'>{width}</div>"


def _dropped(title: str, counts: Json, examples: Mapping[str, list[str]], prefix: str) -> Iterable[str]:
    """What each rule dropped: a bar, and a few of the texts."""
    if not counts["dropped"]:
        return
    yield f"<h2>{title}</h2><div class=card>"
    most = max(counts["dropped"].values())
    for rule, n in _largest_first(counts["dropped"]).items():
        share = f" ({n / counts['read']:.2%})" if counts["read"] else ""
        quotes = "".join(f"<blockquote>{escape(text)}</blockquote>" for text in examples.get(prefix + rule, []) if text)
        yield (
            f"<div class=rule><div class=row><b title='{escape(rule)}'>{escape(rule)}</b>"
            f"{_bar(n / most, 'drop')}<span>{n:,}{share}</span></div>{quotes}</div>"
        )
    yield "</div>"


def _evaluation_sets(sets: Mapping[str, Json]) -> Iterable[str]:
    """A table of the evaluation sets: how much of each was in the text."""
    if not sets:
        return
    yield "<h2>Evaluation sets</h2>"
    header = ["set", "items", "too short to look for", "found in the text", "share", "documents dropped for them"]
    rows = [
        [
            escape(name),
            f"{own['items']:,}",
            f"{own['too_short']:,}",
            f"{own['found']:,}",
            f"{own['share']:.2%}",
            f"{own['documents_dropped']:,}",
        ]
        for name, own in sets.items()
    ]
    yield _table(header, rows)


def _masked(masked: Mapping[str, int]) -> Iterable[str]:
    if masked:
        yield f"<h2>Masked personal data</h2><div class=grid>{_chart('Places', _largest_first(masked))}</div>"


def _sources(sources: Mapping[str, Json]) -> Iterable[str]:
    """A table of the sources and, if there are several, the distributions of each."""
    yield "<h2>Sources</h2>"
    header = ["source", "inputs", "MB read", "documents read", "kept", "share", "MB of text kept"]
    rows = [
        [
            escape(name),
            f"{own['inputs']:,}",
            f"{own['bytes'] / 1e6:,.1f}",
            f"{own['read']:,}",
            f"{own['kept']:,}",
            f"{own['kept'] / own['read']:.1%}" if own["read"] else "",
            f"{own['text_bytes'] / 1e6:,.1f}",
        ]
        for name, own in sources.items()
    ]
    yield _table(header, rows)
    if len(sources) > 1:
        cards = "".join(
            _chart(f"{name}: length in characters", _lengths(own["lengths"]))
            + _chart(f"{name}: language", own["languages"])
            + _chart(f"{name}: documents dropped by", _largest_first(own["dropped"]), "drop")
            for name, own in sources.items()
        )
        yield f"<div class=grid style='margin-top:16px'>{cards}</div>"


def _largest_first(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _speed(stages: list[Json]) -> Iterable[str]:
    speeds = {stage["name"]: round(stage["megabytes_per_core_second"] or 0, 1) for stage in stages}
    yield _chart("MB per core-second", speeds)
    yield _chart("Core-seconds", {stage["name"]: stage["core_seconds"] for stage in stages})


def _inputs(inputs: list[Json]) -> str:
    """The damaged inputs and the first others, as many as a page can show."""
    in_order = sorted(inputs, key=lambda entry: entry["status"] == "ok")
    rows = [
        [
            escape(entry["path"]),
            f"{entry['bytes'] / 1e6:,.1f}",
            f"{entry['documents']:,}",
            escape(f"{entry['status']} {entry['reason']}".strip()),
        ]
        for entry in in_order[:_INPUTS]
    ]
    more = f"<p class=soft>and {len(inputs) - _INPUTS:,} more</p>" if len(inputs) > _INPUTS else ""
    return _table(["input", "MB", "documents", "status"], rows, long=(0, 3)) + more


def _table(header: list[str], rows: list[list[str]], long: tuple[int, ...] = ()) -> str:
    """A table of escaped cells; those of the columns `long` may wrap."""
    kinds = [" class=long" if at in long else "" for at in range(len(header))]
    head = "".join(f"<th>{name}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<div class='card scroll'><table><tr>{head}</tr>{body}</table></div>"
