"""Many short requests to a file system at once."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")
_AT_ONCE = 64  # items that a thread takes: handing over each by itself takes longer than a request on a local disk


def in_threads(function: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    """`function` of each of `items`, in order, for slow file systems. Raises what the first one raises."""
    chunks = [items[at : at + _AT_ONCE] for at in range(0, len(items), _AT_ONCE)]
    with ThreadPoolExecutor() as pool:
        return [one for of_chunk in pool.map(lambda chunk: [*map(function, chunk)], chunks) for one in of_chunk]
