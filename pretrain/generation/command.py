"""`pretrain generate`: reads texts and shows answers."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.progress import track

if TYPE_CHECKING:
    from pretrain.generation.blanks import Filling
    from pretrain.generation.texts import Answer


_ABOUT_FILLINGS = (
    "blank k: its likeliest fillings as wholes, with the probability of each up to its end; blanks before it have\n"
    "their likeliest ones. The line `model` is written token by token, so it can differ.\n\n"
)


def texts_of(arguments: Sequence[str], file: Path | None, piped: TextIO | None) -> list[str]:
    """The texts given as arguments, or the lines of `file` or `piped`. Raises UserError unless there is one source."""
    if arguments and file:
        raise UserError("give texts as arguments or with --file, not both")
    if arguments:
        return list(arguments)
    if file is None and piped is None:
        raise UserError("give a text, --file, --corpus, or pipe lines of text in")
    try:
        lines = (file.read_text(encoding="utf-8") if file else piped.read() if piped else "").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file or 'stdin'}: can't be read: {error}") from None
    if lines[-1] == "":
        del lines[-1]
    if not lines:
        raise UserError(f"{file or 'stdin'}: has no line of text")
    return lines


def show(
    written: "Iterator[Answer]",
    originals: Sequence[str | None],
    jsonl: bool,
    out: TextIO,
    fillings: "Callable[[str], list[list[Filling]]] | None" = None,
) -> None:
    """Writes each answer to `out` as it comes, with a progress bar on stderr unless `out` is a terminal itself.

    `originals`: the texts before words were blanked out, if known; shown beside the answers. `fillings` gives the
    likeliest fillings of each blank of a text.
    """
    if not out.isatty():  # rich redirects sys.stdout to the bar's terminal, so `out` must not be sys.stdout itself
        written = track(written, len(originals), "generate")
    if fillings and not jsonl:
        out.write(_ABOUT_FILLINGS)
    for one, original in zip(written, originals, strict=True):
        fillings_of_blanks = fillings(one.text) if fillings and one.has_blanks else []
        out.write(_as_json(one, original, fillings_of_blanks) if jsonl else _as_text(one, original, fillings_of_blanks))
        out.flush()


def new_file(path: Path) -> TextIO:
    """Creates the file. Raises UserError if it exists or can't be created."""
    try:
        return path.open("x", encoding="utf-8")
    except FileExistsError:
        raise UserError(f"{path}: exists already; choose another file") from None
    except OSError as error:
        raise UserError(f"{path}: can't be written: {error.strerror}") from None


def _as_json(one: "Answer", original: str | None, fillings_of_blanks: "list[list[Filling]]") -> str:
    fields: dict[str, object] = {"text": one.text, "generated": one.generated, "whole": one.whole}
    if original:
        fields["original"] = original
    if fillings_of_blanks:
        fields["likeliest"] = [[filling._asdict() for filling in fillings] for fillings in fillings_of_blanks]
    return json.dumps(fields, ensure_ascii=False) + "\n"


def _as_text(one: "Answer", original: str | None, fillings_of_blanks: "list[list[Filling]]") -> str:
    if not one.has_blanks:
        return one.whole + "\n"
    lines = [f"blanks    {one.text}", f"model     {one.whole}", *([f"original  {original}"] if original else [])]
    for number, fillings in enumerate(fillings_of_blanks):
        words = "   ".join(f"[{filling.text}] {filling.probability:.1%}" for filling in fillings)
        lines.append(f"blank {number:<3} {words}")
    return "\n".join(lines) + "\n\n"
