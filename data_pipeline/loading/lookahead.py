"""Fetches one item ahead, so that a run learns that its store has failed while it still has an item to use."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from data_pipeline.foundation.errors import StoreError

Item = TypeVar("Item")


class Lookahead(Iterator[Item], Generic[Item]):
    """The same items. Each is returned once the next one has been fetched, or has failed to be.

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
