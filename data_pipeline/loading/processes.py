"""Items of a dataset by number, made here or ahead of time by worker processes; one that dies is named."""

import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from data_pipeline.foundation.blocked_signals import blocked
from data_pipeline.foundation.errors import FailedError

Item = TypeVar("Item")
# A terminal or a scheduler sends them to all processes. The run stops on them, and needs its loader until then.
_IGNORED = {signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
_REQUESTS = {*_IGNORED, signal.SIGTERM}  # which may also be meant for a worker
_PIDS = re.compile(r"pid(?:\(s\)|s)? ([\d, ]+)")


@dataclass(frozen=True)
class _Made(Generic[Item]):
    """An item, or the error that it ended in: raised in a worker it would lose its type on the way."""

    item: Item | None
    error: Exception | None = None

    def pin_memory(self) -> "_Made[Item]":
        """What the DataLoader calls on CUDA; it looks into no dataclass by itself."""
        pin = getattr(self.item, "pin_memory", None)
        return _Made(pin() if pin else self.item, self.error)


class _Guarded(Dataset):
    def __init__(self, dataset: Dataset):
        self._dataset = dataset

    def __getitem__(self, number: int) -> _Made[Any]:
        try:
            return _Made(self._dataset[number])
        except Exception as error:
            return _Made(None, error)


def items(dataset: Dataset, numbers: Iterable[int], workers: int, prefetch: int) -> Iterator[Any]:
    """`dataset[number]` for each of `numbers`, in order. Each of the `workers` makes `prefetch` of them ahead.

    Raises what making an item raised, and FailedError where a worker process died.
    """
    with blocked(_REQUESTS):  # until a worker has its handlers
        if workers:
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS)  # that has unblocked some of them
        made = iter(
            DataLoader(
                _Guarded(dataset),
                batch_size=None,
                sampler=numbers,
                num_workers=workers,
                multiprocessing_context="forkserver" if workers else None,
                prefetch_factor=prefetch if workers else None,
                worker_init_fn=_outlive_requests,
                generator=torch.Generator(),  # its own: the global generator is not touched
                pin_memory=torch.cuda.is_available(),
            )
        )
    while True:
        try:
            one = next(made)
        except StopIteration:
            return
        except RuntimeError as error:
            raise FailedError(_death(error)) from None
        if one.error is not None:
            raise one.error
        yield one.item


def _outlive_requests(worker: int) -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _not_at_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _REQUESTS)


def _not_at_once(number: int, frame: FrameType | None) -> None:
    """One SIGTERM is a scheduler's. Workers that are stuck get two: as PyTorch shuts down, and as Python does."""
    signal.signal(number, signal.SIG_DFL)


def _death(error: RuntimeError) -> str:
    """One line of what PyTorch says of a dead worker."""
    said = " ".join(str(error).split())
    found = _PIDS.search(said)
    killed = re.search(r"killed by signal: (\w+)", said)
    if not found:
        return f"data.workers: {said[:300]}"
    how = f"was killed ({killed[1]})" if killed else "died"
    memory = signal.Signals.SIGKILL.name in said or "Killed" in said
    hint = "; the machine may be out of memory: lower data.workers or data.prefetch" if memory or not killed else ""
    return f"data.workers: the loader's worker process {found[1].strip()} {how}{hint}"
