"""Commands that use a checkpoint or make one: generate, evaluate, export, import and the like."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from data_pipeline.foundation import paths
from data_pipeline.foundation.command import path_argument, path_option, refuse_options
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import is_utf8, masked
from data_pipeline.foundation.progress import track
from pretrain.cli.app import Checkpoint, NewDirectory, app

# A command imports what it runs, since --help and a mistyped option need none of it:
# PyTorch takes 2 s and 200 MB, transformers 1.4 s more.

if TYPE_CHECKING:
    from pretrain.engine.checkpoint import trained as trained_models
    from pretrain.evaluate.generation.blanks import Filling
    from pretrain.evaluate.generation.texts import Answer


@app.command(epilog="Example: pretrain generate runs/quickstart 'The <extra_id_0> is red.' --likeliest 5")
def generate(
    context: typer.Context,
    checkpoint: Checkpoint,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="With <extra_id_0> … for masked spans.")
    ] = None,
    file: Annotated[Path | None, path_option("--file", "One text per line. Default without texts: stdin.")] = None,
    corpus: Annotated[
        Path | None, path_option("--corpus", "Mask words in sentences of this corpus's held-out documents.")
    ] = None,
    number: Annotated[int, typer.Option("-n", min=1, help="Number of sentences to take from --corpus.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of texts decoded together.")] = 16,
    likeliest: Annotated[int, typer.Option(min=0, help="Likeliest fillings to show for each masked span.")] = 0,
    engine: Annotated[str, typer.Option(help="pytorch, or ctranslate2: faster on CPUs, for T5 and BART.")] = "pytorch",
    quantization: Annotated[
        str | None, typer.Option(help="int8: weights of 8 bits, with --engine ctranslate2.")
    ] = None,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="One object per line: text, generated, whole.")] = False,
    out: Annotated[Path | None, path_option("--out", "A new file, instead of stdout.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum length of an answer.")] = 128,
    min_new_tokens: Annotated[int, typer.Option(help="Minimum length of an answer.")] = 0,
    no_repeat_ngram_size: Annotated[int, typer.Option(help="Never repeat an n-gram of this size; 0: no limit.")] = 0,
    num_beams: Annotated[int, typer.Option(help="More than 1: beam search.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="For beam search; above 0 favours long answers.")] = 1.0,
    early_stopping: Annotated[str, typer.Option(help="For beam search: true, false or never.")] = "false",
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token; above 0: sampling.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[
        float, typer.Option(help="Sample among the fewest tokens with this total probability, after --top-k.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the masks and of sampling.")] = 0,
) -> None:
    """Fill masked spans, answer or continue a text, depending on the model."""
    from data_pipeline import corpus as corpora
    from data_pipeline.foundation import config_file
    from pretrain import models
    from pretrain.evaluate.generation import blanks, ctranslate2_engine
    from pretrain.evaluate.generation import settings as generation
    from pretrain.evaluate.generation import texts as answering

    given = {name: context.params[name] for name in generation.GenerationSettings.model_fields}
    settings = config_file.check(given, generation.GenerationSettings, "generate")
    if engine not in ("pytorch", "ctranslate2"):
        raise UserError(f"--engine: expected pytorch or ctranslate2, got {engine!r}")
    if quantization not in (None, "int8"):
        raise UserError(f"--quantization: expected int8, got {quantization!r}")
    if quantization and engine == "pytorch":
        raise UserError("--quantization is for --engine ctranslate2")
    if corpus is None:
        refuse_options(context, "for --corpus", "number")
    if out is not None and out.exists():
        raise UserError(f"{out}: exists already; choose another file")
    prompts: list[str] = []
    if texts or file or corpus is None:
        prompts = texts_of(texts or [], file, None if sys.stdin.isatty() else sys.stdin)
    trained = _open(checkpoint)
    originals: list[str | None] = [None] * len(prompts)
    if corpus is not None:
        family = trained.model.config.family
        if models.FAMILIES[family].generates != "answers":
            raise UserError(f"--corpus: models of the family {family} don't fill masked spans")
        blanked = blanks.blank_out(corpora.open_corpus(corpus), trained.tokenizer, number, seed)
        prompts += [text for text, _ in blanked]
        originals += [original for _, original in blanked]
    with ExitStack() as stack:
        other = None
        if engine == "ctranslate2":
            other = stack.enter_context(
                ctranslate2_engine.ctranslate2_engine(trained, quantization or "float32", settings)
            )
        else:
            trained = trained.on_best_device()
        written = answering.answer_texts(trained, prompts, settings, batch_size, other)
        likely = partial(blanks.likeliest_fillings, trained, number=likeliest) if likeliest else None
        stream = stack.enter_context(new_file(out)) if out else sys.stdout
        show(written, originals, jsonl, stream, likely)


@app.command("evaluate", epilog="Example: pretrain evaluate runs/quickstart --hook '{hook: samples, number: 8}'")
def evaluate_command(
    context: typer.Context,
    checkpoint: Checkpoint,
    corpora: Annotated[
        list[Path] | None,
        path_option("--corpus", "A corpus with held-out rows; may be repeated. Default: those of the run."),
    ] = None,
    suite: Annotated[str, typer.Option(help="fast: losses and the embedding's shape. full: all hooks.")] = "fast",
    hooks: Annotated[
        list[str] | None,
        typer.Option(
            "--hook", help="Only this hook, by name or as in a run file: {hook: samples, number: 8}. May be repeated."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples that a rank evaluates at once.")] = 8,
    out: Annotated[Path | None, path_option("--out", "A directory for tables and pictures.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="One object: metrics by name.")] = False,
    lm_eval: Annotated[
        str | None, typer.Option(metavar="TASKS", help="Instead of hooks: tasks of the lm-evaluation-harness, a,b,….")
    ] = None,
    include_path: Annotated[
        Path | None, path_option("--include-path", "A folder with tasks of your own, for --lm-eval.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(help="The form of prompts: answer, blank or copy. Default: as the model was trained."),
    ] = None,
    few_shot: Annotated[int | None, typer.Option(min=0, help="For --lm-eval: examples before each question.")] = None,
    minimal_pairs: Annotated[
        Path | None, path_option("--minimal-pairs", "Instead of hooks: a folder of minimal pairs such as BLiMP's.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help="At most this many examples of each task or paradigm, for --lm-eval and --minimal-pairs."
        ),
    ] = None,
) -> None:
    """Run evaluation hooks or tasks on a checkpoint, on one rank or those of a launcher."""
    from pretrain.config import evaluation
    from pretrain.engine.checkpoint import directory as directories
    from pretrain.evaluate import lm_eval as harness
    from pretrain.tools import evaluate

    if suite not in evaluation.SUITES:
        raise UserError(f"--suite: expected {' or '.join(evaluation.SUITES)}, got {suite!r}")
    if lm_eval is not None and minimal_pairs is not None:
        raise UserError("--lm-eval and --minimal-pairs: each runs instead of hooks; give only one")
    if lm_eval is not None or minimal_pairs is not None:
        instead = "--lm-eval" if lm_eval is not None else "--minimal-pairs"
        refuse_options(context, f"for hooks, which {instead} replaces", "corpora", "suite", "hooks")
    else:
        refuse_options(context, "for --lm-eval and --minimal-pairs", "form", "limit")
    if lm_eval is None:
        refuse_options(context, "for --lm-eval", "include_path", "few_shot")
    if hooks:
        refuse_options(context, "not with --hook, which names the hooks one by one", "suite")
    directory = directories.checkpoint_in(checkpoint)
    if lm_eval is not None:
        settings = harness.LmEvalSettings(lm_eval.split(","), include_path, few_shot, limit)
        evaluate.evaluate_on_tasks(directory, settings, form, batch_size, out, json_)
    elif minimal_pairs is not None:
        evaluate.evaluate_on_pairs(directory, minimal_pairs, form, limit, batch_size, out, json_)
    else:
        evaluate.evaluate(directory, corpora or [], suite, hooks or [], batch_size, out, json_)


@app.command(epilog="Example: pretrain attention runs/quickstart 'The <extra_id_0> is red.' --out pictures")
def attention(
    checkpoint: Checkpoint,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the model reads; may have <extra_id_0> … .")],
    target: Annotated[str | None, typer.Option(help="What its decoder reads. Default: what the model answers.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="The most tokens on an axis.")] = 40,
    out: Annotated[Path, path_option("--out", "A directory for the pictures.")] = Path("attention"),
) -> None:
    """Draw what each layer and head attends to."""
    from pretrain.tools import evaluate

    trained = _open(checkpoint).on_best_device()
    for path in evaluate.draw_attention(trained, text, target, tokens, out):
        print(path)


@app.command(epilog="Example: pretrain export runs/quickstart exports/quickstart")
def export(
    context: typer.Context,
    checkpoint: Checkpoint,
    out: NewDirectory,
    register: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also register it in the run's MLflow, as a new version of NAME.")
    ] = None,
    uri: Annotated[
        str | None, path_option("--uri", "The URI of that MLflow, if its password isn't recorded.", paths.mlflow_uri)
    ] = None,
    engine: Annotated[
        str, typer.Option("--for", metavar="ENGINE", help="Who will run it: transformers or ctranslate2.")
    ] = "transformers",
    encoder_only: Annotated[
        bool, typer.Option("--encoder-only", help="The encoder alone, without the decoder.")
    ] = False,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also send it to the Hugging Face Hub, as NAME or OWNER/NAME.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Everybody may read it there. Default: private.")] = False,
) -> None:
    """Write a directory that Hugging Face transformers can load, with a model card."""
    from pretrain import export as huggingface
    from pretrain.engine.checkpoint import directory as directories
    from pretrain.export import card, push
    from pretrain.train.tracking import checkpoints as registry

    if register is None:
        refuse_options(context, "for --register", "uri")
    if push_to_hub is None:
        refuse_options(context, "for --push-to-hub", "public")
    directory = directories.checkpoint_in(checkpoint)
    destination = push.Destination.of(push_to_hub, public) if push_to_hub is not None else None
    trained = _open(directory)
    registration = registry.Registration.of(directory, register, uri) if register is not None else None
    usage = huggingface.export(
        trained.model.state_dict(),
        trained.model.config,
        trained.tokenizer,
        out,
        engine=engine,
        encoder_only=encoder_only,
        lineage=card.lineage(directory),
    )
    print(f"{out}: {usage}")
    if destination is not None:
        print(destination.describe(out), flush=True)
        print(f"sent: {destination.send(out)}")
    if registration is not None:
        model = registration.register(out)
        print(f"{model} is registered. Next: MLFLOW_TRACKING_URI={masked(registration.uri)} \\")
        print(f"  mlflow artifacts download -u {model} -d {register}")


@app.command(epilog="Example: pretrain average runs/quickstart averaged --last 2")
def average(
    checkpoints: Annotated[
        list[Path],
        path_argument("CHECKPOINT… OUT", "Checkpoints, or a run directory for its latest; then a new directory."),
    ],
    last: Annotated[int, typer.Option(min=1, help="The last checkpoints of the run, instead of the latest alone.")] = 1,
    ema: Annotated[bool, typer.Option("--ema", help="Average the moving averages (optimizer.ema_decay).")] = False,
) -> None:
    """Average the weights of checkpoints into one that evaluate, generate, export and init_from read."""
    from pretrain.engine.checkpoint import directory as directories
    from pretrain.engine.checkpoint import trained as trained_models

    *sources, out = checkpoints
    if not sources:
        raise UserError("average: give checkpoints, or a run, and then a new directory")
    if last > 1 and len(sources) > 1:
        raise UserError(f"--last is for one run directory, and there are {len(sources)} paths")
    averaged = (
        trained_models.last_checkpoints(sources[0], last)
        if last > 1
        else [directories.checkpoint_in(path) for path in sources]
    )
    parameters = trained_models.average(averaged, out, ema)
    print(f"{out}: {parameters:,} parameters, the mean of {', '.join(map(str, averaged))}.")
    print(f"Next: pretrain evaluate {out}")


@app.command("import", epilog="Example: pretrain import t5-small imported/t5-small")
def import_(
    model: Annotated[
        Path, path_argument("HF_DIR", "A saved transformers model with its tokenizer, or a checkpoint of Yan's code.")
    ],
    out: NewDirectory,
    tokenizer: Annotated[
        Path | None, path_option("--tokenizer", "A directory with GPT-2's vocab.json and merges.txt, for Yan's code.")
    ] = None,
) -> None:
    """Convert a Hugging Face directory, or a file of Yan's own code, into a checkpoint that a run can start from."""
    from pretrain import export as huggingface
    from pretrain.engine.checkpoint import tensors

    if model.is_file() and tokenizer is None:
        raise UserError(f"{model}: a file; a checkpoint of Yan's code needs --tokenizer DIR, with GPT-2's files")
    if not model.is_file() and tokenizer is not None:
        raise UserError(f"--tokenizer: {model} is no file; a directory has its own tokenizer")
    config = huggingface.import_yan(model, tokenizer, out) if tokenizer else huggingface.import_(model, out)
    print(f"{out}: a {config.family} with {config.vocab_size:,} ids.")
    for name, values in tensors.read_buffers(out).items():
        print(
            f"{name} is kept as it is: {int(values.count_nonzero()):,} of its numbers aren't 0. No training changes it."
        )
    print(f"Next: pretrain train RUN.yaml checkpoint.init_from={out}")


@app.command("adapt", epilog="Example: pretrain adapt gemma-2-2b adapted --style t5gemma")
def adapt_command(
    decoder: Annotated[
        Path, path_argument("DECODER", "A decoder-only model: a saved transformers model, a checkpoint or a run.")
    ],
    out: NewDirectory,
    style: Annotated[str, typer.Option(help="The family of the result: t5gemma, t5gemma2 or modern.")],
    encoder: Annotated[
        Path | None,
        path_option("--encoder", "Another decoder-only model, which becomes the encoder. Default: DECODER too."),
    ] = None,
    sentinels: Annotated[
        int | None, typer.Option(min=0, help="Sentinels to add to a tokenizer without. Default: none.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights that a decoder-only model lacks.")] = 0,
) -> None:
    """Turn a decoder-only model into an encoder-decoder that a run can start from."""
    from pretrain.tools import adapt

    for line in adapt.adapt(decoder, out, style, encoder, sentinels, seed):
        print(line)
    print(f"Next: pretrain train RUN.yaml checkpoint.init_from={out}, where RUN.yaml extends {out}/model.yaml")


def _open(path: Path) -> "trained_models.TrainedModel":
    from pretrain.engine.checkpoint import directory as directories
    from pretrain.engine.checkpoint import trained as trained_models

    return trained_models.TrainedModel.open(directories.checkpoint_in(path))


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
    try:
        read = file.read_text(encoding="utf-8-sig", errors="surrogateescape") if file else piped.read() if piped else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file or 'stdin'}: can't be read: {error}") from None
    lines = read.split("\n")
    if wrong := [number for number, line in enumerate(lines, 1) if not is_utf8(line)]:
        raise UserError(f"{file or 'stdin'}: line {wrong[0]} isn't UTF-8")
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

    `originals`: the texts before words were masked, if known; shown beside the answers. `fillings` gives the
    likeliest fillings of each masked span of a text.
    """
    if not out.isatty():  # rich redirects sys.stdout to the bar's terminal, so `out` must not be sys.stdout itself
        written = track(written, len(originals), "generate")
    told = False
    if fillings and not jsonl:
        out.write(_ABOUT_FILLINGS)
    for one, original in zip(written, originals, strict=True):
        fillings_of_blanks = fillings(one.text) if fillings and one.has_blanks else []
        out.write(_as_json(one, original, fillings_of_blanks) if jsonl else _as_text(one, original, fillings_of_blanks))
        if not jsonl and not told and one.has_blanks and "[]" in one.whole and "[]" not in one.text:
            print(_ABOUT_EMPTY, file=sys.stderr)
            told = True
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
    lines = [f"masked    {one.text}", f"model     {one.whole}", *([f"original  {original}"] if original else [])]
    for number, fillings in enumerate(fillings_of_blanks):
        words = "   ".join(f"[{filling.text}] {filling.probability:.1%}" for filling in fillings)
        lines.append(f"span {number:<4} {words}")
    return "\n".join(lines) + "\n\n"
