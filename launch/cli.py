"""The command `launch`: starts runs on one machine, on hosts that ssh reaches, or under SLURM."""

from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.foundation.command import Version, path_argument, path_option, run_command
from data_pipeline.foundation.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)


@app.callback()
def _commands(version: Version = False) -> None:
    """Start and supervise training runs."""


RunPath = Annotated[Path, path_argument("RUN.yaml", "The run file. `pretrain reference` shows its keys.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides.")]
StopAtStep = Annotated[int | None, typer.Option(min=1, help="Save and stop (exit code 75) after this step.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start a new run; the existing one is moved aside.")]
MinNodes = Annotated[
    int | None, typer.Option(min=1, help="When a node is lost, go on with the others if so many are left.")
]


@app.command()
def local(
    config: RunPath,
    overrides: Overrides = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Number of processes; default: one per GPU, or one.")] = None,
    stop_at_step: StopAtStep = None,
    fresh: Fresh = False,
) -> None:
    """Start or resume a run on this machine through the deepspeed launcher.

    The first Ctrl-C, SIGTERM or SIGUSR1 makes the run save and stop (exit code 75); the second kills it.
    """
    from launch.local import launch_local

    raise typer.Exit(launch_local(config, overrides or [], ranks, stop_at_step, fresh))


@app.command()
def hosts(
    config: RunPath,
    hostfile: Annotated[Path, path_option("--hostfile", "DeepSpeed's format: NAME slots=N in each line.")],
    overrides: Overrides = None,
    min_nodes: MinNodes = None,
    address: Annotated[str | None, typer.Option(help="This machine's address, at which the hosts find it.")] = None,
    ssh: Annotated[str, typer.Option(metavar="OPTIONS", help='More options of ssh: "-p 2222 -i KEY".')] = "",
    stop_at_step: StopAtStep = None,
    fresh: Fresh = False,
) -> None:
    """Start or resume a run on hosts that ssh reaches, through the deepspeed launcher on each.

    Signals do what they do to `launch local`.
    """
    import shlex

    from launch.hosts import launch_hosts
    from launch.nodes import Run

    run = Run(config, overrides or [], stop_at_step, fresh, min_nodes)
    raise typer.Exit(launch_hosts(run, hostfile, address, shlex.split(ssh)))


@app.command("slurm")
def slurm_command(
    config: Annotated[Path, path_argument("FILE.yaml", "A run file, or a corpus file to build.")],
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs, and ranks, of each node; default: all, by the cluster file.")
    ] = None,
    cluster: Annotated[Path | None, path_option("--cluster", "A cluster file: partition, environment, …")] = None,
    mode: Annotated[str, typer.Option(help="Who starts the ranks of a node: deepspeed or srun.")] = "deepspeed",
    time: Annotated[str | None, typer.Option(help="SLURM's time limit: days-hours:minutes:seconds.")] = None,
    min_nodes: MinNodes = None,
    requeue: Annotated[
        bool, typer.Option("--requeue", help="Back into the queue when the time is nearly over or a node is lost.")
    ] = False,
    warn_seconds: Annotated[
        int, typer.Option(min=1, max=65535, help="How long before the time limit the run saves and stops.")
    ] = 300,
    chain: Annotated[int, typer.Option(min=1, help="Jobs to submit that follow one another.")] = 1,
    stop_at_step: StopAtStep = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script; write nothing.")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="Hand the batch script to sbatch.")] = False,
) -> None:
    """Write the batch script of a run, or of a build, and submit it.

    SIGUSR1 makes the job save and stop, and go back into the queue with --requeue. scancel also saves and stops.
    """
    from data_pipeline.foundation.config_file import load
    from launch.cluster import ClusterConfig
    from launch.slurm import Job
    from launch.slurm import submit as hand_over

    if mode not in ("deepspeed", "srun"):
        raise UserError(f"--mode: {mode!r}; expected deepspeed or srun")
    settings = load(cluster, [], ClusterConfig) if cluster else ClusterConfig()
    per_node = gpus_per_node or settings.gpus_per_node or 1
    job = Job(
        path=config,
        overrides=overrides or [],
        nodes=nodes,
        per_node=per_node,
        mode=mode,
        min_nodes=min_nodes,
        requeue=requeue,
        warn_seconds=warn_seconds,
        chain=chain,
        time=time,
        stop_at_step=stop_at_step,
        cluster=settings,
    )
    hand_over(job, dry_run, submit)


Requeue = Annotated[bool, typer.Option("--requeue", help="As of launch slurm.")]
Words = Annotated[str, typer.Option(metavar="WORDS", help="Quoted as in a shell.")]


@app.command(hidden=True)
def head(
    config: RunPath,
    overrides: Overrides = None,
    mode: str = "deepspeed",
    per_node: int = 1,
    min_nodes: MinNodes = None,
    requeue: Requeue = False,
    stop_at_step: StopAtStep = None,
    srun: Words = "",
    container: Words = "",
) -> None:
    """Start the agents of an allocation of SLURM and decide; the batch script of `launch slurm` calls it."""
    import shlex

    from launch.nodes import Run
    from launch.slurm import head as decide

    run = Run(config, overrides or [], stop_at_step, min_nodes=min_nodes)
    raise typer.Exit(decide(run, mode, per_node, requeue, shlex.split(srun), shlex.split(container)))


@app.command(hidden=True)
def build_head(
    config: RunPath,
    overrides: Overrides = None,
    requeue: Requeue = False,
    srun: Words = "",
    container: Words = "",
) -> None:
    """Start Ray in an allocation of SLURM and build; the batch script of `launch slurm` calls it."""
    import shlex

    from launch.slurm_build import build

    raise typer.Exit(build(config, overrides or [], requeue, shlex.split(srun), shlex.split(container)))


@app.command(hidden=True)
def stage(
    config: RunPath, to: Annotated[Path, path_option("--to", "A local directory.")], overrides: Overrides = None
) -> None:
    """Copy the corpora of a run to a disk of this node; the batch script of `launch slurm` calls it."""
    from data_pipeline.foundation.config_file import load
    from launch.staging import stage as copy
    from pretrain.config import RunConfig

    copy(load(config, overrides or [], RunConfig), to)


@app.command(hidden=True)
def agent() -> None:
    """Start the ranks of one node for a head, which says where it is through stdin."""
    from launch.supervise.agent import agent as serve

    raise typer.Exit(serve())


def main() -> None:
    run_command(app)
