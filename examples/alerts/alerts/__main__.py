"""`python -m alerts RUN.yaml --code CODE`: sends the alert `failed` of a run that has ended with an exit code."""

from pathlib import Path
from typing import Annotated

import typer

from alerts.callback import NAME
from alerts.sender import AlertsSettings, Sender
from data_pipeline.base.command import STOPPED, run_command
from data_pipeline.base.config_file import check, load
from data_pipeline.base.errors import UserError
from pretrain.cli.app import Overrides, RunPath
from pretrain.config import RunConfig
from pretrain.run import status

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog="Example: launch local RUN.yaml || python -m alerts RUN.yaml --code $?")
def _ended(
    run_file: RunPath,
    code: Annotated[int, typer.Option(min=0, max=255, help="The exit code of the run, which this command returns.")],
    overrides: Overrides = None,
) -> None:
    """Send the alert that a run has failed, unless its exit code says that it has finished (0) or stopped (75)."""
    config = load(run_file, overrides or [], RunConfig)
    settings = settings_in(config, run_file)
    if code not in (0, STOPPED):
        tell_failed(config, settings, code)
    raise typer.Exit(code)


def settings_in(config: RunConfig, run_file: Path) -> list[AlertsSettings]:
    """The settings of the callbacks `alerts:Alerts` of a run. Raises UserError if it has none."""
    found = [check(one.model_extra or {}, AlertsSettings, NAME) for one in config.callbacks if one.name == NAME]
    if not found:
        raise UserError(f"{run_file}: callbacks: none is {NAME}, which says where alerts go")
    return found


def tell_failed(config: RunConfig, settings: list[AlertsSettings], code: int) -> None:
    """Sends the alert `failed`, with the reason that the supervisor has recorded, if it has recorded any."""
    ended = status.read(Path(config.run.directory))
    reason = f" ({ended.reason})" if ended.state == "failed" and ended.reason else ""
    text = f"the run has failed with exit code {code}{reason}; its logs: {config.run.directory}"
    senders = [Sender(one, config.run.name) for one in settings]
    for sender in senders:
        sender.send("failed", text)
    for sender in senders:
        sender.finish()


if __name__ == "__main__":
    run_command(app)
