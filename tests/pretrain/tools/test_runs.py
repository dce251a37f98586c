"""`pretrain runs`: the table of runs, from the files of their directories alone."""

import json
import time
from pathlib import Path

import pytest

from data_pipeline.base.errors import UserError
from pretrain.run import rank_environment, rank_logs, restarts, status
from pretrain.run.metrics_file import MetricLog
from pretrain.run.status import Status
from pretrain.tools.runs import row, runs
from tests.support.in_process import run_here
from tests.support.tables import each

NOW = 1_767_225_600.0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a run of 100 steps of 2 s, which has taken 60 of them as job 7, and a run that was stopped."""
    monkeypatch.chdir(tmp_path)
    make("group/first", "running", 60, "sbatch runs/group/first/slurm/job.sbatch", "7", monkeypatch)
    make("second", "stopped", 20, "launch local second.yaml --ranks 2", "", monkeypatch)
    return tmp_path / "runs"


def make(name, state, steps, command, job, monkeypatch):
    run = Path("runs") / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("run: {max_steps: 100}\n")
    (run / "environment.json").write_text(json.dumps({"command": command, "job": job, "ranks": 2}))
    log = MetricLog(run, attempt=1)
    for step in range(10, steps + 1, 10):
        monkeypatch.setattr(time, "time", lambda step=step: NOW + 2 * step)
        log.log(step, {"train/loss": 10 / step, "train/tokens_per_second": 1e6 + step})
        log.log(step, {"validation/c4/loss": 5 / step})
    status.write(run, Status(state, 1))


def test_runs_have_state_job_step_loss_speed_time_left_and_the_line_that_resumes_them(folder, capsys, monkeypatch):
    """40 steps of 2 s are left."""
    monkeypatch.setenv("COLUMNS", "80")
    (folder / "group/first/checkpoints/status.json").parent.mkdir()
    (folder / "group/first/checkpoints/status.json").touch()  # nothing inside a run is a run
    runs(folder.relative_to(folder.parent))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split() for line in lines] == [
        ["run", "state", "job", "step", "loss", "tokens/s", "left"],
        ["runs/group/first", "running", "7", "60/100", "0.1667", "1,000,060", "80", "s"],
        ["runs/second", "stopped", "20/100", "0.5000", "1,000,020"],
        ["resume", "runs/second:", "launch", "local", "second.yaml", "--ranks", "2"],
    ]
    runs(folder, as_json=True)
    first, second = json.loads(capsys.readouterr().out)
    assert (first["seconds_left"], first["resume"], second["state"], second["seconds_left"]) == (
        *(80.0, "", "stopped"),
        None,
    )


def test_brackets_in_paths_and_commands_are_no_markup(folder, capsys, monkeypatch):
    command = "launch local a.yaml 'evaluation=[fast]' 'data.train=[/data/c4]'"
    make("lr[big]", "stopped", 20, command, "7[dim]", monkeypatch)
    runs(folder.relative_to(folder.parent))
    said = capsys.readouterr().out
    assert ["runs/lr[big]", "stopped", "7[dim]"] in [line.split()[:3] for line in said.splitlines()]
    assert f"resume runs/lr[big]: {command}\n" in said


def test_the_line_that_resumes_a_run_neither_starts_it_anew_nor_stops_it_again(folder, monkeypatch):
    command = "launch local a.yaml --fresh --stop-at-step 20 run.name=a--fresh --ranks 2 --stop-at-step=7"
    make("third", "stopped", 20, command, "", monkeypatch)
    assert row(folder / "third").resume == "launch local a.yaml run.name=a--fresh --ranks 2"


def test_a_run_whose_directory_was_renamed_has_no_line_that_resumes_it(folder, monkeypatch):
    """The command would start a run in the old place, or resume the run that is there now. A link leads to the same
    run."""
    run = folder / "second"
    (run / "config.yaml").write_text("run: {max_steps: 100, directory: runs/second}\n")
    assert row(run).resume == "launch local second.yaml --ranks 2"
    monkeypatch.chdir(run)
    assert row(Path()).resume == "launch local second.yaml --ranks 2"
    moved = run.rename(folder / "second.old-1")
    assert (row(moved).max_steps, row(moved).resume) == (100, "")
    run.symlink_to(moved)
    assert row(run).resume == "launch local second.yaml --ranks 2"


def test_a_resumed_run_is_timed_by_its_own_attempt(folder, monkeypatch):
    """Ten days pass before attempt 2, whose steps take 3 s."""
    run = folder / "group/first"
    log = MetricLog(run, attempt=2)
    for step in (50, 60):
        monkeypatch.setattr(time, "time", lambda step=step: NOW + 864_000 + 3 * step)
        log.log(step, {"train/loss": 1.0})
    assert row(run).seconds_left == 40 * 3


def test_a_run_that_nobody_trains_and_nobody_ended_has_died(folder, monkeypatch):
    """Its supervisor, if it lives, has a minute to say why. Without locks, nobody knows."""
    run = folder / "group/first"
    (run / status.LOCK).touch()
    last = NOW + 2 * 60
    monkeypatch.setattr(time, "time", lambda: last + 59)
    assert row(run).state == "running"
    monkeypatch.setattr(time, "time", lambda: last + 61)
    with status.lock(run):
        assert row(run).state == "running"
    found = row(run)
    assert (found.state, found.resume) == ("died", "sbatch runs/group/first/slurm/job.sbatch")
    with monkeypatch.context() as patch:
        patch.setattr(status, "lock_file", lambda *given, **named: False)
        assert row(run).state == "running"
    restarts.record_death(run, checkpoint=50)
    assert row(run).state == "died"


def test_damaged_and_missing_files_leave_fields_empty(folder):
    run = folder / "second"
    for name in ("config.yaml", "environment.json", "metrics.jsonl"):
        (run / name).write_text("{")
    found = row(run)
    assert (found.state, found.step, found.max_steps, found.loss, found.resume) == ("stopped", None, None, None, "")


def test_a_folder_without_runs_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no runs here; give a run directory, or a folder of run directories"):
        runs(tmp_path)
    done = run_here("pretrain", "runs", tmp_path / "none")
    assert (done.returncode, "no runs here" in done.stderr) == (2, True)


@each(
    "argv, variable, command",
    [
        (["/v/bin/launch", "local", "a b.yaml"], "", "launch local 'a b.yaml'"),
        (["/v/pretrain/__main__.py", "train", "r.yaml"], "", "python -m pretrain train r.yaml"),
        (["/v/bin/pretrain", "train", "r.yaml", "tracking.mlflow.uri=http://me:secret@db"], "", None),
        (["notebook.py"], "", ""),
        (["/v/pretrain/__main__.py", "train"], "sbatch job.sbatch", "sbatch job.sbatch"),
    ],
)
def test_the_command_that_started_a_run_is_known_without_passwords(argv, variable, command, monkeypatch):
    monkeypatch.setattr("sys.argv", argv)
    monkeypatch.setenv(rank_environment.COMMAND, variable)
    masked = "pretrain train r.yaml tracking.mlflow.uri=http://me:***@db"
    assert rank_environment.command() == (masked if command is None else command)


def test_the_command_of_a_rank_that_python_code_has_supervised_is_not_that_of_the_run(tmp_path, monkeypatch):
    """It may name a run file that is gone."""
    monkeypatch.setattr("sys.argv", ["/v/pretrain/__main__.py", "train", "/tmp/gone/run.yaml"])
    monkeypatch.delenv(rank_environment.COMMAND, raising=False)
    monkeypatch.delenv(rank_logs.SUPERVISED, raising=False)
    assert rank_environment.started_by(1).command == "python -m pretrain train /tmp/gone/run.yaml"
    monkeypatch.setenv(rank_logs.SUPERVISED, str(tmp_path))
    assert rank_environment.started_by(1).command == ""
    monkeypatch.setenv(rank_environment.COMMAND, "launch local run.yaml")
    assert rank_environment.started_by(1).command == "launch local run.yaml"
