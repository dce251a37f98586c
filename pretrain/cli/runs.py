"""Commands that train, that say beforehand what a run needs, and that show a run."""

import os
from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.foundation import paths, progress
from data_pipeline.foundation.command import config_path, path_argument, path_option
from data_pipeline.foundation.errors import UserError
from pretrain.cli.app import Overrides, RunPath, app

# A command imports what it runs, since --help and a mistyped option need none of it:
# PyTorch takes 2 s and 200 MB, pydantic 0.4 s; MLflow and DeepSpeed 4 s more.

GPUS_PER_NODE = 8  # of the common servers
_MFU = 0.31  # nanoT5's on one A100
_PRICE = 2.0  # dollars for a GPU and an hour


_MOST_RUNS = 1000  # of a row, or at the same time
AtOnce = Annotated[
    int | None, typer.Option(min=1, max=_MOST_RUNS, help="Runs at the same time. Default: one per GPU, or one.")
]


@app.command("train", epilog="Example: pretrain train configs/runs/quickstart.yaml run.max_steps=100")
def train_command(
    config: RunPath,
    overrides: Overrides = None,
    stop_at_step: Annotated[
        int | None,
        typer.Option(min=1, help="Save and stop (exit code 75) after this step; a run that has taken it stays there."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start a new run; the existing one is moved aside.")] = False,
) -> None:
    """Train in one process, resuming from the latest checkpoint; `launch local` starts several."""
    from data_pipeline.foundation import config_file
    from data_pipeline.loading import server
    from pretrain import config as configs
    from pretrain.run import heartbeat, rank_logs

    settings = config_file.load(config, overrides or [], configs.RunConfig)
    if settings.data.workers:
        server.fork()  # now, before PyTorch has threads
    from pretrain.train import run as training

    code = training.train(settings, stop_at_step, fresh)
    if rank_logs.supervised():
        heartbeat.tell(int(os.environ["RANK"]), "done")
    raise typer.Exit(code)


@app.command(epilog="Example: pretrain experiment configs:experiments/adaptation --seeds 3 --budget 5%")
def experiment(
    directory: Annotated[
        Path, path_argument("DIR", "A folder of run files, or configs:NAME for one that ships.", config_path)
    ],
    overrides: Overrides = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=_MOST_RUNS, help="Runs of each file: seeds run.seed, run.seed + 1, …")
    ] = 3,
    budget: Annotated[
        str | None,
        typer.Option(metavar="STEPS", help="400steps, 5% or 2e13flops: sets each run's length and schedule."),
    ] = None,
    at_once: AtOnce = None,
    out: Annotated[
        Path | None, path_option("--out", "Where runs and table go. Default: runs/NAME, with the budget.")
    ] = None,
    train: Annotated[bool, typer.Option(help="Train; or only make the table of the runs that have finished.")] = True,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="ROW", help="The row that others are compared with. Default: `baseline`, else the first."),
    ] = None,
) -> None:
    """Train every run file of a folder with several seeds, and compare them in a table.

    Resumable: finished runs are kept, interrupted ones continue. A run that fails doesn't end the others.
    """
    with progress.activity_shown("reading the run files"):
        from pretrain.tools.experiment import run_experiment

        code = run_experiment.experiment(directory, seeds, budget, at_once, out, overrides or [], train, baseline)
    raise typer.Exit(code)


@app.command("plan", epilog="Example: pretrain plan configs/runs/t5-v1.1-base-c4.yaml --gpus 8 --gpu a100-80gb")
def plan_command(
    config: RunPath,
    gpu: Annotated[
        str,
        typer.Option(metavar="NAME", help="a100-80gb, h100-sxm …, or cpu: this machine's. An unknown name lists all."),
    ],
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs; not for cpu.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes. Default: 8 GPUs a node.")] = None,
    mfu: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1.0,
            help="Share of its peak that a GPU reaches. Default: 0.31; on cpu, by width.",
        ),
    ] = None,
    price: Annotated[float | None, typer.Option(min=0.0, help="Dollars for a GPU and an hour. Default: 2.")] = None,
) -> None:
    """Say how long a run takes on GPUs, what it costs and what fits. Needs no GPU, no network and no corpus.

    The lengths of rows come from the run file or its corpus, else from the corpus file that builds it, which is named.

    `--gpu cpu` answers for this machine's CPU, which it measures for half a second.
    """
    with progress.activity_shown("reading the run file"):
        text = _plan(config, overrides or [], gpu, gpus, nodes, mfu, price)
    print(text)


def _plan(
    config: Path,
    overrides: list[str],
    gpu: str,
    gpus: int | None,
    nodes: int | None,
    mfu: float | None,
    price: float | None,
) -> str:
    from data_pipeline.foundation import config_file
    from pretrain import config as configs
    from pretrain import hardware
    from pretrain.tools import plan as planning

    settings, on_cpu = config_file.load(config, overrides, configs.RunConfig), gpu == hardware.CPU
    if on_cpu and (gpus or nodes or price is not None):
        raise UserError("--gpu cpu: it is this machine's, so leave out --gpus, --nodes and --price")
    if gpus is None and not on_cpu:
        raise UserError("--gpus: missing; give the number of GPUs, or --gpu cpu")
    kind = hardware.this_cpu() if on_cpu else hardware.gpu_named(gpu)
    gpus = gpus or 1
    nodes = nodes or -(-gpus // GPUS_PER_NODE)
    if gpus % nodes:
        raise UserError(f"--gpus: {gpus} can't be divided evenly among {nodes} nodes; set --nodes to a divisor of it")
    settings, row, corpus_file = planning.resolve_rows(settings, config)
    mfu = mfu or (hardware.cpu_share(settings.model.width) if on_cpu else _MFU)
    price = 0.0 if on_cpu else _PRICE if price is None else price
    progress.set_activity("counting parameters")
    return planning.text(planning.Plan(settings, row, gpu, kind, gpus, mfu, price, nodes, corpus_file))


@app.command("reference", epilog="Example: pretrain reference optimizer.learning_rate")
def reference_command(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="Only this key, or section: optimizer. Default: all.")
    ] = None,
) -> None:
    """Show every key of corpus files and run files, with default and meaning: docs/reference/settings.md."""
    from pretrain.tools import reference

    print(reference.describe_key(key) if key else reference.page(), end="")


@app.command("dashboard", epilog="Example: pretrain dashboard runs/quickstart --port 5001")
def dashboard_command(
    run_dir: Annotated[Path | None, path_argument("RUN_DIR", "Show the charts of this run.")] = None,
    uri: Annotated[
        str, path_option("--uri", "MLflow's store, if no run is given.", paths.mlflow_uri)
    ] = "sqlite:///runs/mlflow.db",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Another free one is taken if it is in use.")] = 5000,
) -> None:
    """Serve the MLflow UI until Ctrl-C."""
    from pretrain.train.tracking import mlflow_store

    mlflow_store.dashboard(run_dir, uri, port)


@app.command("watch", epilog="Example: pretrain watch runs/quickstart")
def watch_command(
    run_dir: Annotated[Path, path_argument("RUN_DIR", "A run directory.")],
    once: Annotated[bool, typer.Option("--once", help="Show it once, as it is now.")] = False,
) -> None:
    """Show a run's curves and samples in the terminal, until Ctrl-C."""
    from pretrain.tools import watch

    watch.watch(run_dir, once)


@app.command("picture", epilog="Example: pretrain picture runs/quickstart")
def picture_command(
    run_dir: Annotated[Path, path_argument("RUN_DIR", "A run directory.")],
    out: Annotated[Path | None, path_option("--out", "A PNG file. Default: RUN_DIR/picture.png.")] = None,
) -> None:
    """Draw a run's held-out loss, and what its decoder attends to in the input."""
    from pretrain.train import picture

    picture.draw(run_dir, target := out or run_dir / "picture.png")
    print(target)


@app.command(epilog="Example: pretrain sync runs/quickstart --uri http://mlflow.example.org:5000")
def sync(
    run_dir: Annotated[Path, path_argument("RUN_DIR", "A run directory.")],
    uri: Annotated[str | None, path_option("--uri", "Another MLflow than the run's own.", paths.mlflow_uri)] = None,
) -> None:
    """Send MLflow the metrics and files of a run that it lacks."""
    from pretrain.train.tracking import tracker

    print(f"{run_dir}: {tracker.sync(run_dir, uri)} metrics sent. Next: pretrain dashboard {run_dir}")
