"""Settings of PyTorch and CUDA's libraries that must precede the first use of a GPU: precision, determinism, memory,
and where compiled kernels are kept."""

import os
import tempfile
from pathlib import Path

import torch

from pretrain.config.run_config import ComputeSection

# cuBLAS, NCCL: what each reads, and the value with which its sums have one order
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name
_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def configure(compute: ComputeSection) -> None:
    """Applies `compute` to this process, before it uses a GPU. What the user has set in the environment stays."""
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"  # ragged batches would leave gaps between fixed ones
    cache = Path(compute.kernel_cache or Path(tempfile.gettempdir(), f"encdec-pretrain-kernels-{os.getuid()}"))
    for name, folder in _CACHES.items():
        os.environ.setdefault(name, str(cache / folder))
    torch.backends.cuda.matmul.allow_tf32 = compute.tf32
    torch.backends.cudnn.allow_tf32 = compute.tf32
    if compute.deterministic:
        os.environ |= {name: value for name, value in _DETERMINISTIC.items() if name not in os.environ}
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # for debugging; slow
