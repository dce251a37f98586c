"""Sends the alerts of a run to a command or a webhook: `tracking.alerts`."""

import json
import os
import subprocess
import sys
import threading
import urllib.request

from data_pipeline.base.errors import one_line
from data_pipeline.base.formatting import masked
from pretrain.config.run_config import AlertsSection

_SECONDS = 30.0  # for a command or a webhook


class Alerts:
    """Sends alerts of the run `name`. If an alert can't be sent, a warning is printed, and the run continues."""

    def __init__(self, settings: AlertsSection | None, name: str):
        self._settings, self._name = settings, name
        self._sending: list[threading.Thread] = []

    def send(self, event: str, text: str) -> None:
        """Sends an alert in a thread, if `AlertsSection.events` has this `event`."""
        if self._settings and event in self._settings.events:
            thread = threading.Thread(target=self._send, args=(self._settings, event, text), daemon=True)
            thread.start()
            self._sending.append(thread)

    def finish(self) -> None:
        """Waits until the alerts are sent, before the process ends."""
        for thread in self._sending:
            thread.join(_SECONDS)

    def _send(self, settings: AlertsSection, event: str, text: str) -> None:
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
        print(f"warning: tracking.alerts: {event} isn't sent: {masked(reason)}", file=sys.stderr, flush=True)
