"""Copies an engine's state to host memory for checkpoints, and restores a state from a checkpoint. The fingerprint of
the weights that a run saves is in the checkpoint, and a load verifies it.

Only the optimizer step changes the state. So the state is copied asynchronously during the next forward and backward
pass, and the next optimizer step waits for the copy. On GPUs the copy runs in a CUDA stream, on CPUs in the thread that
then writes the checkpoint.
"""

import hashlib
import math
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.engine.checkpoint.index import SavedFragment
from pretrain.engine.checkpoint.tensors import PARAMETER, StoredTensors, header, load_buffers
from pretrain.engine.deepspeed_private import flat_buffers, fragments, loaded, swapped, update_parameters, wrapped
from pretrain.engine.engine import Engine
from pretrain.engine.optimizers.flat_buffers import Sharded
from pretrain.run import watchdog

_PART = 2**20  # elements at once, since each takes 8 bytes or more as integers
_INTEGERS = {2: torch.int16, 4: torch.int32}  # by the bytes of an element


@dataclass
class Copy:
    """A copy of this rank's state, complete after `finish`.

    Attributes:
        tensors: the tensors, by "STATE/NAME".
        fragments: the fragments of parameters that the tensors hold, by parameter name.
        image: the bytes of a safetensors file of the tensors.
        seconds: how long training has waited for the copy.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    fragments: dict[str, SavedFragment] = field(default_factory=dict)
    image: Tensor = field(default_factory=lambda: torch.empty(0))
    seconds: float = 0.0
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (to, from)
    _done: threading.Event = field(default_factory=threading.Event)
    _event: Any = None  # where the device copies by itself
    _device: Any = None

    def begin(self, accelerator: Any) -> None:
        """Starts to copy if the device does so by itself. `accelerator`: DeepSpeed's."""
        if accelerator.is_synchronized_device():
            return
        self._device, stream = accelerator, accelerator.Stream()
        stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(stream):
            for to, source in self.pending:
                to.copy_(source, non_blocking=True)
            self._event = stream.record_event()
        self._done.set()

    def finish(self) -> None:
        """Completes the copy. Called from a thread of its own."""
        try:
            if self._event is not None:
                self._event.synchronize()
            for to, source in self.pending if self._event is None else ():
                to.copy_(source)
        finally:
            self.pending.clear()
            self._done.set()

    def wait(self) -> None:
        """Returns when the state may change."""
        started = time.perf_counter()
        self._done.wait()
        if self._event is not None:
            self._device.current_stream().wait_event(self._event)
        self.seconds += time.perf_counter() - started


def copy_bytes(engine: Engine) -> int:
    """Approximate bytes of a copy of this rank's state: fp32 parameters and the optimizer's state."""
    return 4 * engine.own_elements + engine.state_bytes


class PinnedStaging:
    """Copies an engine's state, each time to the same host memory, since new memory costs more than the copy.

    The memory has the content of a safetensors file. It is page-locked if a GPU copies. PyTorch takes the next power of
    two of page-locked bytes, unless PYTORCH_ALLOC_CONF has pinned_max_round_threshold_mb.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._image = torch.empty(0)
        self._shapes: dict[str, list[int]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._current = Copy()
        self._current.finish()

    def wait(self) -> None:
        """Returns when the state may change: call this before each update of the weights."""
        self._current.wait()

    def take(self) -> Copy:
        """Begins a copy. The copy before must not be used any more. Raises RuntimeError if there is too little memory,
        or the system locks no more pages."""
        copy, deepspeed = Copy(), self._engine.deepspeed
        optimizer = wrapped(deepspeed)
        state: dict[Tensor, dict[str, Tensor]] = optimizer.state
        factored = optimizer.factored_state() if isinstance(optimizer, Sharded) else {}
        buffers = [(buffer.tensor, [one for one in buffer.fragments if one.size]) for buffer in flat_buffers(deepspeed)]
        shapes: dict[str, list[int]] = {}
        whole: dict[str, Tensor] = {}
        scalars = _scalars([state.get(buffer, {}) for buffer, _ in buffers])
        for (buffer, owned), single in zip(buffers, scalars, strict=True):
            names = [name for name, value in state.get(buffer, {}).items() if value.dim()]
            for one in owned:
                others = factored.get(one.name, {}) if one.start == 0 else {}
                shapes |= {f"{name}/{one.name}": [one.size] for name in (PARAMETER, *names)}
                whole |= {f"{name}/{one.name}": value for name, value in others.items()}
                saved = SavedFragment(one.start, one.size, list(one.shape), single, names, list(others))
                copy.fragments[one.name] = saved
        self._lay_out(shapes | {name: list(value.shape) for name, value in whole.items()}, buffers[0][0].is_cuda)
        copy.image, copy.tensors = self._image, dict(self._tensors)
        for number, (buffer, owned) in enumerate(buffers):
            watchdog.alive()
            with loaded(deepspeed, number):
                for one in owned:
                    for name in (PARAMETER, *copy.fragments[one.name].states):
                        values = buffer.data if name == PARAMETER else state[buffer][name].detach()
                        to, source = copy.tensors[f"{name}/{one.name}"], one.view(values)
                        if swapped(deepspeed, number):  # the buffer is in memory only now
                            to.copy_(source)
                        else:
                            copy.pending.append((to, source))
        copy.pending += [(copy.tensors[name], value) for name, value in whole.items()]
        copy.begin(self._engine.accelerator)
        self._current = copy
        return copy

    def _lay_out(self, shapes: dict[str, list[int]], on_gpu: bool) -> None:
        """Allocates memory for tensors of these shapes. An optimizer may change the shapes in its first step."""
        if shapes == self._shapes:
            return
        beginning, sizes = bytearray(header(shapes)), [math.prod(shape) for shape in shapes.values()]
        size = len(beginning) + 4 * sum(sizes)
        self._image = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._image[: len(beginning)] = torch.frombuffer(beginning, dtype=torch.uint8)
        values = self._image[len(beginning) :].view(torch.float32).split(sizes)
        self._tensors = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), values, strict=True)}
        self._shapes = shapes


def _scalars(slots: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """The scalars among the optimizer's states of each flat buffer, read from the device in one transfer."""
    single = [{name: value for name, value in one.items() if not value.dim()} for one in slots]
    values = [value.float() for one in single for value in one.values()]
    read = iter(torch.stack(values).tolist() if values else [])
    return [{name: next(read) for name in one} for one in single]


def restore(engine: Engine, directory: Path, weights_only: bool = False) -> None:
    """Loads a checkpoint's parameters and optimizer state, or its weights alone, into an engine. All ranks call this
    together.

    Each rank reads its own fragments. The files must have been verified before.
    """
    stored, optimizer = StoredTensors(directory), wrapped(engine.deepspeed)
    for fragment in fragments(engine.deepspeed):
        watchdog.alive()
        elements = (fragment.name, fragment.start, fragment.size)
        fragment.view(fragment.buffer.data).copy_(stored.read(PARAMETER, *elements))
        if weights_only:
            continue
        slots = optimizer.state.setdefault(fragment.buffer, {})
        for name, value in stored.scalars(fragment.name).items():
            slots[name] = torch.tensor(value, dtype=torch.float32, device=fragment.buffer.device)
        for name in slots.keys() - {*stored.scalars(fragment.name), *stored.states(fragment.name)}:
            del slots[name]  # of later steps: no step before the checkpoint was applied
        for name in stored.states(fragment.name):
            if name not in slots:
                slots[name] = torch.zeros_like(fragment.buffer.data)
            fragment.view(slots[name]).copy_(stored.read(name, *elements))
    if isinstance(optimizer, Sharded) and not weights_only:
        optimizer.set_factored_state(stored.factored_state())
    update_parameters(engine.deepspeed)
    load_buffers(engine.deepspeed.module, directory)


def fingerprint(values: Tensor, start: int = 0) -> Tensor:
    """The fingerprint (2,) int64 of a part of a tensor. `start`: position of the part in the flattened tensor.

    The fingerprint of a tensor is two sums modulo 2**64 over its elements, read as integers: the sum of the elements,
    and the sum of elements times positions. A single flipped bit always changes the first sum; several flips cancel out
    only by chance. The sums of a tensor's shards add up to the sums of the tensor, so a fingerprint doesn't depend on
    the sharding.
    """
    found = torch.zeros(2, dtype=torch.int64, device=values.device)
    for first in range(0, values.numel(), _PART):
        part = values[first : first + _PART].contiguous().view(_INTEGERS[values.element_size()]).long()
        position = start + first + 1
        places = torch.arange(position, position + part.numel(), device=values.device)
        found += torch.stack([part.sum(), (part * places).sum()])
    return found


def fingerprints_of_masters(engine: Engine, dtype: torch.dtype) -> Tensor:
    """(parameters, 2): fingerprints of the optimizer's fp32 weights, rounded to `dtype`, in the order of the model's
    parameters. All ranks call this."""
    numbers = {name: number for number, (name, _) in enumerate(engine.module.named_parameters())}
    found = torch.zeros(len(numbers), 2, dtype=torch.int64, device=engine.device)
    for fragment in engine.fragments():
        values = fragment.view(fragment.buffer.data).to(dtype)
        found[numbers[fragment.name]] += fingerprint(values, fragment.start).to(found.device)
    dist.all_reduce(found)
    return found


def fingerprint_of_masters(engine: Engine) -> str:
    """A fingerprint of the optimizer's fp32 weights, independent of their shards. All ranks call this."""
    return hashlib.blake2b(
        fingerprints_of_masters(engine, torch.float32).cpu().numpy().tobytes(), digest_size=16
    ).hexdigest()
