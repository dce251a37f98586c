"""Alerts reach a command and a webhook, and end nothing when they can't."""

import http.server
import itertools
import json
import threading
from types import SimpleNamespace

import pytest

from pretrain.config.run_config import AlertsSection
from pretrain.run.alerts import Alerts
from pretrain.run.train_state import Health
from pretrain.training.callbacks.alerting import Alerting
from tests.tables import each


@pytest.fixture
def webhook(monkeypatch):
    """What a server has received, whose URL is in ALERT_URL."""
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("ALERT_URL", f"http://127.0.0.1:{server.server_port}/hook")
    yield received
    server.shutdown()
    server.server_close()


def test_an_alert_reaches_the_command_and_the_webhook(tmp_path, webhook):
    command = f'printf "%s|%s|%s" "$ALERT_RUN" "$ALERT_EVENT" "$ALERT_TEXT" > {tmp_path}/told'
    alerts = Alerts(AlertsSection(command=command, webhook="ALERT_URL", events=["failed"]), "mine")
    alerts.send("failed", "the loss isn't finite")
    alerts.send("slow", "not asked for")
    alerts.finish()
    assert (tmp_path / "told").read_text() == "mine|failed|the loss isn't finite"
    assert webhook == [{"text": "mine: the loss isn't finite", "run": "mine", "event": "failed"}]


@each(
    "settings, said",
    [
        ({"command": "exit 3"}, "returned non-zero exit status 3"),
        ({"webhook": "NOWHERE"}, "NOWHERE isn't set in the environment"),
        ({"webhook": "CLOSED"}, "Connection refused"),
    ],
)
def test_an_alert_that_cannot_be_sent_is_a_warning(settings, said, monkeypatch, capsys):
    monkeypatch.setenv("CLOSED", "http://127.0.0.1:9")
    alerts = Alerts(AlertsSection(**settings), "mine")
    alerts.send("disk", "x")
    alerts.finish()
    line = capsys.readouterr().err
    assert line.startswith("warning: tracking.alerts: disk isn't sent: ")
    assert said in line


def test_a_slow_run_and_a_full_disk_are_told_once_until_they_are_over(webhook):
    """The usual speed is 100; two slow lines in a row are an alert, one isn't."""
    told = Alerting(AlertsSection(webhook="ALERT_URL"), "mine")
    speeds = [100.0] * 5 + [69.0, 71.0, 69.0, 60.0, 50.0, 100.0, 60.0, 60.0]
    for step, speed in enumerate(speeds, 1):
        told.check_speed(step, speed)
        told.check_speed(step, None)
    told._alerts.finish()
    assert {one["text"] for one in webhook} == {  # sent at once, they come in any order
        "mine: step 9: 60 tokens/s, usually 100",
        "mine: step 13: 60 tokens/s, usually 100",
    }
    assert len(webhook) == 2
    webhook.clear()
    for step, free in enumerate([11e9, 9e9, 8e9, 12e9, 9.9e9], 1):
        told.check_disk(step, int(free))
    told._alerts.finish()
    assert sorted(one["text"] for one in webhook) == [
        "mine: step 2: 9.0 GB left on the disk of the run's directory",
        "mine: step 5: 9.9 GB left on the disk of the run's directory",
    ]


def test_a_spike_is_told_once_by_the_first_rank_alone(webhook):
    """Of a spike that lasts two steps."""
    healths = [Health(spikes=0), Health(spikes=1, high=(9.25,)), Health(spikes=2, high=(9.25, 9.25))]
    for rank in (0, 1):
        told = Alerting(AlertsSection(webhook="ALERT_URL"), "mine")
        for step, (before, after) in enumerate(itertools.pairwise(healths), 7):
            trainer = SimpleNamespace(
                run=SimpleNamespace(rank=rank),
                before=SimpleNamespace(health=before),
                state=SimpleNamespace(health=after),
                step=step,
                outcome=SimpleNamespace(loss=9.25),
            )
            told.after_step(trainer)
        told.after_training(trainer)
    assert [one["text"] for one in webhook] == ["mine: step 7: the loss is 9.2500, a spike"]
