"""Copies of a run's state in host memory, from which checkpoints are written while training goes on.

Nothing but the optimizer's next step changes the state. So the copy is made beside the next forward and backward pass,
and that step waits for it: on a GPU in a stream of its own, on a CPU in the thread that then writes the checkpoint.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint.pinned import pinned_like
from pretrain.checkpoint.table import Piece
from pretrain.checkpoint.tensors import PARAMETER
from pretrain.run import watchdog
from pretrain.zero.deepspeed_private import in_memory, optimizer_state, swapped, wrapped
from pretrain.zero.engine import Engine
from pretrain.zero.optimizer import factored_state


@dataclass
class Copy:
    """This rank's state: tensors by "STATE/NAME", complete after `finish`, and the fragments that they hold.

    `seconds`: how long training has waited for it.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    pieces: dict[str, Piece] = field(default_factory=dict)
    seconds: float = 0.0
    _pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (to, from)
    _done: threading.Event = field(default_factory=threading.Event)
    _event: Any = None  # on a GPU

    def add(self, to: Tensor, source: Tensor, at_once: bool) -> None:
        """Makes `source` a part of the copy; `at_once`, if it is in memory only now."""
        if at_once:
            to.copy_(source)
        else:
            self._pending.append((to, source))

    def begin(self, device: torch.device) -> None:
        """Starts to copy if the device does so by itself."""
        if device.type != "cuda":
            return
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for to, source in self._pending:
                to.copy_(source, non_blocking=True)
            self._event = stream.record_event()
        self._done.set()

    def finish(self) -> None:
        """Completes the copy. Called from a thread of its own."""
        try:
            if self._event is not None:
                self._event.synchronize()
            for to, source in self._pending if self._event is None else ():
                to.copy_(source)
        finally:
            self._pending.clear()
            self._done.set()

    def wait(self) -> None:
        """Returns when the state may change."""
        started = time.perf_counter()
        self._done.wait()
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self.seconds += time.perf_counter() - started


def _host_tensor(like: Tensor) -> Tensor:
    return pinned_like(like) if like.device.type == "cuda" else torch.empty(like.shape, dtype=like.dtype)


class HostCopies:
    """Copies an engine's state again and again to the same host memory: fresh memory costs more than the copy.

    `allocate` makes a tensor on the host of the shape and dtype of the one that it gets.
    """

    def __init__(self, engine: Engine, allocate: Callable[[Tensor], Tensor] = _host_tensor):
        self._engine, self._current, self._allocate = engine, Copy(), allocate
        self._memory: dict[tuple[Any, str], Tensor] = {}
        self._current.finish()
        wrapped(engine.deepspeed).register_step_pre_hook(lambda *_: self._current.wait())

    def take(self) -> Copy:
        """Begins a copy. The one before must not be used any more."""
        copy, deepspeed = Copy(), self._engine.deepspeed
        state, factored = optimizer_state(deepspeed), factored_state(deepspeed)
        scalars: dict[str, list[Tensor]] = {}
        for number, owned in enumerate(in_memory(deepspeed)):
            watchdog.alive()
            if not owned:
                continue
            buffer = owned[0].buffer
            slots = state.get(buffer, {})
            names = [name for name, value in slots.items() if value.dim()]
            copied = {}
            for name, value in [(PARAMETER, buffer.data), *((name, slots[name]) for name in names)]:
                copied[name] = self._host_tensor(number, name, value)
                copy.add(copied[name], value.detach(), at_once=swapped(deepspeed, number))
            for fragment in owned:
                whole = factored.get(fragment.name, {}) if fragment.start == 0 else {}
                single = {name: value for name, value in slots.items() if not value.dim()}
                scalars[fragment.name] = list(single.values())
                copy.pieces[fragment.name] = Piece(
                    start=fragment.start,
                    size=fragment.size,
                    shape=list(fragment.shape),
                    scalars=dict.fromkeys(single, 0.0),
                    states=names,
                    whole=list(whole),
                )
                for name, values in copied.items():
                    copy.tensors[f"{name}/{fragment.name}"] = fragment.view(values)
                for name, value in whole.items():
                    on_host = copy.tensors[f"{name}/{fragment.name}"] = self._host_tensor(fragment.name, name, value)
                    copy.add(on_host, value, at_once=False)
        _set_scalars(copy.pieces, scalars)
        copy.begin(self._engine.device)
        self._current = copy
        return copy

    def _host_tensor(self, owner: int | str, name: str, value: Tensor) -> Tensor:
        if (owner, name) not in self._memory:
            self._memory[owner, name] = self._allocate(value)
        return self._memory[owner, name]


def _set_scalars(pieces: dict[str, Piece], scalars: dict[str, list[Tensor]]) -> None:
    """Sets the scalars of pieces, which are read from the device together."""
    distinct = {id(value): value for values in scalars.values() for value in values}
    if not distinct:
        return
    read = dict(zip(distinct, torch.stack([value.float() for value in distinct.values()]).tolist(), strict=True))
    for name, values in scalars.items():
        scalars_of_piece = pieces[name].scalars
        scalars_of_piece.update(zip(scalars_of_piece, (read[id(value)] for value in values), strict=True))
