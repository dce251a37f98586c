"""Commands that train, that estimate what a run needs, and that show a run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.base import paths
from data_pipeline.base.command import path_argument, path_option
from data_pipeline.base.errors import UserError
from pretrain.cli.app import Overrides, RunPath

commands = typer.Typer(add_completion=False)
# A command imports what it runs, so that --help and the message about a wrong option are quick: PyTorch takes 2 s and
# 200 MB, pydantic 0.4 s; MLflow and DeepSpeed 4 s more.


@commands.command("train", epilog="Example: pretrain train configs/runs/quickstart.yaml run.max_steps=100")
def train_command(
    config: RunPath,
    overrides: Overrides = None,
    stop_at_step: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Save and stop after this step (exit code 75). A run that has reached it takes no further step.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start a new run; an existing run directory is renamed to RUN.old-N.")
    ] = False,
) -> None:
    """Train in one process, from the latest checkpoint if there is one. `launch local` starts several processes."""
    from data_pipeline.base import config_file
    from data_pipeline.base.processes import importing
    from data_pipeline.loading import server
    from pretrain import config as configs
    from pretrain.run import heartbeat, rank_logs
    from pretrain.run.rank_environment import rank_environment

    settings = config_file.load(config, overrides or [], configs.RunConfig)
    if settings.data.workers:
        server.start()  # its imports run beside those of this process
    with importing():
        from pretrain.training import run as training

    code = training.train(settings, stop_at_step, fresh)
    if rank_logs.supervised():
        heartbeat.tell(rank_environment().rank, "done")
    raise typer.Exit(code)


@commands.command("plan", epilog="Example: pretrain plan configs/runs/t5-v1.1-base-c4.yaml --gpus 8 --gpu a100-80gb")
def plan_command(
    config: RunPath,
    gpu: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The GPU, such as a100-80gb or h100-sxm. An unknown name lists all names. With --gpu-tflops, "
            "--gpu-memory and --gpu-bandwidth: any name, for a GPU of your own.",
        ),
    ],
    gpus: Annotated[str, typer.Option(metavar="N,…", help="Number of GPUs; several, as 8,16,64, give a table.")],
    overrides: Overrides = None,
    gpu_tflops: Annotated[
        float | None, typer.Option(min=0.001, help="Your GPU's peak TFLOP/s in the run's precision, without sparsity.")
    ] = None,
    gpu_memory: Annotated[float | None, typer.Option(min=0.001, help="Your GPU's memory in GiB.")] = None,
    gpu_bandwidth: Annotated[
        float | None, typer.Option(min=0.001, help="GB/s that your GPU sends to the others, between nodes too.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes. Default: one per 8 GPUs.")] = None,
    mfu: Annotated[float, typer.Option(min=0.01, max=1.0, help="MFU of each GPU by itself.")] = 0.31,
    price: Annotated[float, typer.Option(min=0.0, help="Dollars per GPU hour.")] = 2.0,
    as_json_: Annotated[
        bool, typer.Option("--json", help="As JSON, in bytes, seconds and dollars; a list for several --gpus.")
    ] = False,
) -> None:
    """Estimate how long a run takes on GPUs, what it costs and what fits. Needs no GPU, no network and no corpus.

    Row lengths come from the run file or its corpus. Without the corpus they come from the corpus file that builds it,
    which `plan` names.
    """
    from data_pipeline.base import progress

    with progress.activity_shown("reading the run file"):
        from data_pipeline.base import config_file
        from pretrain import config as configs
        from pretrain import device_speed
        from pretrain.tools import plan as planning

        settings = config_file.load(config, overrides or [], configs.RunConfig)
        own = gpu_tflops, gpu_memory, gpu_bandwidth
        is_own = any(one is not None for one in own)
        kind = device_speed.gpu_of_ones_own(gpu, *own) if is_own else device_speed.gpu_named(gpu)
        numbers = _numbers(gpus)
        if nodes and len(numbers) > 1:
            raise UserError("--nodes: for one number of --gpus; several are planned with a node per 8 GPUs")
        settings, row, corpus_file = planning.resolve_rows(settings, config)
        progress.set_activity("counting parameters")
        plans = []
        for number in numbers:
            on = nodes or -(-number // device_speed.GPUS_PER_NODE)
            if number % on:
                raise UserError(f"--gpus: {number} can't be divided evenly among {on} nodes; set --nodes to a divisor")
            plans.append(planning.Plan(settings, row, gpu, kind, number, mfu, price, on, corpus_file))
        if as_json_:
            found = [planning.as_json(plan) for plan in plans]
            text = json.dumps(found if len(found) > 1 else found[0], indent=1)
        else:
            text = planning.table(plans) if len(plans) > 1 else planning.text(plans[0])
    print(text)


def _numbers(gpus: str) -> list[int]:
    """The numbers of GPUs: "8,16" -> [8, 16]."""
    try:
        numbers = [int(one) for one in gpus.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise UserError(f"--gpus: {gpus!r}; expected a number, or several such as 8,16,64")
    return numbers


@commands.command("dashboard", epilog="Example: pretrain dashboard runs/quickstart --port 5001")
def dashboard_command(
    run_dir: Annotated[
        Path | None, path_argument("RUN_DIR", "The run whose charts to show. Default: all runs.")
    ] = None,
    uri: Annotated[
        str | None,
        path_option(
            "--uri",
            "MLflow's tracking URI. Default: the run's own, else sqlite:///runs/mlflow.db.",
            paths.mlflow_uri,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port of the UI.")] = 5000,
) -> None:
    """Serve the MLflow UI until Ctrl-C."""
    from pretrain.training.tracking import dashboard

    dashboard.dashboard(run_dir, uri, port)


@commands.command("runs", epilog="Example: pretrain runs runs")
def runs_command(
    folder: Annotated[Path | None, path_argument("DIR", "A folder of runs, or a run directory. Default: runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Show the runs of a folder: state, job, step, loss, speed, time left, and the command that resumes each."""
    from pretrain.tools import runs

    runs.runs(folder or Path("runs"), as_json)


@commands.command("picture", epilog="Example: pretrain picture runs/quickstart")
def picture_command(
    run_dir: Annotated[Path, path_argument("RUN_DIR", "A run directory.")],
    out: Annotated[Path | None, path_option("--out", "The PNG file to write. Default: RUN_DIR/picture.png.")] = None,
) -> None:
    """Draw a run's held-out loss over the steps."""
    from pretrain.training import picture

    picture.draw(run_dir, target := out or run_dir / "picture.png")
    print(target)


@commands.command(epilog="Example: pretrain sync runs/quickstart --uri http://mlflow.example.org:5000")
def sync(
    run_dir: Annotated[Path, path_argument("RUN_DIR", "A run directory.")],
    uri: Annotated[
        str | None, path_option("--uri", "Tracking URI to send to. Default: the run's own.", paths.mlflow_uri)
    ] = None,
) -> None:
    """Send the metrics and files of a run that MLflow lacks to MLflow."""
    from pretrain.training.tracking import tracker

    print(f"{run_dir}: {tracker.sync(run_dir, uri)} metrics sent. Next: pretrain dashboard {run_dir}")
