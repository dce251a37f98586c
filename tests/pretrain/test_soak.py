"""A run that is killed by plan and goes on; `checks/soak` kills them at random moments."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint.tensors import PARAMETER, StoredTensors
from tests.pretrain.runs import losses, run_file, train_ranks
from tests.processes import processes_with

# Python imports a module of this name before anything else.
SITECUSTOMIZE = """
import os, pathlib, signal, time

rename = pathlib.Path.replace

def kill(path, target):
    if pathlib.Path(target).name == "step-00000004":
        supervisor = pathlib.Path(os.environ["SUPERVISOR"])
        while not supervisor.exists():
            time.sleep(0.1)
        os.kill(int(supervisor.read_text()), signal.SIGKILL)
        time.sleep(3600)
    return rename(path, target)

if os.environ.get("RANK") == "0":
    pathlib.Path.replace = kill
"""


def launched(path: Path, **variables: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "launch", "local", str(path), "--ranks", "2"]
    with (path.parent / "output").open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | variables, start_new_session=True)


@pytest.mark.slow
def test_a_run_whose_supervisor_is_killed_during_a_save_comes_to_the_same_bits(small_corpus, tmp_path):
    """No process may outlive it. It goes through DeepSpeed's launcher."""
    every = {"checkpoint": {"every_steps": 2, "keep_last": 9}, "evaluation": []}
    whole, killed = (run_file(tmp_path / name, small_corpus, **every) for name in ("whole", "killed"))
    assert train_ranks(whole, 2) == [0, 0]
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    mark, supervisor = uuid.uuid4().hex, tmp_path / "supervisor"
    process = launched(killed, PYTHONPATH=str(tmp_path), SUPERVISOR=str(supervisor), MARK=mark)
    try:
        supervisor.with_suffix(".new").write_text(str(process.pid))
        supervisor.with_suffix(".new").rename(supervisor)
        assert process.wait() == -signal.SIGKILL, (killed.parent / "output").read_text()
        while processes_with(MARK=mark):
            time.sleep(0.1)
    finally:
        for left in processes_with(MARK=mark):
            left.kill()
    checkpoints = killed.parent / "run/checkpoints"
    assert [one.name for one in checkpoints.glob("step-*")] == ["step-00000002"]
    assert launched(killed).wait() == 0, (killed.parent / "output").read_text()
    assert losses(killed) == losses(whole)
    ours, theirs = (StoredTensors(path.parent / "run/checkpoints/step-00000008") for path in (killed, whole))
    assert all(torch.equal(ours.whole(PARAMETER, name), theirs.whole(PARAMETER, name)) for name in theirs.shapes)
    assert not list(checkpoints.glob(".*"))
