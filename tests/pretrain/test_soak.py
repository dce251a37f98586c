"""Runs that are killed by plan and go on; `checks/soak` kills them at random moments."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from data_pipeline.corpus import open_corpus
from data_pipeline.loading.stream import Stream
from pretrain.checkpoint.choose import newest
from pretrain.checkpoint.tensors import PARAMETER, StoredTensors
from tests.pretrain.checkpoint_runs import STEPS, config, recorded_training
from tests.pretrain.rank_processes import on_ranks
from tests.pretrain.recorded import largest_relative_difference, recorded_rows, scheduled_rows
from tests.pretrain.runs import losses, run_file, train_ranks

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


def processes(name: str, value: str) -> list[psutil.Process]:
    """Those with this variable in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


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
        while processes("MARK", mark):
            time.sleep(0.1)
    finally:
        for left in processes("MARK", mark):
            left.kill()
    checkpoints = killed.parent / "run/checkpoints"
    assert [one.name for one in checkpoints.glob("step-*")] == ["step-00000002"]
    assert launched(killed).wait() == 0, (killed.parent / "output").read_text()
    assert losses(killed) == losses(whole)
    ours, theirs = (StoredTensors(path.parent / "run/checkpoints/step-00000008") for path in (killed, whole))
    assert all(torch.equal(ours.whole(PARAMETER, name), theirs.whole(PARAMETER, name)) for name in theirs.shapes)
    assert not list(checkpoints.glob(".*"))


@pytest.mark.slow
def test_a_run_that_is_killed_on_other_ranks_and_stages_takes_the_same_rows(whole, small_corpus, tmp_path):
    """It is killed during a save, then between two steps; then a bit of its latest checkpoint flips."""
    for ranks, stage, moment in ((2, 2, "save"), (4, 3, "step")):
        with pytest.raises(RuntimeError, match=f"rank {ranks - 1}: died"):
            on_ranks(ranks, killed_training, tmp_path, small_corpus, stage, moment, seconds=600)
    run = tmp_path / "adamw/run"
    damaged = newest(run) / "rank-00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    assert on_ranks(1, recorded_training, tmp_path, config(tmp_path, small_corpus, "adamw", 1), None) == [0]
    schedule = scheduled_rows(Stream([open_corpus(small_corpus)], [1.0], 0, 8), 16, STEPS)
    assert recorded_rows(tmp_path / "adamw") == schedule
    found, wanted = (losses(folder / "adamw/run.yaml") for folder in (tmp_path, whole))
    assert largest_relative_difference(found, wanted) < 1e-5
    assert list((run / "checkpoints").glob(".*")) == []


def killed_training(folder: Path, corpus: Path, stage: int, moment: str) -> int:
    """The last rank kills itself as it saves for the second time, or before the eleventh step."""
    from pretrain.checkpoint import save
    from pretrain.zero.engine import Engine

    take_step, write_part, saved = Engine.step, save.write_part, []

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def step(engine: Engine, step: int, *arguments: object) -> object:
        if moment == "step" and step == 10:
            die()
        return take_step(engine, step, *arguments)

    def written(*arguments: object) -> object:
        *others, progress = arguments
        saved.append(others)
        return write_part(*others, die if moment == "save" and len(saved) == 2 else progress)

    if dist.get_rank() == dist.get_world_size() - 1:
        Engine.step, save.write_part = step, written
    return recorded_training(folder, config(folder, corpus, "adamw", stage), None)
