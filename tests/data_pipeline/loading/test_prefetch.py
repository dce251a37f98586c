"""Processes that prepare batches: what ends them, and what they hand over."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from data_pipeline.base.errors import FailedError
from data_pipeline.corpus import open_corpus
from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.batches import TrainingBatches
from data_pipeline.loading.prefetch import _Guarded, items
from data_pipeline.loading.stream import Stream
from tests.support.tables import each


def stream_of(*corpora: Path, **changes) -> Stream:
    opened = [open_corpus(corpus) for corpus in corpora]
    return Stream(opened, [1.0, 0.4][: len(opened)], **{"seed": 3, "lanes": 8, **changes})


class Killed(torch.utils.data.Dataset):
    """A dataset whose third item kills the process that makes it."""

    def __getitem__(self, number):
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return number


def refuse():
    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


class Unreachable(torch.utils.data.Dataset):
    """As a worker that has just died, before PyTorch sees it: what it has made can't be fetched from it any more."""

    def __getitem__(self, number):
        return self

    def __reduce__(self):
        return (Unreachable, ()) if multiprocessing.parent_process() is None else (refuse, ())


@each("dataset, prefetch, which", [(Killed(), 2, r".*pid\S* \d+"), (Unreachable(), 4, ".*refused")])
def test_a_worker_that_dies_is_named_also_before_its_items_are_fetched(dataset, prefetch, which):
    with pytest.raises(FailedError, match=rf"data.workers: the loader's worker process died: {which}.*out of memory"):
        list(items(dataset, range(8), workers=1, prefetch=prefetch))


@pytest.mark.filterwarnings("error::UserWarning")
def test_more_workers_than_cores_are_no_news(monkeypatch):
    """data.workers may exceed the cores, for rows of a slow store; PyTorch would say so twice, in five lines each."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    assert list(items(range(4), range(4), workers=2, prefetch=1)) == [0, 1, 2, 3]


STUCK = """
import os, time
from pathlib import Path

with Path(__file__).with_name("imports").open("a") as file:
    file.write(f"{os.getpid()}\\n")

class Stuck:
    def __getitem__(self, number):
        if number == 4:
            time.sleep(3600)
        return number
"""
RUN = """
import signal
import psutil
from data_pipeline.loading.prefetch import items
from stuck import Stuck

if __name__ == "__main__":
    held = open(__file__)
    print("printed", end=" ")
    made = items(Stuck(), range(8), workers=2, prefetch=1)
    assert next(made) == 0
    family = psutil.Process().children(recursive=True)
    for process in family:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            process.send_signal(number)
    assert [next(made), next(made), next(made)] == [1, 2, 3]
    assert not any(file.path == __file__ for process in family for file in process.open_files())
    print(*(process.pid for process in family))
"""


@pytest.mark.slow
def test_signals_that_ask_a_run_to_stop_end_no_worker_and_the_end_of_a_run_one_that_is_stuck(tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    (tmp_path / "run.py").write_text(RUN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, tmp_path / "run.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    printed, *pids = done.stdout.split()
    assert printed == "printed"
    assert len(pids) == 4  # a server that forks, its two children, and the tracker of what they share
    assert len((tmp_path / "imports").read_text().split()) == 2  # by the run and the server, not by each worker
    left = [process for process in psutil.process_iter() if str(process.pid) in pids]
    assert psutil.wait_procs(left, timeout=120)[1] == []


def test_batches_that_the_loader_hands_over_are_pinned_tensor_by_tensor(small_corpus, monkeypatch):
    """Goes through both wrappers, by the method that the DataLoader calls; actual pinning needs CUDA."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: pinned.append(self) or self)
    made = _Guarded(TrainingBatches(stream_of(small_corpus), BatchLayout(0, 1, 4, 1)))[0]
    again = made.pin_memory()
    assert again.item.batch.keys() == made.item.batch.keys()
    assert [id(tensor) for tensor in pinned] == [id(tensor) for tensor in made.item.batch.values()]
