"""The command `pretrain`: trains models on corpora, and generates with, exports and tracks them."""

import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data_pipeline.foundation import paths
from data_pipeline.foundation.command import Version, config_path, path_argument, path_option, run_command
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.secrets import masked

if TYPE_CHECKING:
    from pretrain.checkpoint.trained import TrainedModel

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)

RunPath = Annotated[Path, path_argument("RUN.yaml", "The run file. `pretrain reference` shows its keys.", config_path)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides: optimizer.learning_rate=1e-3")
]
Checkpoint = Annotated[Path, path_argument("CHECKPOINT", "A checkpoint, or a run directory for its latest.")]
GPUS_PER_NODE = 8  # of the common servers
NewDirectory = Annotated[Path, path_argument("OUT", "A new directory.")]


def _folder(text: str) -> Path:
    return Path(paths.config_folder(text))


@app.callback()
def _started_by_a_launcher(
    version: Version = False, local_rank: Annotated[int | None, typer.Option("--local_rank", hidden=True)] = None
) -> None:
    """Train models on corpora, and generate with, export and track them."""
    # the deepspeed launcher passes --local_rank to each rank; the environment holds the same number


@app.command()
def train(
    config: RunPath,
    overrides: Overrides = None,
    stop_at_step: Annotated[
        int | None, typer.Option(min=1, help="Save and stop (exit code 75) after this step.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start a new run; the existing one is moved aside.")] = False,
) -> None:
    """Train in one process, resuming from the latest checkpoint; `launch local` starts several."""
    from data_pipeline.foundation.config_file import load
    from data_pipeline.loading import server
    from pretrain.config import RunConfig
    from pretrain.run import rank_logs

    settings = load(config, overrides or [], RunConfig)
    if settings.data.workers:
        server.start()  # it imports PyTorch while this process does
    from pretrain.train import train as run  # slow to import, and not needed to refuse a wrong run file

    code = run(settings, stop_at_step, fresh)
    # the supervisor reads RUN/status.json; the deepspeed launcher would take any other code for a crash
    raise typer.Exit(0 if rank_logs.supervised() else code)


@app.command()
def experiment(
    directory: Annotated[
        Path, path_argument("DIR", "A folder of run files, or configs:NAME for one that ships.", _folder)
    ],
    overrides: Overrides = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each file, with seeds from its run.seed on.")] = 3,
    budget: Annotated[
        str | None, typer.Option(metavar="STEPS", help="400steps or 5%: shortens every run, warm-up and schedule too.")
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time. Default: one per GPU, or one.")
    ] = None,
    out: Annotated[
        Path | None, path_option("--out", "Where runs and table go. Default: runs/NAME, with the budget.")
    ] = None,
    train: Annotated[bool, typer.Option(help="Train; or only make the table of the runs that have finished.")] = True,
) -> None:
    """Train every run file of a folder with several seeds, and compare them in a table.

    Resumable: finished runs are kept, cut ones go on. A run that fails doesn't end the others.
    """
    from pretrain.experiment.command import experiment as run

    raise typer.Exit(run(directory, seeds, budget, at_once, out, overrides or [], train))


@app.command()
def ladder(
    config: Annotated[
        Path, path_argument("LADDER.yaml", "A ladder file, or configs:NAME for one that ships.", config_path)
    ],
    overrides: Overrides = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each rung, with seeds from run.seed on.")] = 1,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time. Default: one per GPU, or one.")
    ] = None,
    out: Annotated[Path | None, path_option("--out", "Where runs and table go. Default: runs/NAME.")] = None,
    train: Annotated[bool, typer.Option(help="Train; or only fit the rungs that have finished.")] = True,
    next_: Annotated[bool, typer.Option("--next", help="Train the next rung too, and compare it.")] = False,
) -> None:
    """Train models of growing size, fit a law to their losses, and predict the next size's.

    Resumable: finished runs are kept, cut ones go on. A run that fails doesn't end the others.
    """
    from pretrain.ladder.command import ladder as run

    raise typer.Exit(run(config, seeds, at_once, out, overrides or [], train, next_))


@app.command("mup-check")
def mup_check(
    config: RunPath,
    overrides: Overrides = None,
    widths: Annotated[
        str | None,
        typer.Option(help="At least three widths: 64,128,256,512. Default: doublings of the least possible."),
    ] = None,
    out: Annotated[
        Path | None, path_option("--out", "Where table and picture go. Default: runs/mup-check-NAME.")
    ] = None,
) -> None:
    """Check on a CPU that activations and the best learning rate stay the same over widths (exit code 1 if not)."""
    from pretrain.mup_check.command import mup_check as run

    raise typer.Exit(run(config, overrides or [], widths, out))


@app.command()
def plan(
    config: RunPath,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs.")],
    gpu: Annotated[str, typer.Option(metavar="NAME", help="a100-80gb, h100-sxm …; an unknown name lists all.")],
    overrides: Overrides = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes. Default: 8 GPUs a node.")] = None,
    mfu: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of its peak that a GPU reaches while it computes.")
    ] = 0.31,
    price: Annotated[float, typer.Option(min=0.0, help="Dollars for a GPU and an hour.")] = 2.0,
    network: Annotated[
        float | None, typer.Option(min=0.1, help="GB/s from a GPU to other nodes. Default: typical of the GPU.")
    ] = None,
    inputs: Annotated[int | None, typer.Option(min=1, help="Input tokens of a row. Default: the corpus's.")] = None,
    targets: Annotated[int | None, typer.Option(min=1, help="Target tokens of a row. Default: the corpus's.")] = None,
    days: Annotated[
        float | None, typer.Option(min=0.01, help="The cheapest GPUs are sought among those that end within so long.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One object, in bytes, seconds and FLOPs.")] = False,
) -> None:
    """Say what fits on which GPUs, how long a run takes and what it costs. Needs no GPU, no network and no corpus."""
    from data_pipeline.foundation.config_file import load
    from pretrain.config import RunConfig
    from pretrain.gpus import gpu_named

    settings, kind = load(config, overrides or [], RunConfig), gpu_named(gpu)
    nodes = nodes or -(-gpus // GPUS_PER_NODE)
    if gpus % nodes:
        raise UserError(f"--gpus: {gpus} can't be divided evenly among {nodes} nodes; set --nodes to a divisor of it")
    from rich.console import Console

    from pretrain.plan import report
    from pretrain.plan.fit import Planner, Question
    from pretrain.plan.row import described

    settings, row = described(settings, config, inputs, targets)
    question = Question(settings, row, gpu, kind, gpus // nodes, network or kind.network, mfu, price, days)
    planner = Planner(question)
    if json_:
        print(json.dumps(report.as_json(planner, gpus), indent=1))
    else:
        report.show(planner, gpus, Console(width=None if sys.stdout.isatty() else report.WIDTH))


@app.command()
def reference() -> None:
    """Show every key of corpus files and run files, with default and meaning: docs/reference.md."""
    from pretrain.reference import page

    print(page(), end="")


@app.command()
def generate(
    checkpoint: Checkpoint,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="With <extra_id_0> … as blanks.")] = None,
    file: Annotated[Path | None, path_option("--file", "One text per line. Default without texts: stdin.")] = None,
    corpus: Annotated[
        Path | None, path_option("--corpus", "Blank out sentences of this corpus's held-out documents.")
    ] = None,
    number: Annotated[int, typer.Option("-n", min=1, help="Number of sentences to take from --corpus.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of texts decoded together.")] = 16,
    likeliest: Annotated[int, typer.Option(min=0, help="Likeliest fillings to show for each blank.")] = 0,
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

    given = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min_new_tokens,
        "no_repeat_ngram_size": no_repeat_ngram_size,
        "num_beams": num_beams,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
    }
    settings = check(given, GenerationSettings, "generate")
    if out is not None and out.exists():
        raise UserError(f"{out}: exists already; choose another file")
    from pretrain.generation.command import new_file, show, texts_of

    wanted: list[str] = []
    if texts or file or corpus is None:
        wanted = texts_of(texts or [], file, None if sys.stdin.isatty() else sys.stdin)
    trained = _open(checkpoint)
    originals: list[str | None] = [None] * len(wanted)
    if corpus is not None:
        from data_pipeline.corpus import open_corpus
        from pretrain.generation.fill_blanks import blank_out
        from pretrain.models import FAMILIES

        family = trained.model.config.family
        if FAMILIES[family].generates != "answers":
            raise UserError(f"--corpus: models of the family {family} don't fill in blanks")
        blanked = blank_out(open_corpus(corpus), trained.tokenizer, number, seed)
        wanted += [blanks for blanks, _ in blanked]
        originals += [original for _, original in blanked]
    from pretrain.generation.texts import write

    trained = trained.on_best_device()
    written = write(trained, wanted, settings, batch_size)
    fillings = None
    if likeliest:
        from pretrain.generation.fillings import likeliest_fillings

        fillings = partial(likeliest_fillings, trained, number=likeliest)
    with new_file(out) if out else nullcontext(sys.stdout) as stream:
        show(written, originals, jsonl, stream, fillings)


@app.command()
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
        typer.Option(help="For --lm-eval: answer, blank or copy. Default: as the encoder-decoder was trained."),
    ] = None,
    few_shot: Annotated[int | None, typer.Option(min=0, help="For --lm-eval: examples before each question.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="For --lm-eval: only so many rows of each task.")] = None,
) -> None:
    """Run evaluation hooks or tasks on a checkpoint, on one rank or those of a launcher."""
    from pretrain.hook_settings import SUITES

    if suite not in SUITES:
        raise UserError(f"--suite: expected {' or '.join(SUITES)}, got {suite!r}")
    from pretrain.checkpoint.choose import checkpoint_in
    from pretrain.evaluation import command

    if lm_eval is not None:
        from pretrain.evaluation.harness import HarnessSettings

        settings = HarnessSettings(lm_eval.split(","), include_path, few_shot, limit)
        command.evaluate_on_tasks(checkpoint_in(checkpoint), settings, form, batch_size, out, json_)
        return
    if include_path or form or few_shot is not None or limit is not None:
        raise UserError("--include-path, --form, --few-shot and --limit are for --lm-eval")
    command.evaluate(checkpoint_in(checkpoint), corpora or [], suite, hooks or [], batch_size, out, json_)


@app.command()
def attention(
    checkpoint: Checkpoint,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the model reads; may have <extra_id_0> … .")],
    target: Annotated[str | None, typer.Option(help="What its decoder reads. Default: what the model answers.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="The most tokens on an axis.")] = 40,
    out: Annotated[Path, path_option("--out", "A directory for the pictures.")] = Path("attention"),
) -> None:
    """Draw what each layer and head attends to."""
    trained = _open(checkpoint).on_best_device()
    from pretrain.evaluation.command import draw_attention

    for path in draw_attention(trained, text, target, tokens, out):
        print(path)


@app.command()
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
        str, typer.Option("--for", metavar="ENGINE", help="Who will run it: transformers, ctranslate2 or llama.cpp.")
    ] = "transformers",
    encoder_only: Annotated[
        bool, typer.Option("--encoder-only", help="The encoder alone, without the decoder.")
    ] = False,
) -> None:
    """Write a directory that Hugging Face transformers can load, with a model card."""
    if register is not None and encoder_only:
        raise UserError("--register: an encoder by itself doesn't generate text, so it couldn't be served")
    from pretrain.checkpoint.choose import checkpoint_in

    directory = checkpoint_in(checkpoint)
    trained = _open(directory)
    from pretrain import huggingface
    from pretrain.huggingface.provenance import provenance

    family, registration = trained.model.config.family, None
    if register is not None:
        from pretrain.models import FAMILIES
        from pretrain.tracking.registry import Registration

        if FAMILIES[family].generates is None:
            raise UserError(f"--register: models of the family {family} don't generate text, so none could be served")
        registration = Registration.of(directory, register, uri)
    usage = huggingface.export(
        trained.model.state_dict(),
        trained.model.config,
        trained.tokenizer,
        out,
        engine=engine,
        encoder_only=encoder_only,
        origin=provenance(directory),
    )
    print(f"{out}: {usage}")
    if registration is not None:
        model = registration.register(out)
        print(f"{model} is registered. Next: MLFLOW_TRACKING_URI={masked(registration.uri)} \\")
        print(f"  mlflow models serve --env-manager local -m {model}")


@app.command()
def average(
    places: Annotated[
        list[Path],
        path_argument("CHECKPOINT… OUT", "Checkpoints, or a run directory for its latest; then a new directory."),
    ],
    last: Annotated[int, typer.Option(min=1, help="The last checkpoints of the run, instead of the latest alone.")] = 1,
    ema: Annotated[bool, typer.Option("--ema", help="Average the moving averages (optimizer.ema_decay).")] = False,
) -> None:
    """Average the weights of checkpoints into one that evaluate, generate, export and init_from read."""
    *given, out = places
    if not given:
        raise UserError("average: give checkpoints, or a run, and then a new directory")
    if last > 1 and len(given) > 1:
        raise UserError(f"--last is for one run directory, and there are {len(given)} places")
    from pretrain.checkpoint.average import average as make
    from pretrain.checkpoint.average import last_checkpoints
    from pretrain.checkpoint.choose import checkpoint_in

    checkpoints = last_checkpoints(given[0], last) if last > 1 else [checkpoint_in(place) for place in given]
    parameters = make(checkpoints, out, ema)
    print(f"{out}: {parameters:,} parameters, the mean of {', '.join(map(str, checkpoints))}.")
    print(f"Next: pretrain evaluate {out}")


@app.command()
def push(
    export: Annotated[Path, path_argument("EXPORT", "A directory that `pretrain export` has written.")],
    repository: Annotated[str, typer.Argument(metavar="REPO_ID", help="The repository of a model: owner/name.")],
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Another server than HF_ENDPOINT or the Hugging Face Hub.")
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Make the repository first, private.")] = False,
) -> None:
    """Upload an export to the Hugging Face Hub, with the token in HF_TOKEN or of `hf auth login`."""
    from pretrain.huggingface.push import push as upload

    print(f"{export}: uploaded to {upload(export, repository, endpoint, create)}")


@app.command("import")
def import_(
    directory: Annotated[Path, path_argument("HF_DIR", "A saved transformers model with its tokenizer.")],
    out: NewDirectory,
) -> None:
    """Convert a Hugging Face directory into a checkpoint that a run can start from."""
    from pretrain.checkpoint.buffers import read_buffers
    from pretrain.huggingface import import_ as make

    config = make(directory, out)
    print(f"{out}: a {config.family} with {config.vocab_size:,} ids.")
    for name, values in read_buffers(out).items():
        print(
            f"{name} is kept as it is: {int(values.count_nonzero()):,} of its numbers aren't 0. No training changes it."
        )
    print(f"Next: pretrain train RUN.yaml checkpoint.init_from={out}")


@app.command()
def adapt(
    decoder: Annotated[
        Path, path_argument("DECODER", "A decoder alone: a saved transformers model, a checkpoint or a run.")
    ],
    out: NewDirectory,
    style: Annotated[str, typer.Option(help="The family of the result: t5gemma, t5gemma2 or modern.")],
    encoder: Annotated[
        Path | None, path_option("--encoder", "Another decoder alone, which becomes the encoder. Default: DECODER too.")
    ] = None,
    sentinels: Annotated[
        int | None, typer.Option(min=0, help="Sentinels to add to a tokenizer without. Default: none.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights that no decoder has.")] = 0,
) -> None:
    """Turn a decoder alone into an encoder-decoder that a run can start from."""
    from pretrain.adapt.command import adapt as make

    for line in make(decoder, out, style, encoder, sentinels, seed):
        print(line)
    print(f"Next: pretrain train RUN.yaml checkpoint.init_from={out}, where RUN.yaml extends {out}/model.yaml")


@app.command()
def dashboard(
    run_dir: Annotated[Path | None, path_argument("RUN_DIR", "Show the charts of this run.")] = None,
    uri: Annotated[
        str, path_option("--uri", "MLflow's store, if no run is given.", paths.mlflow_uri)
    ] = "sqlite:///runs/mlflow.db",
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="The first port to try; the next free one is used.")
    ] = 5000,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    print_only: Annotated[bool, typer.Option("--print", help="Only print the page's address.")] = False,
) -> None:
    """Serve the MLflow UI until Ctrl-C."""
    from pretrain.tracking.dashboard import dashboard as serve

    serve(run_dir, uri, port, browser, print_only)


@app.command()
def watch(
    run_dir: Annotated[Path, path_argument("RUN_DIR", "A run directory.")],
    once: Annotated[bool, typer.Option("--once", help="Show it once, as it is now.")] = False,
) -> None:
    """Show a run's curves and samples in the terminal, until Ctrl-C."""
    from pretrain.metrics.watch import watch as show

    show(run_dir, once)


@app.command()
def sync(
    run_dir: Annotated[Path, path_argument("RUN_DIR", "A run directory.")],
    uri: Annotated[str | None, path_option("--uri", "Another MLflow than the run's own.", paths.mlflow_uri)] = None,
) -> None:
    """Send MLflow the metrics and files of a run that it lacks."""
    from pretrain.tracking.tracker import sync as feed

    print(f"{run_dir}: {feed(run_dir, uri)} metrics sent. Next: pretrain dashboard {run_dir}")


def _open(path: Path) -> "TrainedModel":
    from pretrain.checkpoint.choose import checkpoint_in
    from pretrain.checkpoint.trained import TrainedModel

    return TrainedModel.open(checkpoint_in(path))


def main() -> None:
    run_command(app)
