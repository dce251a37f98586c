"""Selects the attention backend before the first step. On GPUs the Triton kernels are first compared with PyTorch's.

The comparison runs in a process of its own: forward and backward passes, for the forms of attention that the run's
model uses.
"""

import json
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data_pipeline.base.errors import FailedError
from data_pipeline.base.processes import PYTHON
from data_pipeline.loading.batches import Batch, TrainingBatches
from data_pipeline.loading.prefetch import with_target_indices
from pretrain import models
from pretrain.engine.ranks import min_over_ranks
from pretrain.models import ModelConfig
from pretrain.models.functional.attention_backends import apart, use, using
from pretrain.models.kernels import Form, OperatorArguments
from pretrain.training.micro_batch import examples_per_row, full_rows
from pretrain.training.prepare import PreparedRun

_ROWS = 2  # of each form: a program of the kernels works on one head of one row
_CHECK = [*PYTHON, "-m", "pretrain.models.functional.kernel_check"]
_SECONDS = 120.0  # limit of the check, which takes a few seconds, and 15 if the kernels must be compiled


def choose_attention(run: PreparedRun, device: torch.device) -> str | None:
    """Sets the attention backend of `compute.attention`, the same on all ranks. All ranks call this together.

    If the Triton kernels fail their check, `auto` takes PyTorch's, and the problem is returned in one line; `triton`
    raises FailedError with it.
    """
    backend = run.config.compute.attention
    if device.type != "cuda" or backend in ("sdpa", "eager"):
        use(backend if backend in ("sdpa", "eager") else None)
        return None
    dtype = torch.bfloat16 if run.config.precision == "bf16" else torch.float32
    # one rank of each node checks and compiles for the node, since each check takes a CUDA context of its own
    problem = find_problem(run.model, _rows(run), dtype, device) if run.world.local_rank == 0 else None
    if min_over_ranks(problem is None):
        use("triton")
        return None
    use("sdpa")
    line = f"compute.attention: the Triton kernels fail: {problem or 'on another rank'}"
    if backend == "triton":
        raise FailedError(f"{line}; set auto or sdpa")
    return f"{line}; using PyTorch's attention (sdpa)"


def _rows(run: PreparedRun) -> Iterator[Batch]:
    """The longest rows that the run may have, and the first rows of the run."""
    plan = replace(run.plan, measured=min(_ROWS, run.plan.share))
    yield full_rows(run, plan.micro_batch, examples_per_row(run))
    yield TrainingBatches(run.stream, plan.layout)[0].batch


def find_problem(config: ModelConfig, batches: Iterable[Batch], dtype: torch.dtype, device: torch.device) -> str | None:
    """The problem of the Triton kernels with the model of `config` in training on `batches`, in one line, if any.

    Any exception is a problem, even one of `batches`, and so is a check that doesn't end within two minutes.
    """
    try:
        arguments = {
            "forms": [form._asdict() for form in forms(config, list(batches), dtype)],
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
        request = json.dumps(arguments)
        ended = subprocess.run(_CHECK, input=request, text=True, capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"the check has not ended within {_SECONDS:g} s"
    except Exception as error:  # whatever reading rows or starting a process raises: the run continues without kernels
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if ended.returncode < 0:
        return f"the check was killed by {signal.Signals(-ended.returncode).name}"
    lines = ended.stderr.strip().splitlines() or [f"the check ended with exit code {ended.returncode}"]
    return lines[-1] if ended.returncode else None


def forms(config: ModelConfig, batches: Sequence[Batch], dtype: torch.dtype) -> list[Form]:
    """The different forms of attention in a pass over the batches, each with the first lengths that it occurs with."""
    model = models.meta_model(config).to(dtype).train()
    with using("triton"), _Recorded() as recorded:
        for batch in batches:
            model(**{name: one.to("meta") for name, one in with_target_indices(batch).items()})
    found: dict[Form, Form] = {}
    for form in recorded.forms:
        found.setdefault(form._replace(rows=0, queries=0, keys=0), form)
    return list(found.values())


class _Recorded(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.forms: list[Form] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Mapping | None = None) -> Any:
        if function.name() == "encdec::flash_attention":
            arguments = OperatorArguments(*args)
            queries, keys, _ = (part for source in arguments.sources for part in apart(source))
            rows, heads, length, d_kv = queries.shape
            biased, masked = arguments.diagonals is not None, len(arguments.labels) > 0
            self.forms.append(Form(rows, heads, length, keys.size(2), d_kv, biased, masked, *arguments.settings))
        return function(*args, **(kwargs or {}))
