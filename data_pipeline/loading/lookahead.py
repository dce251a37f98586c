"""Looks one item ahead, so that a loader's end by its store is known while there is still work to do."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from data_pipeline.foundation.errors import StoreError

Item = TypeVar("Item")


class Ahead(Iterator[Item], Generic[Item]):
    """The same items. Each is given out once the next one is there, or once getting it has failed.

    Then `lost` is why, if a remote store is the reason: the last items are still to come, and after them the error is
    raised. A run that stops after the current item has taken all that it was given.
    """

    def __init__(self, items: Iterator[Item]):
        self._items = items
        self._held: list[Item] = []
        self._error: Exception | None = None
        self._begun = False

    @property
    def lost(self) -> StoreError | None:
        return self._error if isinstance(self._error, StoreError) else None

    def __next__(self) -> Item:
        if not self._begun:
            self._begun = True
            self._look()
        if not self._held:
            raise self._error or StopIteration
        item = self._held.pop()
        self._look()
        return item

    def _look(self) -> None:
        if self._error is None:
            try:
                self._held = [next(self._items)]
            except (StoreError, StopIteration) as error:
                # its traceback would keep the loader, and with it the loader's processes, until the process ends
                self._error = error.with_traceback(None)
            except Exception as error:
                self._error = error
