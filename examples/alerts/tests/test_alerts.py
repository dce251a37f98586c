"""Alerts reach a command and a webhook, and end nothing when they can't."""

import http.server
import itertools
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from alerts import Alerts
from alerts.__main__ import app
from alerts.sender import AlertsSettings, Sender

from data_pipeline.base.command import run_command
from data_pipeline.base.config_file import check
from data_pipeline.base.errors import UserError
from pretrain.config import RunConfig
from pretrain.run import rank_logs, restarts, status
from pretrain.run.status import Status
from pretrain.run.train_state import Health
from pretrain.run.world import World
from pretrain.training.callbacks import build_callbacks
from tests.conftest import TOP
from tests.support.in_process import main_here
from tests.support.runs import run_file
from tests.support.small_runs import run_config
from tests.support.tables import each


@pytest.fixture
def webhook(monkeypatch):
    """What a server has received, whose URL is in ALERT_URL."""
    received: list[dict[str, str]] = []

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


def at(folder: Path, rank: int = 0, **more: Any) -> Any:
    """What a callback sees of a trainer."""
    config = SimpleNamespace(run=SimpleNamespace(name="mine"))
    world = World(rank, 2, ((0, 1),))
    return SimpleNamespace(run=SimpleNamespace(world=world, directory=folder, config=config), **more)


def test_an_alert_reaches_the_command_and_the_webhook(tmp_path, webhook):
    command = f'printf "%s|%s|%s" "$ALERT_RUN" "$ALERT_EVENT" "$ALERT_TEXT" > {tmp_path}/told'
    sender = Sender(AlertsSettings(command=command, webhook="ALERT_URL", events=["failed"]), "mine")
    sender.send("failed", "the loss isn't finite")
    sender.send("slow", "not asked for")
    sender.finish()
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
    sender = Sender(AlertsSettings(**settings), "mine")
    sender.send("disk", "x")
    sender.finish()
    line = capsys.readouterr().err
    assert line.startswith("warning: alerts: disk isn't sent: ")
    assert said in line


def test_a_slow_run_and_a_full_disk_are_told_once_until_they_are_over(tmp_path, webhook, monkeypatch):
    """The usual speed is 100; two slow lines in a row are an alert, one isn't. A line without a speed counts for
    nothing."""
    free = [20e9]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=int(free[0])))
    told = Alerts(webhook="ALERT_URL")
    told.before_training(at(tmp_path))
    speeds = [100.0] * 5 + [69.0, 71.0, 69.0, 60.0, 50.0, 100.0, 60.0, 60.0]
    for step, speed in enumerate(speeds, 1):
        told.after_log(at(tmp_path, step=step), {"train/tokens_per_second": speed})
        told.after_log(at(tmp_path, step=step), {})
    told.close(at(tmp_path))
    assert {one["text"] for one in webhook} == {  # sent at once, they come in any order
        "mine: step 9: 60 tokens/s, usually 100",
        "mine: step 13: 60 tokens/s, usually 100",
    }
    assert len(webhook) == 2
    webhook.clear()
    for step, left in enumerate([11e9, 9e9, 8e9, 12e9, 9.9e9], 1):
        free[0] = left
        told.after_log(at(tmp_path, step=step), {})
    told.close(at(tmp_path))
    assert sorted(one["text"] for one in webhook) == [
        "mine: step 2: 9.0 GB left on the disk of the run's directory",
        "mine: step 5: 9.9 GB left on the disk of the run's directory",
    ]


def test_a_disk_that_does_not_answer_is_looked_at_again_later(tmp_path, monkeypatch):
    answers = iter([OSError("Stale file handle"), SimpleNamespace(free=0)])

    def usage(_: Path) -> Any:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(shutil, "disk_usage", usage)
    told = Alerts(command=f"echo $ALERT_EVENT >> {tmp_path}/told")
    told.before_training(at(tmp_path))
    for _ in range(2):
        told.after_log(at(tmp_path, step=1), {})
    told.close(at(tmp_path))
    assert (tmp_path / "told").read_text() == "disk\n"


def test_a_spike_is_told_once_by_the_first_rank_alone(tmp_path, webhook):
    """Of a spike that lasts two steps."""
    healths = [Health(spikes=0), Health(spikes=1, high=(9.25,)), Health(spikes=2, high=(9.25, 9.25))]
    for rank in (0, 1):
        told = Alerts(webhook="ALERT_URL")
        told.before_training(at(tmp_path, rank))
        for step, (before, after) in enumerate(itertools.pairwise(healths), 7):
            result: Any = SimpleNamespace(before=SimpleNamespace(health=before), step=step, loss=9.25)
            told.after_step(at(tmp_path, rank, state=SimpleNamespace(health=after)), result)
        told.close(at(tmp_path, rank))
    assert [one["text"] for one in webhook] == ["mine: step 7: the loss is 9.2500, a spike"]


def test_a_run_that_trains_again_after_a_failure_is_told(tmp_path, webhook, monkeypatch):
    """Its supervisor tells its ranks that earlier attempts took some seconds. The first attempt has none."""
    monkeypatch.setenv(rank_logs.SUPERVISED, str(tmp_path / "logs/attempt-0003"))
    for earlier in (None, "12.5"):
        monkeypatch.delenv(restarts.EARLIER, raising=False)
        if earlier:
            monkeypatch.setenv(restarts.EARLIER, earlier)
        assert webhook == []
        told = Alerts(webhook="ALERT_URL")
        told.before_training(at(tmp_path, state=SimpleNamespace(step=20)))
        told.close(at(tmp_path))
    text = "mine: attempt 2 failed; attempt 3 continues from step 20"
    assert webhook == [{"text": text, "run": "mine", "event": "restarted"}]


def test_a_run_file_names_the_callback_and_a_wrong_key_is_one_line():
    callbacks = build_callbacks(run_config(callbacks=[{"name": "alerts:Alerts", "webhook": "ALERT_URL"}]), 1)
    assert isinstance(callbacks["alerts:Alerts"], Alerts)
    wrong = run_config(callbacks=[{"name": "alerts:Alerts", "slow_bellow": 0.5}])
    with pytest.raises(UserError) as refused:
        build_callbacks(wrong, 1)
    (line,) = str(refused.value).splitlines()
    assert line.startswith("callbacks.0: alerts:Alerts can't be made: ")
    assert line.endswith("slow_bellow: unknown key; nearest valid key: slow_below")


def test_the_key_of_earlier_versions_is_ignored_if_it_was_off_and_else_refused_with_the_way_out():
    given = run_config().model_dump(mode="json", exclude_unset=True)
    assert check({**given, "tracking": {"alerts": None}}, RunConfig, "run.yaml").callbacks == []
    with pytest.raises(UserError, match=r'^run\.yaml: tracking\.alerts: gone; .*"alerts:Alerts"'):
        check({**given, "tracking": {"alerts": {"webhook": "ALERT_URL"}}}, RunConfig, "run.yaml")


@each(
    "code, ended, told",
    [
        (0, Status("finished", 2), ""),
        (75, Status("stopped", 2), ""),
        (1, Status("failed", 2, reason="3 restarts"), "failed: the run has failed with exit code 1 (3 restarts); "),
        (137, Status("running", 2), "failed: the run has failed with exit code 137; "),  # the supervisor was killed
    ],
)
def test_the_end_of_a_run_is_told_if_it_has_failed(tmp_path, code, ended, told):
    """The command returns the exit code that it gets, as a batch script needs it."""
    folder = tmp_path / str(code)
    alerts = {"name": "alerts:Alerts", "command": f"echo $ALERT_EVENT: $ALERT_TEXT >> {folder}/told"}
    path = run_file(folder, folder / "corpus", callbacks=[alerts])
    (folder / "run").mkdir()
    status.write(folder / "run", ended)
    done = main_here(lambda: run_command(app), "alerts", path, "--code", str(code))
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    file = folder / "told"
    assert (file.read_text() if file.exists() else "") == (f"{told}its logs: {folder}/run\n" if told else "")


def test_a_run_file_without_the_callback_is_an_error_of_one_line(tmp_path):
    path = run_file(tmp_path, tmp_path / "corpus")
    command = [sys.executable, "-m", "alerts", str(path), "--code", "1"]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True)
    line = f"error: {path}: callbacks: none is alerts:Alerts, which says where alerts go\n"
    assert (done.returncode, done.stderr) == (2, line)
