"""Files of the current folder whose names are modules' are never run in place of the modules."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from data_pipeline.base import processes
from launch import hosts, slurm_head
from launch.attempts import Run
from launch.tools.doctor import doctor
from pretrain.training import attention_check
from tests.conftest import TOP, run, write_c4, write_corpus_file
from tests.launch.conftest import a_run
from tests.support.builds import write_model

NAMES = ("pretrain", "launch", "data_pipeline", "random", "tempfile", "selectors", "tokenizers", "deepspeed", "mlflow")
NAMES += ("pyarrow", "numpy")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, whose files end what runs them and leave a file with their name."""
    (current := tmp_path / "current").mkdir()
    for name in NAMES:
        (current / f"{name}.py").write_text(f"open({str(tmp_path / name)!r}, 'x')\nraise SystemExit('run: {name}')\n")
    monkeypatch.chdir(current)
    return tmp_path


def files_that_were_run(folder: Path) -> list[str]:
    return sorted(name for name in NAMES if (folder / name).exists())


def test_what_starts_ranks_agents_and_checks_runs_no_file_of_the_current_folder(folder):
    rank = Run(folder / "run.yaml", []).rank
    modules = {
        "pretrain": rank[: rank.index("train")],
        "launch": slurm_head.LAUNCH,
        "agent": ["sh", "-c", hosts.remote_command().removesuffix(" agent")],
        "doctor": doctor._PROGRAM,
        "kernels": attention_check._CHECK,
    }
    for name, command in modules.items():
        version = ["--version"] if name in ("pretrain", "launch") else []
        command = ["sh", "-c", f"{command[-1]} --version"] if name == "agent" else [*command, *version]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert "run: " not in done.stderr, name
        assert ("encdec-pretrain 0." in done.stdout) == (name in ("pretrain", "launch", "agent")), name
    assert files_that_were_run(folder) == []


LOADING = """
import sys
from multiprocessing import get_context

from data_pipeline.loading import server

if __name__ == "__main__":
    server.start("json")
    worker = get_context("forkserver").Process(target=print, args=["at work"])
    worker.start()
    worker.join()
    sys.exit(worker.exitcode)
"""


def test_the_loaders_processes_run_no_file_of_the_current_folder(folder):
    """In a process that doesn't search the current folder itself, as the command `pretrain`."""
    (folder / "script.py").write_text(LOADING)
    done = subprocess.run([sys.executable, folder / "script.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, files_that_were_run(folder)) == (0, "at work\n", []), done.stderr


def test_every_command_that_runs_python_begins_alike():
    """With -P; that of a library gets a variable instead."""
    assert (sys.executable, "-P") == processes.PYTHON
    others = re.compile(r"sys\.executable|get_context\(\"spawn\"\)")
    packages = ("data_pipeline", "pretrain", "launch")
    found = {path for name in packages for path in (TOP / name).rglob("*.py") if others.search(path.read_text())}
    assert found == {TOP / "data_pipeline/base/processes.py"}


@pytest.mark.soak
def test_a_run_runs_no_file_of_the_current_folder(small_corpus, folder):
    path = a_run(folder, small_corpus, steps=2)
    done = run("launch", "local", path, "--ranks", "2", "data.workers=1", cwd=Path.cwd())
    assert (done.returncode, files_that_were_run(folder)) == (0, []), done.stderr
    assert os.environ.get("PYTHONSAFEPATH") is None


IN_A_WORKER = """
import sys
from pathlib import Path

if any(word.endswith("default_worker.py") for word in sys.orig_argv):
    Path({found!r}).touch()
"""


@pytest.mark.slow
def test_workers_of_ray_run_no_file_of_the_current_folder_and_find_what_is_relative_to_it(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "lib")
    Path("lib").mkdir()
    Path("lib/sitecustomize.py").write_text(IN_A_WORKER.format(found=str(folder / "found")))
    write_model(Path("model.bin"))
    write_c4(folder / "a.json.gz", records=20)
    cleaning = {"profile": "none", "classifier": {"path": "model.bin", "label": "good", "threshold": 0}}
    config = write_corpus_file(folder / "corpus.yaml", cleaning=cleaning)
    monkeypatch.setenv("RAY_TMPDIR", tempfile.gettempdir())  # the paths of Ray's sockets may have 107 characters
    monkeypatch.setenv("TMPDIR", str(temporary := folder / "temporary"))
    temporary.mkdir()
    done = run("data-pipeline", "build", config, "ray.num_cpus=1", "ray.small_bytes=0", cwd=Path.cwd())
    assert (done.returncode, files_that_were_run(folder)) == (0, []), done.stderr
    assert (folder / "found").exists()
    assert [*temporary.iterdir()] == []
