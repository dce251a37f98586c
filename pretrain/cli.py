"""The command `pretrain`: shards to a trained model."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data_pipeline.command import run_command
from data_pipeline.config_file import load
from data_pipeline.errors import UserError
from pretrain.status import SUPERVISED

if TYPE_CHECKING:
    from pretrain.trained import TrainedModel

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)

RunPath = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides: optimizer.learning_rate=1e-3")
]
Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run directory for its latest.")
]


@app.callback()
def _started_by_a_launcher(local_rank: Annotated[int | None, typer.Option("--local_rank", hidden=True)] = None) -> None:
    """Shards to a trained model."""  # deepspeed gives each rank that option; the environment says the same


@app.command()
def train(
    config: RunPath,
    overrides: Overrides = None,
    stop_at_step: Annotated[
        int | None, typer.Option(min=1, help="Save and stop (exit code 75) after this step.")
    ] = None,
) -> None:
    """Train, or go on where the run directory stands. One process; `launch local` starts more."""
    from pretrain.config import RunConfig

    settings = load(config, overrides or [], RunConfig)
    from pretrain.train import train as run  # slow to import, and not needed to refuse a wrong run file

    code = run(settings, stop_at_step)
    # a supervisor reads RUN/status.json; the launcher between would take any other code for a crash
    raise typer.Exit(0 if os.environ.get(SUPERVISED) else code)


@app.command()
def generate(
    checkpoint: Checkpoint,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="With <extra_id_0> … as blanks.")] = None,
    corpus: Annotated[
        Path | None, typer.Option(help="Blank out sentences of this corpus's held-out documents.")
    ] = None,
    number: Annotated[int, typer.Option("-n", min=1, help="How many sentences of --corpus.")] = 3,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the blanks, and of sampling.")] = 0,
) -> None:
    """Fill in blanks."""
    if not texts and corpus is None:
        raise UserError("give a text with <extra_id_0>, or --corpus")
    trained = _open(checkpoint)
    from data_pipeline.corpus import open_corpus
    from pretrain.fill_blanks import blank_out, fill

    blanked: list[tuple[str, str | None]] = [(text, None) for text in texts or []]
    if corpus is not None:
        blanked.extend(blank_out(open_corpus(corpus), trained.tokenizer, number, seed))
    for blanks, original in blanked:
        print(f"blanks    {blanks}")
        print(f"model     {fill(trained, blanks, temperature, seed)}")
        print(*([f"original  {original}", ""] if original else [""]), sep="\n")


@app.command()
def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory.")],
) -> None:
    """Write a directory that Hugging Face transformers loads."""
    trained = _open(checkpoint)
    from pretrain import huggingface

    huggingface.export(trained.model.state_dict(), trained.model.config, trained.tokenizer, out)
    print(f"{out}: {huggingface.FAMILIES[trained.model.config.family].usage}")


@app.command("import")
def import_(
    directory: Annotated[Path, typer.Argument(metavar="HF_DIR", help="What transformers saved, with its tokenizer.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory.")],
) -> None:
    """Make a checkpoint of a Hugging Face directory, for a run to start from."""
    from pretrain.huggingface import import_ as make

    config = make(directory, out)
    print(
        f"{out}: a {config.family} with {config.vocab_size:,} ids. Next: pretrain train RUN.yaml model.init_from={out}"
    )


@app.command()
def dashboard(
    run_dir: Annotated[Path | None, typer.Argument(metavar="RUN_DIR", help="Open at this run's charts.")] = None,
    uri: Annotated[str, typer.Option(help="MLflow's store, where no run is named.")] = "sqlite:///runs/mlflow.db",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The next free one from here is taken.")] = 5000,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    print_only: Annotated[bool, typer.Option("--print", help="Only print the page's address.")] = False,
) -> None:
    """Serve the MLflow UI until Ctrl-C."""
    from pretrain.dashboard import dashboard as serve

    serve(run_dir, uri, port, browser, print_only)


@app.command()
def sync(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory.")],
    uri: Annotated[str | None, typer.Option(help="Another MLflow than the run's own.")] = None,
) -> None:
    """Feed MLflow what it doesn't have yet of a run."""
    from pretrain.tracking import sync as feed

    print(f"{run_dir}: {feed(run_dir, uri)} metrics sent. Next: pretrain dashboard {run_dir}")


def _open(path: Path) -> "TrainedModel":
    from pretrain.checkpoint import index as checkpoint_index
    from pretrain.trained import TrainedModel

    return TrainedModel.open(checkpoint_index.latest(path) or path)


def main() -> None:
    run_command(app)
