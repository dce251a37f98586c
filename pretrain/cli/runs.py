"""Commands that train, that say beforehand what a run needs, and that show a run."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.foundation import paths
from data_pipeline.foundation.command import path_argument, path_option
from data_pipeline.foundation.errors import UserError
from pretrain.cli.app import Overrides, RunPath, app

GPUS_PER_NODE = 8  # of the common servers
_MFU = 0.31  # nanoT5's on one A100
_PRICE = 2.0  # dollars for a GPU and an hour


AtOnce = Annotated[int | None, typer.Option(min=1, help="Runs at the same time. Default: one per GPU, or one.")]


def _folder(text: str) -> Path:
    return Path(paths.config_folder(text))


@app.command(epilog="Example: pretrain train configs/runs/quickstart.yaml run.max_steps=100")
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
    from pretrain.run import outcome, rank_logs

    settings = load(config, overrides or [], RunConfig)
    if settings.data.workers:
        server.fork()  # now, before PyTorch has threads
    from pretrain.trainer.train import train as run  # slow to import, and not needed to refuse a wrong run file

    code = run(settings, stop_at_step, fresh)
    # the supervisor reads RUN/status.json; the deepspeed launcher would take any other code for a crash
    if rank_logs.supervised():
        outcome.done(int(os.environ["RANK"]))
        code = 0
    raise typer.Exit(code)


@app.command(epilog="Example: pretrain experiment configs:experiments/adaptation --seeds 3 --budget 5%")
def experiment(
    directory: Annotated[
        Path, path_argument("DIR", "A folder of run files, or configs:NAME for one that ships.", _folder)
    ],
    overrides: Overrides = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each file, with seeds from its run.seed on.")] = 3,
    budget: Annotated[
        str | None,
        typer.Option(metavar="STEPS", help="400steps, 5% or 2e13flops: sets each run's length and schedule."),
    ] = None,
    at_once: AtOnce = None,
    out: Annotated[
        Path | None, path_option("--out", "Where runs and table go. Default: runs/NAME, with the budget.")
    ] = None,
    train: Annotated[bool, typer.Option(help="Train; or only make the table of the runs that have finished.")] = True,
) -> None:
    """Train every run file of a folder with several seeds, and compare them in a table.

    Resumable: finished runs are kept, cut ones go on. A run that fails doesn't end the others.
    """
    from pretrain.tools.experiment.run_experiment import experiment as run

    raise typer.Exit(run(directory, seeds, budget, at_once, out, overrides or [], train))


@app.command(epilog="Example: pretrain plan configs/runs/t5-v1.1-base-c4.yaml --gpus 8 --gpu a100-80gb")
def plan(
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
    inputs: Annotated[int | None, typer.Option(min=1, help="Input tokens of a row. Default: the corpus's.")] = None,
    targets: Annotated[int | None, typer.Option(min=1, help="Target tokens of a row. Default: the corpus's.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="One object, in bytes, seconds and FLOPs.")] = False,
) -> None:
    """Say how long a run takes on GPUs, what it costs and what fits. Needs no GPU, no network and no corpus.

    Without a built corpus, the lengths of rows come from the corpus file that builds it, which is named.

    `--gpu cpu` answers for this machine's CPU, which it measures for half a second.
    """
    from data_pipeline.foundation.config_file import load
    from pretrain.config import RunConfig
    from pretrain.hardware import cpu_speed as cpu
    from pretrain.hardware.gpus import gpu_named

    settings, on_cpu = load(config, overrides or [], RunConfig), gpu == cpu.NAME
    if on_cpu and (gpus or nodes or price is not None):
        raise UserError("--gpu cpu: it is this machine's, so leave out --gpus, --nodes and --price")
    if gpus is None and not on_cpu:
        raise UserError("--gpus: missing; give the number of GPUs, or --gpu cpu")
    kind = cpu.this_cpu() if on_cpu else gpu_named(gpu)
    gpus = gpus or 1
    nodes = nodes or -(-gpus // GPUS_PER_NODE)
    if gpus % nodes:
        raise UserError(f"--gpus: {gpus} can't be divided evenly among {nodes} nodes; set --nodes to a divisor of it")
    from pretrain.tools.plan.planner import Planner, as_json, resolve_rows, text

    settings, row, corpus_file = resolve_rows(settings, config, inputs, targets)
    mfu = mfu or (cpu.share(settings.model.width) if on_cpu else _MFU)
    price = 0.0 if on_cpu else _PRICE if price is None else price
    planner = Planner(settings, row, gpu, kind, mfu, price, corpus_file)
    if json_:
        print(json.dumps(as_json(planner, gpus, nodes), indent=1))
    else:
        print(text(planner, gpus, nodes))


@app.command(epilog="Example: pretrain reference optimizer.learning_rate")
def reference(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="Only this key, or section: optimizer. Default: all.")
    ] = None,
) -> None:
    """Show every key of corpus files and run files, with default and meaning: docs/reference/settings.md."""
    from pretrain.tools.reference import describe_key, page

    print(describe_key(key) if key else page(), end="")


@app.command(epilog="Example: pretrain dashboard runs/quickstart --port 5001")
def dashboard(
    run_dir: Annotated[Path | None, path_argument("RUN_DIR", "Show the charts of this run.")] = None,
    uri: Annotated[
        str, path_option("--uri", "MLflow's store, if no run is given.", paths.mlflow_uri)
    ] = "sqlite:///runs/mlflow.db",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Another free one is taken if it is in use.")] = 5000,
) -> None:
    """Serve the MLflow UI until Ctrl-C."""
    from pretrain.tracking.dashboard import dashboard as serve

    serve(run_dir, uri, port)


@app.command(epilog="Example: pretrain watch runs/quickstart")
def watch(
    run_dir: Annotated[Path, path_argument("RUN_DIR", "A run directory.")],
    once: Annotated[bool, typer.Option("--once", help="Show it once, as it is now.")] = False,
) -> None:
    """Show a run's curves and samples in the terminal, until Ctrl-C."""
    from pretrain.tools.watch import watch as show

    show(run_dir, once)


@app.command(epilog="Example: pretrain picture runs/quickstart")
def picture(
    run_dir: Annotated[Path, path_argument("RUN_DIR", "A run directory.")],
    out: Annotated[Path | None, path_option("--out", "A PNG file. Default: RUN_DIR/picture.png.")] = None,
) -> None:
    """Draw a run's held-out loss, and what its decoder attends to in the input."""
    from pretrain.trainer.picture import draw

    draw(run_dir, target := out or run_dir / "picture.png")
    print(target)


@app.command(epilog="Example: pretrain sync runs/quickstart --uri http://mlflow.example.org:5000")
def sync(
    run_dir: Annotated[Path, path_argument("RUN_DIR", "A run directory.")],
    uri: Annotated[str | None, path_option("--uri", "Another MLflow than the run's own.", paths.mlflow_uri)] = None,
) -> None:
    """Send MLflow the metrics and files of a run that it lacks."""
    from pretrain.tracking.tracker import sync as feed

    print(f"{run_dir}: {feed(run_dir, uri)} metrics sent. Next: pretrain dashboard {run_dir}")
