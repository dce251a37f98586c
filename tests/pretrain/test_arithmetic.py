"""What PyTorch and CUDA's libraries are asked for before they touch a GPU."""

import os
import tempfile

import torch

from pretrain.config.run_config import ComputeSection
from pretrain.trainer.train import configure_arithmetic
from tests.pretrain.rank_processes import on_ranks
from tests.pretrain.small_runs import engine_of, micro_batches, own_layout, run_config

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO")


def trained(steps: int) -> list[float]:
    """The losses of some steps."""
    engine = engine_of(run_config(2))
    losses = [engine.step(step, 4 * step, micro_batches(own_layout(), step)).loss for step in range(steps)]
    engine.close()
    return losses


def settled(compute: ComputeSection, environment: dict[str, str]) -> tuple[dict[str, str], bool, bool, list[float]]:
    """The environment afterwards, whether products are in TF32, whether algorithms are deterministic, and losses."""
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    configure_arithmetic(compute)
    found = {name: os.environ[name] for name in NAMES if name in os.environ}
    tf32 = torch.backends.cuda.matmul.allow_tf32
    return found, tf32, torch.are_deterministic_algorithms_enabled(), trained(2)


def test_tf32_and_determinism_are_asked_for_only_where_the_run_file_does():
    plain, exact, users = (
        on_ranks(1, settled, compute, environment)[0]
        for compute, environment in (
            (ComputeSection(), {}),
            (ComputeSection(deterministic=True, tf32=True), {}),
            (ComputeSection(deterministic=True), {"NCCL_ALGO": "Tree", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
        )
    )
    growing = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert plain[:3] == (growing, False, False)
    ordered = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    assert exact[:3] == ({**growing, **ordered}, True, True)
    assert users[0] == {**ordered, "NCCL_ALGO": "Tree", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    assert plain[3] == exact[3] == users[3]  # a CPU always repeats, and no operation of a step is refused


def test_compiled_kernels_are_kept_on_the_nodes_disk_unless_the_environment_says_otherwise(monkeypatch, tmp_path):
    def caches(compute: ComputeSection, **environment: str) -> list[str]:
        monkeypatch.setattr(os, "environ", environment)
        configure_arithmetic(compute)
        return [environment[name] for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]

    given = ComputeSection(kernel_cache=str(tmp_path))
    assert caches(given) == [f"{tmp_path}/triton", f"{tmp_path}/inductor"]
    assert caches(given, TRITON_CACHE_DIR="/users") == ["/users", f"{tmp_path}/inductor"]
    assert all(one.startswith(tempfile.gettempdir()) for one in caches(ComputeSection()))
