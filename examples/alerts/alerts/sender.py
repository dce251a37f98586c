"""Sends the alerts of a run to a command or a webhook."""

import json
import os
import subprocess
import sys
import threading
import urllib.request
from typing import Annotated, Literal

from pydantic import Field

from data_pipeline.base.config_file import Section
from data_pipeline.base.errors import one_line
from data_pipeline.base.formatting import masked

_SECONDS = 30.0  # for a command or a webhook


class AlertsSettings(Section):
    """Who is told when something happens to the run: the keys of the callback `alerts:Alerts`."""

    command: Annotated[str, Field(min_length=1)] | None = None
    """A shell command that is run for each event, with ALERT_RUN, ALERT_EVENT and ALERT_TEXT in its environment. null:
    off."""
    webhook: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None
    """Name of the environment variable that holds a webhook's URL. Each event is sent there as a POST of JSON with
    `text`, `run` and `event`, as Slack and Mattermost expect it. The URL is a secret, and is recorded nowhere. null:
    off."""
    events: list[Literal["failed", "restarted", "spike", "slow", "disk"]] = [
        "failed", "restarted", "spike", "slow", "disk",
    ]  # fmt: skip
    """The events to send. `failed`: `python -m alerts` was told that the run has failed for good. `restarted`: the run
    trains again after `launch` has restarted its ranks. `spike`: its loss spikes. `slow`: throughput fell below
    `slow_below`. `disk`: free space fell below `disk_gigabytes`."""
    slow_below: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """The run is slow below this share of its usual tokens/s, the median of the last 20 log lines."""
    disk_gigabytes: Annotated[float, Field(ge=0, le=1e9)] = 10.0
    """The disk fills when the disk of the run directory has fewer free gigabytes than this."""


class Sender:
    """Sends alerts of the run `name`. If an alert can't be sent, a warning is printed, and the run continues."""

    def __init__(self, settings: AlertsSettings, name: str):
        self._settings, self._name = settings, name
        self._sending: list[threading.Thread] = []

    def send(self, event: str, text: str) -> None:
        """Sends an alert in a thread, if `AlertsSettings.events` has this `event`."""
        if event in self._settings.events:
            thread = threading.Thread(target=self._send, args=(event, text), daemon=True)
            thread.start()
            self._sending.append(thread)

    def finish(self) -> None:
        """Waits until the alerts are sent, before the process ends."""
        for thread in self._sending:
            thread.join(_SECONDS)

    def _send(self, event: str, text: str) -> None:
        settings = self._settings
        try:
            if settings.command:
                variables = {"ALERT_RUN": self._name, "ALERT_EVENT": event, "ALERT_TEXT": text}
                subprocess.run(
                    ["/bin/sh", "-c", settings.command],
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    timeout=_SECONDS,
                    check=True,
                )
            if settings.webhook:
                content = {"text": f"{self._name}: {text}", "run": self._name, "event": event}
                headers = {"Content-Type": "application/json"}
                request = urllib.request.Request(os.environ[settings.webhook], json.dumps(content).encode(), headers)
                with urllib.request.urlopen(request, timeout=_SECONDS):
                    pass
        except KeyError as missing:
            self._warn(event, f"{missing.args[0]} isn't set in the environment")
        except Exception as error:  # of many kinds; training must continue
            self._warn(event, one_line(error))

    @staticmethod
    def _warn(event: str, reason: str) -> None:
        print(f"warning: alerts: {event} isn't sent: {masked(reason)}", file=sys.stderr, flush=True)
