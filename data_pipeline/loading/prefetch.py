"""Prepares batches ahead of the step that trains on them: worker processes make items, the next step is fetched and
copied to the accelerator, and labels and examples are counted on the host, since a GPU would take launches for it."""

import atexit
import contextlib
import signal
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from data_pipeline.base.errors import FailedError, StoreError, one_line
from data_pipeline.base.processes import blocked
from data_pipeline.loading import server
from data_pipeline.loading.batch_layout import IGNORE_INDEX, LABELS

Batch = dict[str, torch.Tensor]
Batches = list[Batch]
Item = TypeVar("Item")
_DIGITS = 4  # leading binary digits of a number of targets, which grows by an eighth at most
_open: WeakSet[Iterator[Any]] = WeakSet()


@dataclass(frozen=True)
class _ItemOrError(Generic[Item]):
    """An item, or the error that was raised instead: an error raised in a worker would lose its type."""

    item: Item | None
    error: Exception | None = None

    def pin_memory(self) -> "_ItemOrError[Item]":
        """The DataLoader calls this method: it doesn't look into dataclasses."""
        pin = getattr(self.item, "pin_memory", None)
        return _ItemOrError(pin() if pin else self.item, self.error)


class _Guarded(Dataset):
    def __init__(self, dataset: Dataset):
        self._dataset = dataset

    def __getitem__(self, number: int) -> _ItemOrError[Any]:
        try:
            return _ItemOrError(self._dataset[number])
        except Exception as error:
            return _ItemOrError(None, error)


def items(dataset: Dataset, numbers: Iterable[int], workers: int, prefetch: int, pin: bool = False) -> Iterator[Any]:
    """`dataset[number]` for each of `numbers`, in order. Each of the `workers` makes `prefetch` items ahead.

    `pin`: items are in page-locked memory, from which a GPU copies while it computes.

    Raises what the dataset raises, and FailedError if a worker process dies. The workers end with the iterator, or with
    this process.
    """
    made = _items(dataset, numbers, workers, prefetch, pin)
    _open.add(made)
    return made


def _items(dataset: Dataset, numbers: Iterable[int], workers: int, prefetch: int, pin: bool) -> Iterator[Any]:
    if workers:
        server.start(type(dataset).__module__)
    # blocked until a worker has installed its handlers
    with blocked(server.REQUESTS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # more workers than cores
        loader = DataLoader(
            _Guarded(dataset),
            batch_size=None,
            sampler=numbers,
            num_workers=workers,
            multiprocessing_context="forkserver" if workers else None,
            prefetch_factor=prefetch if workers else None,
            worker_init_fn=_outlive_requests,
            generator=torch.Generator(),  # leaves the global generator alone
            pin_memory=pin,
        )
        try:
            made = iter(loader)
        except BrokenPipeError:  # Python has a worker import the script that has started it
            raise FailedError(
                "data.workers: a worker process has ended as it started; a Python script starts workers under "
                '`if __name__ == "__main__":` alone'
            ) from None
    while True:
        try:
            one = next(made)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            raise FailedError(_death(error)) from None
        if one.error is not None:
            raise one.error
        yield one.item


@atexit.register  # runs before multiprocessing's own, which sends workers one SIGTERM and waits without a limit
def _end_workers() -> None:
    for made in list(_open):
        with contextlib.suppress(ValueError):  # another thread is in it
            made.close()  # type: ignore[attr-defined]


def _outlive_requests(worker: int) -> None:
    for number in server.IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _survive_first_sigterm)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, server.REQUESTS)


def _survive_first_sigterm(number: int, frame: FrameType | None) -> None:
    """Survives one SIGTERM, which a scheduler sends. PyTorch and Python each send one to a stuck worker."""
    signal.signal(number, signal.SIG_DFL)


def _death(error: Exception) -> str:
    """The message about a worker's death. PyTorch's error has the process and the signal, unless it is about fetching a
    tensor of the worker."""
    if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
        return f"data.workers: {one_line(error)}"
    hint = "the machine may be out of memory: lower data.workers or data.prefetch_factor"
    return f"data.workers: the loader's worker process died: {one_line(error)}; {hint}"


class Lookahead(Iterator[Item], Generic[Item]):
    """Yields the same items, each after the next one has been fetched or has failed to be fetched. So a run learns that
    its store has failed while it still has an item to use.

    `lost`: the error of a remote store that failed. The last item is still returned; then the error is raised. So a run
    that stops after the current item has used all items that it got.
    """

    def __init__(self, items: Iterator[Item]):
        self._items = items
        self._next: list[Item] = []
        self._error: Exception | None = None
        self._started = False

    @property
    def lost(self) -> StoreError | None:
        return self._error if isinstance(self._error, StoreError) else None

    def __next__(self) -> Item:
        if not self._started:
            self._started = True
            self._fetch()
        if not self._next:
            raise self._error or StopIteration
        item = self._next.pop()
        self._fetch()
        return item

    def _fetch(self) -> None:
        if self._error is None:
            try:
                self._next = [next(self._items)]
            except (StoreError, StopIteration) as error:
                # its traceback would keep the loader, and with it the loader's processes, until the process ends
                self._error = error.with_traceback(None)
            except Exception as error:
                self._error = error


def on_device(steps: Iterable[Batches], device: torch.device, in_few_shapes: bool = False) -> Iterator[Batches]:
    """The same batches on `device`. On CUDA, the next step's batches are copied from pinned memory while this step
    computes.

    On CUDA, batches also have `target_indices` (n,), the indices of the labels that aren't ignored: a model that
    searched for them would wait for the device. `in_few_shapes`: n is rounded up to one of few numbers. Batches on CUDA
    also have their COUNTS.
    """
    return _copied_ahead(steps, device, in_few_shapes) if device.type == "cuda" else iter(steps)


def _copied_ahead(steps: Iterable[Batches], device: torch.device, in_few_shapes: bool) -> Iterator[Batches]:
    stream = torch.cuda.Stream(device)
    ahead: Batches | None = None
    for step in steps:
        with torch.cuda.stream(stream):
            copied = [
                {
                    name: tensor.to(device, non_blocking=True)
                    for name, tensor in with_counts(with_target_indices(batch, in_few_shapes)).items()
                }
                for batch in step
            ]
        if ahead is not None:
            yield ahead
        torch.cuda.current_stream(device).wait_stream(stream)
        for tensor in (tensor for batch in copied for tensor in batch.values()):
            tensor.record_stream(torch.cuda.current_stream(device))
        ahead = copied
    if ahead is not None:
        yield ahead


def to_device(values: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`torch.tensor(values)` on `device`, through page-locked memory: the host doesn't wait for the copy."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def with_target_indices(batch: Batch, in_few_shapes: bool = False) -> Batch:
    """The batch with its `target_indices`, pinned if its labels are."""
    labels = batch["labels"]
    indices = (labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
    if in_few_shapes:
        indices = _in_few_numbers(indices, labels)
    return {**batch, "target_indices": indices.pin_memory() if labels.is_pinned() else indices}


def _in_few_numbers(indices: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Pads the `indices` (n,) of the labels that aren't ignored with the index of an ignored one, if there is one. The
    new number of indices is the next one whose binary digits are 0 after the first four.

    9 of 32 → 9        100 of 512 → 104        500 of 500 → 500
    """
    count = len(indices)
    unit = 1 << max(0, count.bit_length() - _DIGITS)
    added = min(-(-count // unit) * unit, labels.numel()) - count
    return F.pad(indices, (0, added), value=int((labels.flatten() != IGNORE_INDEX).int().argmin()))


def label_counts(batch: Batch) -> torch.Tensor:
    """(labels,) int64: the number of labels of each kind that count in a batch, in the order of LABELS."""
    none = batch["labels"].new_zeros(())
    return torch.stack([(batch[name] != IGNORE_INDEX).sum() if name in batch else none for name in LABELS])


def example_sizes(batch: Batch) -> torch.Tensor:
    """(5,) int64: input tokens, target tokens, and the pairs of two inputs, two targets, and one of each.

    Pairs are summed over examples; attention takes time for each pair.
    """
    ids, labels = batch["encoder_input_ids"], batch["labels"]
    inputs = batch.get("encoder_segment_ids", batch.get("encoder_attention_mask", torch.ones_like(ids)))
    targets = (labels != IGNORE_INDEX) * batch.get("decoder_segment_ids", 1)
    most = max(ids.size(1), labels.size(1))
    input_lengths, target_lengths = _lengths(inputs, most), _lengths(targets, most)
    pairs = (input_lengths**2, target_lengths**2, input_lengths * target_lengths)
    return torch.stack([counts.sum() for counts in (input_lengths, target_lengths, *pairs)])


def _lengths(segments: torch.Tensor, most: int) -> torch.Tensor:
    """(rows, most): tokens of each example of a row, [[1, 1, 1, 2, 2, 0]] -> [[3, 2, 0, …]]."""
    counts = segments.new_zeros(segments.size(0), most + 1)
    return counts.scatter_add_(1, segments, torch.ones_like(segments))[:, 1:]


COUNTS = {"label_counts": label_counts, "example_sizes": example_sizes}
"""The counts of a batch, by name. Batches on a GPU have the counts under these names; no model reads them."""


def with_counts(batch: Batch) -> Batch:
    """The batch with its counts, pinned if its labels are."""
    pinned = batch["labels"].is_pinned()
    counts = {name: count(batch) for name, count in COUNTS.items()}
    return {**batch, **{name: one.pin_memory() if pinned else one for name, one in counts.items()}}


def count_of(name: str, batch: Batch) -> torch.Tensor:
    """A count of a batch: the batch's own, or counted now."""
    return batch[name] if name in batch else COUNTS[name](batch)
