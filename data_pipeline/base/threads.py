"""Sends many short requests to a file system at once."""

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")
_AT_ONCE = 64  # items that a thread takes: handing over a single item takes longer than a request to a local disk


def in_threads(
    function: Callable[[Item], Answer], items: Collection[Item], at_once: int = _AT_ONCE, threads: int | None = None
) -> list[Answer]:
    """`function`'s result for each of `items`, in order. A thread takes `at_once` items. Raises the first error.

    `threads`: how many threads there are at most. None: a few more than cores.
    """
    given = [*items]
    chunks = [given[at : at + at_once] for at in range(0, len(given), at_once)]
    with ThreadPoolExecutor(threads) as pool:
        return [one for of_chunk in pool.map(lambda chunk: [*map(function, chunk)], chunks) for one in of_chunk]
