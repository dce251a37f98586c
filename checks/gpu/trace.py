"""The kernels of a step, from a trace of it: what they are, and how long the GPU is idle between them."""

import json
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from checks.gpu.report import Json

OURS = ("forward", "backward_queries", "backward_keys")  # this project's kernels of attention
_OURS = re.compile(rf"^({'|'.join(OURS)})(_\d\w*)?$")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
# The kind of a kernel is the first whose pattern its name has. The names are cuBLAS's, PyTorch's own, and those of
# Inductor's Triton kernels, which are named after the operations in them. On a CPU, operations stand for kernels.
_KINDS = {
    "attention": rf"{_OURS.pattern}|flash|fmha|attention|cudnn.*sdpa",
    "loss": r"softmax|nll|cross_entropy|logsumexp",
    "optimizer": r"multi_tensor_apply|fused_?adam|foreach|lpnorm|_norm_kernel|NormOps|NormTwoOps",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|splitk|::(mm|bmm|addmm|matmul|linear)$",
    "copies": r"memcpy|memset|copy|CatArray|::(cat|to|clone|contiguous|zero_|fill_)$|FillFunctor",
    "norms and elementwise": r"^triton_|elementwise|reduce|layer_?norm|rms_?norm|gelu|::(add|mul|sum|mean|pow)_?$",
}
OTHER = "other"


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy on the GPU; `start` and `end` in ms."""

    name: str
    start: float
    end: float

    @property
    def ours(self) -> str | None:
        """The name of one of this project's kernels, to which Triton may add a number."""
        found = _OURS.match(self.name)
        return found and found[1]

    @property
    def kind(self) -> str:
        return next((kind for kind, form in _KINDS.items() if re.search(form, self.name, re.IGNORECASE)), OTHER)


@dataclass(frozen=True)
class Trace:
    """What a trace has: kernels, and the numbers of calls by which the host launches them and waits for the GPU."""

    kernels: list[Kernel]
    launches: int
    graph_launches: int
    waits: int

    @classmethod
    def of(cls, work: Callable[[], object], device: torch.device) -> "Trace":
        """Of `work`, on a GPU without the operations of the host, whose many events would take long to read."""
        cuda = device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
            work()
            if cuda:
                torch.cuda.synchronize(device)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiled.export_chrome_trace(str(path))
            return cls.read(json.loads(path.read_text(encoding="utf-8"))["traceEvents"], cuda)

    @classmethod
    def read(cls, events: Iterable[Json], cuda: bool) -> "Trace":
        """From the events of a trace as Chrome reads it, in µs."""
        wanted = ("kernel", "gpu_memcpy", "gpu_memset") if cuda else ("cpu_op",)
        kernels, calls = [], []
        for event in events:
            if event.get("cat") in wanted:
                start = event["ts"] / 1e3
                kernels.append(Kernel(event["name"], start, start + event["dur"] / 1e3))
            elif event.get("cat") in ("cuda_runtime", "cuda_driver"):
                calls.append(event["name"])
        of_calls = (sum(name in names for name in calls) for names in (LAUNCHES, GRAPH_LAUNCHES, WAITS))
        return cls(sorted(kernels, key=lambda one: one.start), *of_calls)

    @property
    def busy(self) -> float:
        """ms in which a kernel runs: those of several streams may overlap."""
        total, end = 0.0, float("-inf")
        for one in self.kernels:
            total += max(0.0, one.end - max(one.start, end))
            end = max(end, one.end)
        return total

    @property
    def length(self) -> float:
        """ms from the first kernel's start to the last one's end."""
        return max((one.end for one in self.kernels), default=0.0) - min((one.start for one in self.kernels), default=0)

    def sums(self, of: Callable[[Kernel], str]) -> dict[str, tuple[float, int]]:
        """ms and number of the kernels by `of` them, the largest first."""
        found: dict[str, tuple[float, int]] = {}
        for one in self.kernels:
            taken, number = found.get(of(one), (0.0, 0))
            found[of(one)] = taken + one.end - one.start, number + 1
        return dict(sorted(found.items(), key=lambda item: -item[1][0]))
