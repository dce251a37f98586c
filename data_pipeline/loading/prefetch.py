"""Steps fetched ahead of the one that trains: from the loader, and onto the accelerator."""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch

from data_pipeline.foundation.errors import StoreError
from data_pipeline.loading.batch_layout import IGNORE_INDEX

Batches = list[dict[str, torch.Tensor]]
Item = TypeVar("Item")


class Lookahead(Iterator[Item], Generic[Item]):
    """The same items. Each is returned once the next one has been fetched, or has failed to be: a run learns that its
    store has failed while it still has an item to use.

    If a remote store failed, `lost` is its error. The item that was fetched before is still returned; then the error
    is raised. A run that stops after the current item has used everything that it was given.
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


def on_device(steps: Iterable[Batches], device: torch.device) -> Iterator[Batches]:
    """The same batches on `device`. On CUDA the next step's batches are copied from pinned memory, on a stream of their
    own, while this step computes.

    There they also have `target_indices` (n,): the numbers of the labels that count, among all labels. A model that
    counted them itself would wait for the device.
    """
    if device.type != "cuda":
        yield from steps
        return
    stream = torch.cuda.Stream(device)
    ahead: Batches | None = None
    for step in steps:
        with torch.cuda.stream(stream):
            copied = [
                {name: tensor.to(device, non_blocking=True) for name, tensor in with_target_indices(batch).items()}
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


def with_target_indices(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch with its `target_indices`, pinned where its labels are."""
    labels = batch["labels"]
    indices = (labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
    return {**batch, "target_indices": indices.pin_memory() if labels.is_pinned() else indices}
