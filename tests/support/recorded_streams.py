"""An accelerator that computes on the CPU, in order, and records what would run on which stream of a GPU.

`recording` notes each operation's reads and writes, the events and waits of DeepSpeed's accelerator, and collectives as
NCCL runs them: on the current stream, or, if asynchronous, on a stream of the group until `wait` is called.
"""

import contextlib
import gc
import itertools
import threading
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.happens_before import HOST, Access, First, Freed, Marked, Record, Wait

BACKEND = "recorded"
_GROUP: Any = dist.ProcessGroup
_BETWEEN = (__file__, contextlib.__file__, "/torch/", "/deepspeed/comm/", "/nvtx.py")


class Recorder:
    """What this rank has recorded. Streams have numbers; 0 is the default stream."""

    def __init__(self) -> None:
        self.record: Record = []
        self.streams: list[RecordedStream] = []
        self.current: RecordedStream
        self._of_groups: dict[RecordedGroup, RecordedStream] = {}
        self._events = itertools.count()
        self._memories = itertools.count()
        self._known: dict[int, int] = {}  # by a storage's identity, its number
        self._unused: dict[int, tuple[int, int]] = {}  # memory that is only allocated yet: where, and when
        self._told: dict[int, set[int]] = {}
        self._frees = 0

    def of_group(self, group: "RecordedGroup") -> "RecordedStream":
        """The stream of a group's asynchronous collectives."""
        if group not in self._of_groups:
            self._of_groups[group] = RecordedStream(name="collectives")
        return self._of_groups[group]

    def mark(self, stream: int) -> int:
        """Records a new event on a stream."""
        event = next(self._events)
        self.record.append(Marked(event, stream))
        return event

    def wait(self, waiting: int, events: list[int], waited: str) -> None:
        """`waited`: what for, in words; "" if it isn't asked for, but happens always."""
        who = "the host" if waiting == HOST else self.streams[waiting].name
        self.record.append(Wait(waiting, tuple(events), f"{_caller()}: {who} waits for {waited}" if waited else ""))

    def host_waits(self, waited: str) -> None:
        """The host waits for all streams."""
        self.wait(HOST, [self.mark(stream.stream_id) for stream in self.streams], waited)

    def access(self, tensor: Tensor, writes: bool, name: str, stream: "RecordedStream | None" = None) -> None:
        if not tensor.numel():
            return
        where = stream or self.current
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        width = tensor.element_size()
        low, high = int(tensor.storage_offset() * width), int((tensor.storage_offset() + last + 1) * width)
        memory, name = self.memory(tensor), f"{_caller()}: {name} on {where.name}"
        if memory in self._unused:
            self.record.append(First(memory, *self._unused.pop(memory)))
        self.record.append(Access(where.stream_id, memory, low, high, writes, name))

    def memory(self, tensor: Tensor) -> int:
        """The number of a tensor's memory. It is allocated on the current stream if it is new."""
        storage = tensor.untyped_storage()
        identity = id(storage)
        if identity not in self._known:
            number, pool = next(self._memories), self.current.stream_id
            self._known[identity], self._unused[number] = number, (pool, self._frees)
            told = self._told[number] = set()
            weakref.finalize(storage, self._freed, identity, number, pool, told)
        return self._known[identity]

    def tell(self, tensor: Tensor, stream: int) -> None:
        self._told[self.memory(tensor)].add(stream)

    def _freed(self, identity: int, number: int, pool: int, told: set[int]) -> None:
        del self._known[identity], self._told[number]
        self._unused.pop(number, None)
        self._frees += 1
        self.record.append(Freed(number, pool, frozenset(told)))


class RecordedStream(torch.Stream):
    """A stream of the accelerator. `torch.Stream` makes one of any number, which `Tensor.record_stream` takes."""

    name: str

    def __new__(cls, *_: Any, name: str = "", **__: Any) -> "RecordedStream":
        made = super().__new__(cls, stream_id=len(RECORDER.streams), device_index=0, device_type=0)
        made.name = name or _caller().partition(".")[0]
        RECORDER.streams.append(made)
        return made

    def wait_stream(self, other: Any) -> None:
        RECORDER.wait(self.stream_id, [RECORDER.mark(other.stream_id)], other.name)

    def wait_event(self, event: Any) -> None:
        RECORDER.wait(self.stream_id, event.marks, event.name)

    def record_event(self, event: Any = None) -> Any:
        event = event or RecordedEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        RECORDER.wait(HOST, [RECORDER.mark(self.stream_id)], self.name)

    def query(self) -> bool:
        return False


class RecordedEvent:
    """An event of the accelerator. Nobody learns that it has happened but by waiting for it."""

    def __init__(self, **_: Any):
        self.marks: list[int] = []
        self.name = ""

    def record(self, stream: Any = None) -> None:
        stream = stream or RECORDER.current
        self.marks, self.name = [RECORDER.mark(stream.stream_id)], f"an event on {stream.name}"

    def wait(self, stream: Any = None) -> None:
        (stream or RECORDER.current).wait_event(self)

    def synchronize(self) -> None:
        RECORDER.wait(HOST, self.marks, self.name)

    def query(self) -> bool:
        return False


class RecordingAccelerator(CPU_Accelerator):
    """A CPU that DeepSpeed uses as it uses a GPU, which works while the host continues."""

    Stream, Event = RecordedStream, RecordedEvent

    def is_synchronized_device(self) -> bool:
        return False

    def use_host_timers(self) -> bool:
        return True

    def communication_backend_name(self) -> str:
        return BACKEND

    def synchronize(self, device_index: Any = None) -> None:
        RECORDER.host_waits("all streams")

    def current_stream(self, device_index: Any = None) -> RecordedStream:
        return RECORDER.current

    def default_stream(self, device_index: Any = None) -> RecordedStream:
        return RECORDER.streams[0]

    @contextlib.contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        before, RECORDER.current = RECORDER.current, stream
        try:
            yield
        finally:
            RECORDER.current = before


class Operations(TorchDispatchMode):
    """Records what each operation of PyTorch reads and writes, on the current stream."""

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        named = named or {}
        if threading.current_thread() is not threading.main_thread():  # Gloo's: the collective is what counts
            return operation(*given, **named)
        name = operation.name()
        if name == "aten::record_stream":
            RECORDER.tell(given[0], given[1].stream_id)
            return None
        arguments = operation._schema.arguments
        read: list[Tensor] = []
        written: list[Tensor] = []
        for number, argument in enumerate(arguments):
            value = given[number] if number < len(given) else named.get(argument.name)
            changed = argument.alias_info is not None and argument.alias_info.is_write
            (written if changed else read).extend(_tensors(value))
        result = operation(*given, **named)
        made = _tensors(result)
        if any(part.alias_info is not None and not part.alias_info.is_write for part in operation._schema.returns):
            return result  # a view
        if name.startswith(("aten::empty", "aten::new_empty")):
            for tensor in made:
                RECORDER.memory(tensor)
            return result
        for tensor in read:
            RECORDER.access(tensor, False, name)
        for tensor in [*written, *made]:
            RECORDER.access(tensor, True, name)
        if name == "aten::_local_scalar_dense":  # the host reads a number
            RECORDER.wait(HOST, [RECORDER.mark(RECORDER.current.stream_id)], "")
        return result


class RecordedWork(dist.Work):
    """An asynchronous collective on its group's stream. It holds its tensors until it is waited for, as PyTorch's."""

    def __init__(self, work: dist.Work, end: int, held: list[Tensor]):
        super().__init__()
        self._work, self._end, self._held = work, end, held

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        RECORDER.wait(RECORDER.current.stream_id, [self._end], "a collective")
        self._held = []
        return True


class RecordedGroup(_GROUP):
    """Gloo, recorded as NCCL would run it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any):
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return BACKEND

    def _run(self, name: str, read: Any, written: Any, options: Any, work: dist.Work) -> dist.Work:
        read, written, stream = _tensors(read), _tensors(written), RECORDER.current
        if options.asyncOp:
            launched = RECORDER.mark(stream.stream_id)
            stream = RECORDER.of_group(self)
            RECORDER.wait(stream.stream_id, [launched], "")
        for tensor in read:
            RECORDER.access(tensor, False, name, stream)
        for tensor in written:
            RECORDER.access(tensor, True, name, stream)
        return RecordedWork(work, RECORDER.mark(stream.stream_id), read + written) if options.asyncOp else work

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self._run("all_reduce", tensors, tensors, options, self._gloo.allreduce(tensors, options))

    def reduce(self, tensors: Any, options: Any) -> Any:
        return self._run("reduce", tensors, tensors, options, self._gloo.reduce(tensors, options))

    def broadcast(self, tensors: Any, options: Any) -> Any:
        written = tensors if self.rank() != options.rootRank else []
        return self._run("broadcast", tensors, written, options, self._gloo.broadcast(tensors, options))

    def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:
        return self._run("all_gather", inputs, outputs, options, self._gloo.allgather(outputs, inputs, options))

    def all_gather_single(self, output: Any, given: Any, options: Any) -> Any:
        return self._run("all_gather", [given], [output], options, self._gloo._allgather_base(output, given, options))

    def reduce_scatter_single(self, output: Any, given: Any, options: Any) -> Any:
        work = self._gloo._reduce_scatter_base(output, given, options)
        return self._run("reduce_scatter", [given], [output], options, work)

    def barrier(self, opts: Any) -> Any:
        RECORDER.host_waits("")
        return self._gloo.barrier(opts)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, list | tuple) else []


def _caller() -> str:
    """The function of DeepSpeed or this project that asks: file.function."""
    codes = (frame.f_code for frame, _ in traceback.walk_stack(None))
    code = next(code for code in codes if not any(part in code.co_filename for part in _BETWEEN))
    return f"{Path(code.co_filename).stem}.{code.co_name}"


RECORDER: Recorder


def use() -> None:
    """Has DeepSpeed use the recording accelerator on this rank, which joins a process group afterwards."""
    gc.disable()  # memory is freed at the same moments in each run
    set_accelerator(RecordingAccelerator())
    dist.Backend.register_backend(BACKEND, RecordedGroup, devices=["cpu"])
    _begin()  # ranks communicate when they join the group


def _begin() -> None:
    global RECORDER
    RECORDER = Recorder()
    RECORDER.current = RecordedStream(name="default")


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Within the block, records what this rank does."""
    _begin()
    with Operations():
        yield RECORDER.record
