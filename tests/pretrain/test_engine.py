"""A step of the engine is skipped on all ranks or on none, spikes of its loss are found, and how it computes."""

import itertools
import os
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

from data_pipeline.loading.batch_layout import BatchLayout
from pretrain.config.run_config import ComputeSection
from pretrain.run.train_state import Health
from pretrain.trainer.train import configure_arithmetic
from tests.pretrain.rank_processes import on_ranks
from tests.pretrain.small_runs import engine_of, micro_batches, own_layout, run_config

SETTINGS = list(itertools.product((1, 2, 3), ("fp32", "bf16")))


def train_through_trouble() -> dict[Any, Any]:
    """The outcomes of five steps and the final parameters, by (stage, precision, whether the last rank is in
    trouble)."""
    layout = own_layout(4 // dist.get_world_size())
    return {
        (*setting, troubled): _through({1: "gradient", 3: "loss"} if troubled else {}, layout, *setting)
        for setting, troubled in itertools.product(SETTINGS, (False, True))
    }


def _through(
    troubles: dict[int, str], layout: BatchLayout, stage: int, precision: str
) -> tuple[list, dict[str, torch.Tensor]]:
    from deepspeed.utils import safe_get_full_fp32_param

    engine = engine_of(run_config(stage, precision=precision))
    trouble = ""

    def spoil(module: torch.nn.Module, _: Any, losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if layout.rank == layout.ranks - 1 and trouble == "gradient":
            return {name: value * float("nan") for name, value in losses.items()}
        if layout.rank == layout.ranks - 1 and trouble == "loss":  # its gradient is the usual one
            return {name: value + float("inf") for name, value in losses.items()}
        return losses

    engine.deepspeed.module.register_forward_hook(spoil)
    outcomes: list = []
    while sum(outcome.applied for outcome in outcomes) < 3:
        trouble = troubles.get(len(outcomes), "")
        applied = sum(outcome.applied for outcome in outcomes)
        outcomes.append(engine.step(applied, 0, micro_batches(layout, applied)))
    parameters = {
        name: safe_get_full_fp32_param(parameter).to("cpu", copy=True)
        for name, parameter in engine.deepspeed.module.named_parameters()
    }
    engine.close()
    return outcomes, parameters


@pytest.mark.slow
def test_a_step_without_a_finite_loss_or_gradient_is_skipped_on_every_rank(device):
    """Holds at every stage, in fp32 and bf16; later steps are bitwise as if the step had never been."""
    ranks = 2 if device == "cpu" else min(2, torch.cuda.device_count())
    for of_rank, setting in itertools.product(
        on_ranks(ranks, train_through_trouble, device=device, seconds=600), SETTINGS
    ):
        outcomes, parameters = of_rank[*setting, True]
        expected, wanted = of_rank[*setting, False]
        assert [outcome.applied for outcome in outcomes] == [True, False, True, False, True], setting
        assert [outcome.loss for outcome in outcomes if outcome.applied] == [outcome.loss for outcome in expected]
        assert all(torch.equal(parameters[name], wanted[name]) for name in wanted), setting


def test_spikes_stand_out_of_a_full_window_and_leave_it_as_it_was():
    from pretrain.config.run_config import SpikeSection

    settings = SpikeSection(threshold=4.0, window=8)
    health = Health()
    for loss in (9.0, 3.1, 2.9, 3.0, 3.2, 2.8, 3.0, 3.1, 2.9):  # the first loss has left the window by the end
        assert not health.is_spike(loss, settings)
        health = health.after(loss, True, settings)
    after = health.after(3.8, True, settings)  # the mean is 3.0, the deviation 0.122
    assert (after.spikes, after.recent) == (1, health.recent)
    assert health.after(3.4, True, settings).spikes == 0
    assert health.after(float("nan"), False, settings).in_a_row == 1
    assert health.after(float("nan"), False, settings).after(3.0, True, settings).in_a_row == 0
    assert Health(recent=(3.0,) * 8).after(3.05, True, settings).spikes == 0  # a plateau has no deviation of its own
    assert Health(recent=(3.0,) * 8).after(3.1, True, settings).spikes == 1


# What PyTorch and CUDA's libraries are asked for before they touch a GPU


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
