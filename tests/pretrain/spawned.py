"""Real ranks for a test, without the launcher: functions that run under DeepSpeed in processes of their own."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pretrain.hardware import free_port


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(rank, ranks, *arguments)` returns on each of so many ranks on CPU, one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, free_port(), folder, function, arguments), nprocs=ranks)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _rank(rank: int, ranks: int, port: int, folder: str, function: Callable[..., Any], arguments: tuple) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    from pretrain.ranks import joined

    with joined(cpu_threads=1, hang_seconds=120):
        torch.save(function(rank, ranks, *arguments), Path(folder) / f"{rank}.pt")
