"""Start and supervise training runs: on one machine, on hosts that ssh reaches, or under SLURM."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from data_pipeline.base import paths, progress
from data_pipeline.base.command import (
    Version,
    config_path,
    path_argument,
    path_option,
    refuse_options,
    run_command,
)
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import counted
from launch.protocol import MOST_RANKS

if TYPE_CHECKING:
    from launch import slurm

# Commands import what they run: pydantic, psutil and PyArrow take 1 s and 110 MB, and --help needs none of them.

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)


@app.callback(epilog="Example: launch local configs/runs/quickstart.yaml --ranks 2")
def _commands(version: Version = False) -> None:
    """Start and supervise training runs."""


RunPath = Annotated[Path, path_argument("RUN.yaml", "The run file. Its keys: docs/reference/settings.md.", config_path)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys that override the file: run.max_steps=100")
]
StopAtStep = Annotated[int | None, typer.Option(min=1, help="Save and stop after this step (exit code 75).")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Start a new run; an existing run directory is renamed to RUN.old-N.")
]
MinNodes = Annotated[
    int | None, typer.Option(min=1, help="Continue without a lost node if at least this many nodes are left.")
]
Launcher = Annotated[
    Literal["agent", "deepspeed"],
    typer.Option(help="What starts the ranks of a node. deepspeed: DeepSpeed's launcher, without restarts."),
]


@app.command(epilog="Example: launch init mine --text 'books/*.txt'")
def init(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the files, the corpus and the run.")] = "first",
    text: Annotated[
        str | None,
        path_option("--text", "Text to train on: a path, glob or URL. Default: a sample text.", paths.location),
    ] = None,
    text_format: Annotated[
        str | None, typer.Option("--format", help="Format of --text: text, jsonl, csv, … Default: detected.")
    ] = None,
    corpus: Annotated[
        str | None, path_option("--corpus", "A finished corpus to train on, instead of --text.", paths.location)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="t5, bart, t5gemma, gpt2, …: the model of this family that --hours allow; or a file in "
            "configs/models. Default: t5gemma2; for proteins, their recipe's.",
        ),
    ] = None,
    hours: Annotated[
        float,
        typer.Option(
            min=0.01, max=100_000, help="Maximum time of training with its evaluations, in hours; sets the steps."
        ),
    ] = 1.0,
    sample_by: Annotated[
        Literal["document", "paragraph", "line"] | None,
        typer.Option(help="What becomes a document of plain text. Default: document, a file."),
    ] = None,
) -> None:
    """Write a first corpus file and run file into the current folder. Existing files stay as they are.

    `init` chooses the vocabulary size from a sample of the text, and the model, its steps and the precision from this
    machine.
    """
    if text is None:
        refuse_options(context, "for --text", "text_format", "sample_by")
    if corpus is not None:
        refuse_options(context, "not with --corpus, which has a text", "text")
    with progress.activity_shown("loading"):
        from launch.tools.scaffold import files

        lines = files.write_first_files(name, text, text_format, sample_by, corpus, model, hours)
    for line in lines:
        print(line)


@app.command(epilog="Example: launch local configs/runs/quickstart.yaml --ranks 2")
def local(
    config: RunPath,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, max=MOST_RANKS, help="Number of ranks. Default: one per GPU, or one.")
    ] = None,
    stop_at_step: StopAtStep = None,
    fresh: Fresh = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the run file and start nothing.")] = False,
) -> None:
    """Start or resume a run on this machine.

    On the first Ctrl-C, SIGTERM or SIGUSR1 the run saves and stops (exit code 75). The second signal kills the run.
    """
    from launch import attempts

    raise typer.Exit(attempts.launch_local(attempts.Run(config, overrides or [], stop_at_step, fresh), ranks, dry_run))


@app.command("hosts", epilog="Example: launch hosts configs/runs/t5-v1.1-base-c4.yaml --hostfile hosts.txt")
def hosts_command(
    config: RunPath,
    hostfile: Annotated[
        Path, path_option("--hostfile", "A hostfile in DeepSpeed's format: NAME slots=N in each line.")
    ],
    overrides: Overrides = None,
    min_nodes: MinNodes = None,
    ssh: Annotated[str, typer.Option(metavar="OPTIONS", help='Further options of ssh: "-p 2222 -i KEY".')] = "",
    stop_at_step: StopAtStep = None,
    fresh: Fresh = False,
) -> None:
    """Start or resume a run on hosts that ssh reaches.

    Signals work as in `launch local`.
    """
    from launch import attempts, hosts

    found = hosts.read(hostfile)
    if min_nodes and min_nodes > len(found):
        raise UserError(f"--min-nodes: {min_nodes} is more than the {counted(len(found), 'host')} of {hostfile}")
    access = hosts.access(hosts.ssh_options(ssh))
    run = attempts.Run(config, overrides or [], stop_at_step, fresh, min_nodes)
    raise typer.Exit(attempts.launch(run, found, access).code)


@app.command(
    "slurm",
    epilog="Example: launch slurm configs/runs/t5-v1.1-base-c4.yaml --nodes 4 --cluster configs/clusters/h100.yaml",
)
def slurm_command(
    context: typer.Context,
    config: Annotated[Path, path_argument("FILE.yaml", "A run file, or a corpus file to build.", config_path)],
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_RANKS, help="GPUs (ranks) per node. Default: the cluster file's, or 1."),
    ] = None,
    cluster: Annotated[
        Path | None, path_option("--cluster", "The cluster file: partition, environment, …", config_path)
    ] = None,
    partition: Annotated[
        str | None, typer.Option(metavar="NAME", help="SLURM's partition. Default: the cluster file's.")
    ] = None,
    account: Annotated[
        str | None, typer.Option(metavar="NAME", help="The account to charge. Default: the cluster file's.")
    ] = None,
    time: Annotated[str | None, typer.Option(help="SLURM's time limit: days-hours:minutes:seconds.")] = None,
    min_nodes: MinNodes = None,
    requeue: Annotated[
        bool, typer.Option("--requeue", help="Requeue the job when its time is nearly over or a node is lost.")
    ] = False,
    warn_seconds: Annotated[
        int, typer.Option(min=1, max=65535, help="The run saves and stops this many seconds before the time limit.")
    ] = 300,
    chain: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of jobs to submit, each after the one before.")
    ] = 1,
    stop_at_step: StopAtStep = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script and write nothing.")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the batch script with sbatch.")] = False,
    doctor: Annotated[
        bool, typer.Option("--doctor", help="The job runs `launch doctor` first, and ends if doctor finds an error.")
    ] = False,
    launcher: Launcher = "agent",
) -> None:
    """Write the batch script of a run or of a corpus build; --submit also submits the script.

    On SIGUSR1 the job saves and stops, and with --requeue it goes back into the queue. On scancel it saves and stops.
    """
    from data_pipeline.base import config_file
    from launch import slurm, slurm_head

    settings = config_file.load(cluster, [], slurm.ClusterConfig) if cluster else slurm.ClusterConfig()
    options = {"partition": partition, "account": account}
    settings = settings.model_copy(update={key: value for key, value in options.items() if value})
    is_run = "model" in config_file.sections(config, overrides or [])
    head = slurm_head.HeadJob(
        per_node=gpus_per_node or settings.gpus_per_node or 1,
        min_nodes=min_nodes,
        requeue=requeue,
        stop_at_step=stop_at_step,
        srun=settings.srun,
        container=settings.container,
        doctor=doctor,
        cluster_file=str(cluster.absolute()) if cluster and doctor else None,
        launcher=launcher,
    )
    if not is_run:
        for_runs = f"for a run, and {config} is a corpus file"
        refuse_options(context, for_runs, "gpus_per_node", "min_nodes", "stop_at_step", "doctor", "launcher")
    if launcher == "deepspeed":
        refuse_options(context, "not with --launcher deepspeed, which doesn't restart a run", "min_nodes")
    if dry_run:
        refuse_options(context, "not with --dry-run, which only prints the script", "submit")
    if not submit:
        refuse_options(context, "for --submit", "chain")
    job = slurm.Job(
        path=config.absolute(),
        overrides=overrides or [],
        is_run=is_run,
        head=head,
        nodes=nodes,
        cluster=settings,
        time=time,
        warn_seconds=warn_seconds,
        chain=chain,
    )
    slurm.submit(job, dry_run, submit, _forecast)


def _forecast(job: "slurm.Job") -> str:
    from launch.tools import forecast  # PyTorch takes 2 s, and --dry-run needs no forecast

    return forecast.of_job(job)


@app.command(hidden=True)
def head(
    job: Annotated[str, typer.Argument(metavar="JSON", help="The job, as the batch script has it.")],
    config: Annotated[Path, path_argument("FILE.yaml", "A run file, or a corpus file.", config_path)],
) -> None:
    """Train or build in an allocation of SLURM; the batch script of `launch slurm` calls it."""
    from launch import slurm_head

    raise typer.Exit(slurm_head.head(config.absolute(), slurm_head.HeadJob(**json.loads(job))))


@app.command("doctor", epilog="Example: launch doctor configs/runs/quickstart.yaml --ranks 2")
def doctor_command(
    context: typer.Context,
    config: Annotated[
        Path | None, path_argument("RUN.yaml", "The run file to check. Default: only the machine.", config_path)
    ] = None,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, max=MOST_RANKS, help="Ranks per machine. Default: one per GPU, or one.")
    ] = None,
    hostfile: Annotated[
        Path | None, path_option("--hostfile", "Check the hosts of this file, as for `launch hosts`.")
    ] = None,
    ssh: Annotated[str, typer.Option(metavar="OPTIONS", help="Further options of ssh.")] = "",
    cluster: Annotated[
        Path | None, path_option("--cluster", "The cluster file of this SLURM allocation.", config_path)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine before a run. In a SLURM allocation, check all its nodes.

    Exit code 0: no error was found.
    """
    from launch import hosts
    from launch.tools.doctor import doctor

    if hostfile is None:
        refuse_options(context, "for --hostfile", "ssh")
    else:
        refuse_options(context, "not with --hostfile, which names the hosts and their ranks", "ranks", "cluster")
    machines, access = doctor.machines(ranks, hostfile, hosts.ssh_options(ssh), cluster)
    raise typer.Exit(doctor.doctor(machines, access, config, overrides or [], as_json))


@app.command("agent", hidden=True)
def agent_command() -> None:
    """Start processes on one node for a head; stdin says where the head listens."""
    from launch import agent

    raise typer.Exit(agent.agent())


def main() -> None:
    run_command(app)
