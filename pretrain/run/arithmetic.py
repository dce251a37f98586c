"""Settings of PyTorch and CUDA's libraries that must precede the first use of a GPU: precision, determinism, memory."""

import os

import torch

from pretrain.config.run_config import ComputeSection

# cuBLAS, NCCL: what each reads, and the value with which its sums have one order
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name


def configure(compute: ComputeSection) -> None:
    """Applies `tf32` and `deterministic` to this process, before it uses a GPU. What the user has set stays."""
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"  # ragged batches would leave gaps between fixed ones
    torch.backends.cuda.matmul.allow_tf32 = compute.tf32
    torch.backends.cudnn.allow_tf32 = compute.tf32
    if compute.deterministic:
        os.environ |= {name: value for name, value in _DETERMINISTIC.items() if name not in os.environ}
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # for debugging; slow
