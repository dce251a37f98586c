"""The command `generate`: it reads texts, has a model answer them, and shows the answers."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO, cast

import typer

from data_pipeline.base.arguments import lines_of
from data_pipeline.base.command import json_for, path_option, refuse_options
from data_pipeline.base.errors import UserError
from data_pipeline.base.progress import Progress, track
from pretrain.cli.app import SavedModel

commands = typer.Typer(add_completion=False)
# The command imports what it runs, so that --help and the message about a wrong option are quick: PyTorch takes 2 s and
# 200 MB.

if TYPE_CHECKING:
    from pretrain.evaluate.generation.blanks import Filling
    from pretrain.evaluate.generation.texts import Answer

    Fillings = Callable[[str], list[list[Filling]]]


# The options from `max_new_tokens` on are the fields of GenerationSettings.
@commands.command(epilog="Example: pretrain generate runs/quickstart 'The <extra_id_0> is red.' --likeliest 5")
def generate(
    context: typer.Context,
    checkpoint: SavedModel,
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="A text. <extra_id_0>, <extra_id_1>, … stand for masked spans."),
    ] = None,
    prompts: Annotated[
        list[str] | None, typer.Option("--prompt", help="A text, like TEXT; may be given several times.")
    ] = None,
    file: Annotated[
        Path | None, path_option("--file", "A file with one text per line. Default without TEXT: stdin.")
    ] = None,
    corpus: Annotated[
        Path | None,
        path_option("--corpus", "Take sentences from the held-out documents of this corpus, and mask words in them."),
    ] = None,
    number: Annotated[int, typer.Option("-n", min=1, help="Number of sentences from --corpus.")] = 3,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Number of samples of each text. The default temperature is then 1.")
    ] = None,
    allowed: Annotated[
        Path | None,
        path_option(
            "--allowed", "Generate lines of this file only. A line is a text; in a .jsonl, a string or a list of ids."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Number of texts per batch. Default: by their length.", show_default=False)
    ] = None,
    likeliest: Annotated[
        int, typer.Option(min=0, help="Number of likeliest fillings to show for each masked span.")
    ] = 0,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Print JSON lines with the keys text, generated, whole.")] = (
        False
    ),
    output: Annotated[
        Path | None,
        path_option("--output", "Write JSON lines to this file. The same command resumes where the file ends."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum length of an answer, in tokens.")] = 128,
    min_new_tokens: Annotated[int, typer.Option(help="Minimum length of an answer, in tokens.")] = 0,
    no_repeat_ngram_size: Annotated[int, typer.Option(help="Never repeat an n-gram of this size. 0: off.")] = 0,
    num_beams: Annotated[int, typer.Option(help="Number of beams. 1: no beam search.")] = 1,
    num_return_sequences: Annotated[
        int, typer.Option("--return-sequences", help="Number of beams to return, with their scores.")
    ] = 1,
    length_penalty: Annotated[float, typer.Option(help="For beam search: above 0 favours long answers.")] = 1.0,
    early_stopping: Annotated[str, typer.Option(help="For beam search: true, false or never.")] = "false",
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature. 0: greedy decoding, the default without --samples.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[
        float, typer.Option(help="Sample from the fewest tokens whose probabilities sum to this, after --top-k.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of masks and sampling.")] = 0,
) -> None:
    """Fill masked spans, answer a text or continue it, depending on the model."""
    from data_pipeline import corpus as corpora
    from pretrain import loaded, models
    from pretrain.evaluate.generation import blanks
    from pretrain.evaluate.generation import settings as generation
    from pretrain.evaluate.generation.output_file import write_answers

    options = {name: context.params[name] for name in generation.GenerationSettings.model_fields}
    if temperature is None:
        del options["temperature"]
    settings = generation.checked(options, samples)
    if corpus is None:
        refuse_options(context, "for --corpus", "number")
    inputs: list[str] = []
    arguments = [*(texts or []), *(prompts or [])]
    if arguments or file or corpus is None:
        inputs = texts_of(arguments, file, None if sys.stdin.isatty() else sys.stdin)
    trained = loaded.open_model(checkpoint)
    originals: list[str | None] = [None] * len(inputs)
    if corpus is not None:
        family = trained.model.config.family
        if models.FAMILIES[family].generates != "answers":
            raise UserError(f"--corpus: models of the family {family} don't fill masked spans")
        held_out = corpora.open_corpus(corpus)
        objective = trained.objective or held_out.objective.name
        blanked = blanks.blank_out(held_out, trained.tokenizer, objective, number, seed)
        if not blanked:
            raise UserError(f"{corpus}: no held-out sentence to mask; give a TEXT")
        inputs += [text for text, _ in blanked]
        originals += [original for _, original in blanked]
    answers = loaded.answers_of(trained.on_best_device(), inputs, settings, batch_size, samples, allowed)
    of_each = [original for original in originals for _ in range(len(answers) // len(inputs))]
    likely = partial(blanks.likeliest_fillings, trained, number=likeliest) if likeliest else None
    if output is None:
        show(answers.following(0), of_each, jsonl, sys.stdout, likely)
    else:
        others = {"likeliest": likeliest} if likeliest else {}
        write_answers(output, answers, lambda number, one: _fields(one, of_each[number], _spans(one, likely)), others)


_ABOUT_FILLINGS = (
    "span k: its likeliest fillings, after the likeliest ones of the spans before it.\n"
    "The line `model` is decoded token by token, so it can differ.\n\n"
)
_ABOUT_EMPTY = "[]: the model left this span empty, as one that has hardly been trained does"


def texts_of(arguments: Sequence[str], file: Path | None, piped: TextIO | None) -> list[str]:
    """The texts given as arguments, or the lines of `file` or `piped`. Raises UserError unless there is one source."""
    if arguments and file:
        raise UserError("give texts as arguments or with --file, not both")
    if arguments:
        return list(arguments)
    if file is None and piped is None:
        raise UserError("give a text, --file, --corpus, or pipe lines of text in")
    return lines_of(file or cast(TextIO, piped))


def show(
    written: "Iterator[Answer]",
    originals: Sequence[str | None],
    jsonl: bool,
    out: TextIO,
    fillings: "Fillings | None" = None,
) -> None:
    """Writes each answer to `out` as it comes, with a progress bar on stderr unless `out` is a terminal itself.

    `originals`: the texts before words were masked, if known; shown below the answers. `fillings` returns the
    likeliest fillings of each masked span of a text.
    """
    if not out.isatty():  # rich redirects sys.stdout to the bar's terminal, so `out` must not be sys.stdout itself
        written = track(written, Progress("generate", len(originals)))
    explained = jsonl
    if fillings and not jsonl:
        out.write(_ABOUT_FILLINGS)
    for one, original in zip(written, originals, strict=True):
        of_spans = _spans(one, fillings)
        shown = json_for(out, _fields(one, original, of_spans)) if jsonl else _as_text(one, original, of_spans)
        out.write(shown + "\n")
        if not explained and one.has_blanks and "[]" in one.whole and "[]" not in one.text:
            print(_ABOUT_EMPTY, file=sys.stderr)
            explained = True
        out.flush()


def _spans(one: "Answer", fillings: "Fillings | None") -> "list[list[Filling]]":
    return fillings(one.text) if fillings and one.has_blanks else []


def _fields(one: "Answer", original: str | None, of_spans: "list[list[Filling]]") -> dict[str, object]:
    fields = one.fields()
    if original:
        fields["original"] = original
    if of_spans:
        fields["likeliest"] = [[filling._asdict() for filling in fillings] for fillings in of_spans]
    return fields


def _as_text(one: "Answer", original: str | None, of_spans: "list[list[Filling]]") -> str:
    score = "" if one.score is None else f"{one.score:.4f}  "
    if not one.has_blanks:
        return score + one.whole
    lines = [f"masked    {one.text}", f"model     {score}{one.whole}", *([f"original  {original}"] if original else [])]
    for number, fillings in enumerate(of_spans):
        words = "   ".join(f"[{filling.text}] {filling.probability:.1%}" for filling in fillings)
        lines.append(f"span {number:<4} {words}")
    return "\n".join(lines) + "\n"
