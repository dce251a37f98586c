"""Commands that use a checkpoint or make one: evaluate, export, import and the like."""

from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.foundation import paths
from data_pipeline.foundation.command import path_argument, path_option, refuse_options
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import masked
from pretrain.cli.app import Checkpoint, NewDirectory, app, open_checkpoint

# A command imports what it runs, since --help and a mistyped option need none of it:
# PyTorch takes 2 s and 200 MB, transformers 1.4 s more.


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

    trained = open_checkpoint(checkpoint).on_best_device()
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
) -> None:
    """Write a directory that Hugging Face transformers can load, with a model card."""
    from pretrain import export as huggingface
    from pretrain.engine.checkpoint import directory as directories
    from pretrain.export import card
    from pretrain.train.tracking import checkpoints as registry

    if register is None:
        refuse_options(context, "for --register", "uri")
    directory = directories.checkpoint_in(checkpoint)
    trained = open_checkpoint(directory)
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
