"""The memory that this process can still allocate, on a machine or in a container."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

_GROUPS = {  # controller: (mount point, file of the limit, file of the usage, key of the reclaimable part of the usage)
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available() -> int:
    """The bytes that this process can still allocate: the machine's free memory, or less under a control group."""
    return min([psutil.virtual_memory().available, *left_by_control_groups()])


def left_by_control_groups(system: Path = Path("/")) -> Iterator[int]:
    """The bytes left in each control group of this process that has a limit, such as a container's or a job's."""
    groups = (system / "proc/self/cgroup").read_text() if (system / "proc/self/cgroup").exists() else ""
    for _, controllers, path in (line.split(":", 2) for line in groups.splitlines()):
        if controllers not in _GROUPS:
            continue
        mounted, limit, usage, cache = _GROUPS[controllers]
        root = system / mounted
        own = root / path.lstrip("/")
        for group in (one for one in (own, *own.parents) if one.is_relative_to(root)):
            with contextlib.suppress(OSError, ValueError):  # in a container there is only the root; "max": no limit
                most, taken = (int((group / name).read_text()) for name in (limit, usage))
                kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                yield most - taken + int(kinds.get(cache, 0))
