"""Commands that read or write checkpoints: evaluate, export, average, import, adapt."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from data_pipeline.base.command import path_argument, path_option, refuse_options
from data_pipeline.base.errors import UserError
from pretrain.cli.app import Checkpoint, NewDirectory

commands = typer.Typer(add_completion=False)
# A command imports what it runs, so that --help and the message about a wrong option are quick: PyTorch takes 2 s and
# 200 MB, transformers 1.4 s more.


@commands.command("evaluate", epilog="Example: pretrain evaluate runs/quickstart --hook '{hook: samples, number: 8}'")
def evaluate_command(
    context: typer.Context,
    checkpoint: Checkpoint,
    corpora: Annotated[
        list[Path] | None,
        path_option(
            "--corpus",
            "A corpus whose held-out rows to evaluate; may be repeated. Default: the run's validation corpora.",
        ),
    ] = None,
    suite: Annotated[str, typer.Option(help="fast: validation_loss. full: all hooks but retrieval.")] = "fast",
    hooks: Annotated[
        list[str] | None,
        typer.Option(
            "--hook",
            help="Run only this hook, by name or as in a run file: {hook: samples, number: 8}. May be repeated.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of examples per batch on each rank.")] = 8,
    out: Annotated[Path | None, path_option("--out", "The directory for tables and pictures.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the metrics as a JSON object.")] = False,
    lm_eval: Annotated[
        str | None,
        typer.Option(metavar="TASKS", help="Instead of hooks: tasks of the lm-evaluation-harness, as a,b,…."),
    ] = None,
    include_path: Annotated[
        Path | None, path_option("--include-path", "A folder with tasks of your own, for --lm-eval.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(help="For --lm-eval: prompt format (answer, blank or copy). Default: as the model was trained."),
    ] = None,
    few_shot: Annotated[
        int | None, typer.Option(min=0, help="For --lm-eval: number of examples before each question.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="For --lm-eval: maximum number of examples per task.")
    ] = None,
) -> None:
    """Evaluate a checkpoint with hooks or tasks, on one rank or on the ranks of a launcher."""
    from pretrain.config import evaluation
    from pretrain.engine.checkpoint.index import checkpoint_in
    from pretrain.evaluate import lm_eval as harness
    from pretrain.tools import evaluate

    if suite not in evaluation.SUITES:
        raise UserError(f"--suite: expected {' or '.join(evaluation.SUITES)}, got {suite!r}")
    if lm_eval is not None:
        refuse_options(context, "for hooks, which --lm-eval replaces", "corpora", "suite", "hooks")
    else:
        refuse_options(context, "for --lm-eval", "include_path", "form", "few_shot", "limit")
    if hooks:
        refuse_options(context, "not with --hook, which names the hooks one by one", "suite")
    directory = checkpoint_in(checkpoint)
    if lm_eval is not None:
        settings = harness.LmEvalSettings(lm_eval.split(","), include_path, few_shot, limit)
        evaluate.evaluate_on_tasks(directory, settings, form, batch_size, out, json_)
    else:
        evaluate.evaluate(directory, corpora or [], suite, hooks or [], batch_size, out, json_)


@commands.command(epilog="Example: pretrain export runs/quickstart exports/quickstart")
def export(
    context: typer.Context,
    checkpoint: Checkpoint,
    out: NewDirectory,
    program: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="PROGRAM",
            help="sentence-transformers: also write modules.json, to embed texts with the encoder.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16"], typer.Option(help="Floating-point type of the weights. bf16: half the size, rounded.")
    ] = "fp32",
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also send it to the Hugging Face Hub, as NAME or OWNER/NAME.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Everybody may read it there. Default: private.")] = False,
) -> None:
    """Export a checkpoint to a directory that Hugging Face transformers loads, with a model card."""
    import torch

    from pretrain import export as huggingface
    from pretrain.engine.checkpoint import trained as trained_models
    from pretrain.engine.checkpoint.index import checkpoint_in
    from pretrain.export import card, push
    from pretrain.export.sentence_transformers_files import PROGRAM

    if push_to_hub is None:
        refuse_options(context, "for --push-to-hub", "public")
    if program not in (None, PROGRAM):
        raise UserError(f"--for: expected {PROGRAM}, got {program!r}; others read an export as it is")
    directory = checkpoint_in(checkpoint)
    trained = trained_models.TrainedModel.open(directory)
    usage = huggingface.export(
        trained.model.state_dict(),
        trained.model.config,
        trained.tokenizer,
        out,
        lineage=card.lineage(directory),
        embeds=program is not None,
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype],
    )
    print(f"{out}: {usage}")
    if push_to_hub is not None:
        print(f"sent: {push.push(out, push_to_hub, public)}")


@commands.command(epilog="Example: pretrain average runs/quickstart averaged --last 2")
def average(
    checkpoints: Annotated[
        list[Path],
        path_argument(
            "CHECKPOINT… OUT", "Checkpoints, or a run directory; then the directory to write, which must not exist."
        ),
    ],
    last: Annotated[int, typer.Option(min=1, help="Number of the run's latest checkpoints to average.")] = 1,
    ema: Annotated[bool, typer.Option("--ema", help="Average the EMA weights (optimizer.ema_decay).")] = False,
) -> None:
    """Average the weights of checkpoints into a new checkpoint, for evaluate, generate, export and init_from."""
    from pretrain.engine.checkpoint import trained as trained_models
    from pretrain.engine.checkpoint.index import checkpoint_in

    *sources, out = checkpoints
    if not sources:
        raise UserError("average: give checkpoints, or a run, and then a new directory")
    if last > 1 and len(sources) > 1:
        raise UserError(f"--last is for one run directory, and there are {len(sources)} paths")
    averaged = (
        trained_models.last_checkpoints(sources[0], last) if last > 1 else [checkpoint_in(path) for path in sources]
    )
    parameters = trained_models.average(averaged, out, ema)
    print(f"{out}: {parameters:,} parameters, the mean of {', '.join(map(str, averaged))}.")
    print(f"Next: pretrain evaluate {out}")


@commands.command("import", epilog="Example: pretrain import ./t5-small imported/t5-small")
def import_(
    model: Annotated[
        Path,
        path_argument(
            "HF_DIR", "A saved transformers model with its tokenizer. From the Hub: hf download NAME --local-dir DIR."
        ),
    ],
    out: NewDirectory,
) -> None:
    """Convert a Hugging Face model to a checkpoint that a run can start from."""
    from data_pipeline.corpus import tokenizer as tokenizers
    from pretrain import export as huggingface
    from pretrain.engine.checkpoint import tensors, trained

    config = huggingface.import_(model, out)
    print(f"{out}: a {config.family} with {config.vocab_size:,} ids.")
    for name, values in tensors.read_buffers(out).items():
        print(f"{name} is kept: {int(values.count_nonzero()):,} of its numbers aren't 0. Training doesn't change it.")
    print(f"The run file:    extends: [{out / trained.MODEL}]")
    print(f"The corpus file: {tokenizers.as_section(tokenizers.load(out), out)}")
    print(f"Next: pretrain train RUN.yaml checkpoint.init_from={out}")


@commands.command("adapt", epilog="Example: pretrain adapt gemma-2-2b adapted --style t5gemma")
def adapt_command(
    context: typer.Context,
    model: Annotated[Path, path_argument("MODEL", "A saved transformers model, a checkpoint or a run.")],
    out: NewDirectory,
    style: Annotated[
        str | None, typer.Option(help="Make an encoder-decoder of this family: t5gemma, t5gemma2 or modern.")
    ] = None,
    encoder: Annotated[
        Path | None,
        path_option("--encoder", "For --style: a decoder-only model that becomes the encoder. Default: MODEL."),
    ] = None,
    sentinels: Annotated[
        int | None,
        typer.Option(min=0, help="For --style: number of sentinels to add to a tokenizer that has none. Default: 0."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="CORPUS", help="Give the model the vocabulary of this corpus.")
    ] = None,
    new_rows: Annotated[
        str,
        typer.Option(
            help="For --tokenizer: how tokens start that the model lacks. mean: as the mean of the old tokens of their "
            "text. random: drawn."
        ),
    ] = "mean",
    seed: Annotated[int, typer.Option(help="Seed of the weights that MODEL doesn't have.")] = 0,
) -> None:
    """Turn a decoder-only model into an encoder-decoder, or give a model another vocabulary."""
    from pretrain.tools import adapt, new_vocabulary

    if (style is None) == (tokenizer is None):
        raise UserError("adapt: give --style for an encoder-decoder, or --tokenizer for another vocabulary")
    if tokenizer is not None:
        refuse_options(context, "for --style", "encoder", "sentinels")
        lines = new_vocabulary.adapt(model, out, tokenizer, new_rows, seed)
    else:
        refuse_options(context, "for --tokenizer", "new_rows")
        lines = adapt.adapt(model, out, str(style), encoder, sentinels, seed)
    for line in lines:
        print(line)
    print(f"Next: pretrain train RUN.yaml checkpoint.init_from={out}, where RUN.yaml extends {out}/model.yaml")
