"""Commands that use a checkpoint or make one: generate, evaluate, export, import and the like."""

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data_pipeline.foundation import paths
from data_pipeline.foundation.command import path_argument, path_option
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.secrets import masked
from pretrain.cli.app import Checkpoint, NewDirectory, app

if TYPE_CHECKING:
    from pretrain.checkpoint.trained import TrainedModel


@app.command(epilog="Example: pretrain generate runs/quickstart 'The <extra_id_0> is red.' --likeliest 5")
def generate(
    context: typer.Context,
    checkpoint: Checkpoint,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="With <extra_id_0> … as blanks.")] = None,
    file: Annotated[Path | None, path_option("--file", "One text per line. Default without texts: stdin.")] = None,
    corpus: Annotated[
        Path | None, path_option("--corpus", "Blank out sentences of this corpus's held-out documents.")
    ] = None,
    number: Annotated[int, typer.Option("-n", min=1, help="Number of sentences to take from --corpus.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of texts decoded together.")] = 16,
    likeliest: Annotated[int, typer.Option(min=0, help="Likeliest fillings to show for each blank.")] = 0,
    engine: Annotated[str, typer.Option(help="pytorch, or ctranslate2: faster on CPUs, for T5 and BART.")] = "pytorch",
    quantization: Annotated[
        str | None, typer.Option(help="int8: multiply by weights of 8 bits, with CTranslate2.")
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
    seed: Annotated[int, typer.Option(help="Seed of the blanks and of sampling.")] = 0,
) -> None:
    """Fill in blanks, answer or continue a text, depending on the model."""
    from data_pipeline.foundation.config_file import check
    from pretrain.generation.settings import GenerationSettings

    given = {name: context.params[name] for name in GenerationSettings.model_fields}
    settings = check(given, GenerationSettings, "generate")
    if engine not in ("pytorch", "ctranslate2"):
        raise UserError(f"--engine: expected pytorch or ctranslate2, got {engine!r}")
    if quantization not in (None, "int8"):
        raise UserError(f"--quantization: expected int8, got {quantization!r}")
    if quantization and engine == "pytorch":
        raise UserError("--quantization is for --engine ctranslate2")
    if out is not None and out.exists():
        raise UserError(f"{out}: exists already; choose another file")
    from pretrain.generation.command import new_file, show, texts_of

    prompts: list[str] = []
    if texts or file or corpus is None:
        prompts = texts_of(texts or [], file, None if sys.stdin.isatty() else sys.stdin)
    trained = _open(checkpoint)
    originals: list[str | None] = [None] * len(prompts)
    if corpus is not None:
        from data_pipeline.corpus import open_corpus
        from pretrain.generation.blanks import blank_out
        from pretrain.models import FAMILIES

        family = trained.model.config.family
        if FAMILIES[family].generates != "answers":
            raise UserError(f"--corpus: models of the family {family} don't fill in blanks")
        blanked = blank_out(open_corpus(corpus), trained.tokenizer, number, seed)
        prompts += [blanks for blanks, _ in blanked]
        originals += [original for _, original in blanked]
    from pretrain.generation.ctranslate2_engine import ctranslate2_engine
    from pretrain.generation.texts import answer_texts

    with ExitStack() as stack:
        other = None
        if engine == "ctranslate2":
            other = stack.enter_context(ctranslate2_engine(trained, quantization or "float32", settings))
        else:
            trained = trained.on_best_device()
        written = answer_texts(trained, prompts, settings, batch_size, other)
        fillings = None
        if likeliest:
            from pretrain.generation.blanks import likeliest_fillings

            fillings = partial(likeliest_fillings, trained, number=likeliest)
        stream = stack.enter_context(new_file(out)) if out else sys.stdout
        show(written, originals, jsonl, stream, fillings)


@app.command(epilog="Example: pretrain evaluate runs/quickstart --hook '{hook: samples, number: 8}'")
def evaluate(
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
    batch_size: Annotated[int, typer.Option(min=1, help="Rows that a rank evaluates together.")] = 8,
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
        typer.Option(help="Of prompts: answer, blank or copy. Default: as the encoder-decoder was trained."),
    ] = None,
    few_shot: Annotated[int | None, typer.Option(min=0, help="For --lm-eval: examples before each question.")] = None,
    minimal_pairs: Annotated[
        Path | None, path_option("--minimal-pairs", "Instead of hooks: a folder of minimal pairs such as BLiMP's.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="The most rows of each task or paradigm, for --lm-eval and its like.")
    ] = None,
) -> None:
    """Run evaluation hooks or tasks on a checkpoint, on one rank or those of a launcher."""
    from pretrain.config.evaluation import SUITES

    if suite not in SUITES:
        raise UserError(f"--suite: expected {' or '.join(SUITES)}, got {suite!r}")
    from pretrain.checkpoint.choose import checkpoint_in
    from pretrain.cli import evaluate as command

    if lm_eval is not None:
        from pretrain.evaluation.lm_eval import LmEvalSettings

        settings = LmEvalSettings(lm_eval.split(","), include_path, few_shot, limit)
        command.evaluate_on_tasks(checkpoint_in(checkpoint), settings, form, batch_size, out, json_)
        return
    if include_path or few_shot is not None:
        raise UserError("--include-path and --few-shot are for --lm-eval")
    if minimal_pairs is not None:
        command.evaluate_on_pairs(checkpoint_in(checkpoint), minimal_pairs, form, limit, batch_size, out, json_)
        return
    if form or limit is not None:
        raise UserError("--form and --limit are for --lm-eval and --minimal-pairs")
    command.evaluate(checkpoint_in(checkpoint), corpora or [], suite, hooks or [], batch_size, out, json_)


@app.command(epilog="Example: pretrain attention runs/quickstart 'The <extra_id_0> is red.' --out pictures")
def attention(
    checkpoint: Checkpoint,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the model reads; may have <extra_id_0> … .")],
    target: Annotated[str | None, typer.Option(help="What its decoder reads. Default: what the model answers.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="The most tokens on an axis.")] = 40,
    out: Annotated[Path, path_option("--out", "A directory for the pictures.")] = Path("attention"),
) -> None:
    """Draw what each layer and head attends to."""
    trained = _open(checkpoint).on_best_device()
    from pretrain.cli.evaluate import draw_attention

    for path in draw_attention(trained, text, target, tokens, out):
        print(path)


@app.command(epilog="Example: pretrain export runs/quickstart exports/quickstart")
def export(
    checkpoint: Checkpoint,
    out: NewDirectory,
    register: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also register it in the run's MLflow, as a new version of NAME.")
    ] = None,
    uri: Annotated[
        str | None, path_option("--uri", "That MLflow, if its password isn't recorded.", paths.mlflow_uri)
    ] = None,
    engine: Annotated[
        str, typer.Option("--for", metavar="ENGINE", help="Who will run it: transformers or ctranslate2.")
    ] = "transformers",
    encoder_only: Annotated[
        bool, typer.Option("--encoder-only", help="The encoder alone, without the decoder.")
    ] = False,
) -> None:
    """Write a directory that Hugging Face transformers can load, with a model card."""
    from pretrain.checkpoint.choose import checkpoint_in

    directory = checkpoint_in(checkpoint)
    trained = _open(directory)
    from pretrain import huggingface
    from pretrain.huggingface.card import lineage

    registration = None
    if register is not None:
        from pretrain.tracking.checkpoints import Registration

        registration = Registration.of(directory, register, uri)
    usage = huggingface.export(
        trained.model.state_dict(),
        trained.model.config,
        trained.tokenizer,
        out,
        engine=engine,
        encoder_only=encoder_only,
        lineage=lineage(directory),
    )
    print(f"{out}: {usage}")
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
    *sources, out = checkpoints
    if not sources:
        raise UserError("average: give checkpoints, or a run, and then a new directory")
    if last > 1 and len(sources) > 1:
        raise UserError(f"--last is for one run directory, and there are {len(sources)} paths")
    from pretrain.checkpoint.choose import checkpoint_in
    from pretrain.checkpoint.trained import average as make
    from pretrain.checkpoint.trained import last_checkpoints

    averaged = last_checkpoints(sources[0], last) if last > 1 else [checkpoint_in(path) for path in sources]
    parameters = make(averaged, out, ema)
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
    from pretrain.checkpoint.tensors import read_buffers
    from pretrain.huggingface import import_ as make
    from pretrain.huggingface import import_yan

    if model.is_file() and tokenizer is None:
        raise UserError(f"{model}: a file; a checkpoint of Yan's code needs --tokenizer DIR, with GPT-2's files")
    if not model.is_file() and tokenizer is not None:
        raise UserError(f"--tokenizer: {model} is no file; a directory has its own tokenizer")
    config = import_yan(model, tokenizer, out) if tokenizer else make(model, out)
    print(f"{out}: a {config.family} with {config.vocab_size:,} ids.")
    for name, values in read_buffers(out).items():
        print(
            f"{name} is kept as it is: {int(values.count_nonzero()):,} of its numbers aren't 0. No training changes it."
        )
    print(f"Next: pretrain train RUN.yaml checkpoint.init_from={out}")


@app.command(epilog="Example: pretrain adapt gemma-2-2b adapted --style t5gemma")
def adapt(
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
    from pretrain.tools.adapt import adapt as make

    for line in make(decoder, out, style, encoder, sentinels, seed):
        print(line)
    print(f"Next: pretrain train RUN.yaml checkpoint.init_from={out}, where RUN.yaml extends {out}/model.yaml")


def _open(path: Path) -> "TrainedModel":
    from pretrain.checkpoint.choose import checkpoint_in
    from pretrain.checkpoint.trained import TrainedModel

    return TrainedModel.open(checkpoint_in(path))
