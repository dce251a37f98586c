"""Optimizer states and parameters kept on the CPU or on NVMe: the same losses, fragments and checkpoints."""

import json

import pytest
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

from tests.pretrain.rank_processes import each, on_ranks
from tests.pretrain.runs import losses, run_file, train_each
from tests.pretrain.small_runs import engine_of, micro_batches, own_layout, run_config

OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
BOTH = OPTIMIZER | {"offload_param": {"device": "cpu"}}


def trained(
    stage: int, zero: dict, precision: str, clipping: float, steps: int
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The losses, the norms of gradients, and this rank's fragments of the fp32 parameters."""
    from pretrain.zero.deepspeed_private import fragments

    optimizer = {"learning_rate": 1e-2, "gradient_clipping": clipping}
    config = run_config(stage, {"tie_embeddings": True}, zero, precision=precision, optimizer=optimizer)
    layout = own_layout()
    engine = engine_of(config)
    losses, norms = [], []
    for step in range(steps):
        engine.step(step, 0, micro_batches(layout, step))
        metrics = engine.take_metrics()
        losses.append(metrics["train/loss"])
        norms.append(metrics["train/gradient_norm"])
    held = {one.name: one.view(one.buffer.data).to("cpu", copy=True) for one in fragments(engine.deepspeed)}
    engine.close()
    return losses, norms, held


EXACTLY = {"rtol": 0, "atol": 0}
# the last bit of a norm depends on where its gradients lie, and with it the factor that clips them: after a few steps
# that has moved weights whose gradients are nearly zero
CLIPPED = {"rtol": 2**-22, "atol": 1e-8}
TABLE = [
    ("fp32", 0, 4, EXACTLY, [(2, OPTIMIZER), (3, BOTH)]),
    ("bf16", 0, 4, EXACTLY, [(1, OPTIMIZER), (2, OPTIMIZER), (3, OPTIMIZER), (3, BOTH)]),
    ("bf16", 0.5, 1, CLIPPED, [(2, OPTIMIZER), (3, BOTH)]),
]


@pytest.mark.slow
def test_what_is_offloaded_learns_the_same(device):
    runs = {
        (precision, clipping, stage, str(zero)): (stage, zero, precision, clipping, steps)
        for precision, clipping, steps, _, cases in TABLE
        for stage, offloaded in cases
        for zero in ({}, offloaded)
    }
    ranks = 2 if device == "cpu" else 1
    for of_rank in on_ranks(ranks, each, trained, list(runs.values()), device=device, seconds=600):
        found = dict(zip(runs, of_rank, strict=True))
        for precision, clipping, _, apart, cases in TABLE:
            for stage, zero in cases:
                plain, offloaded = (found[precision, clipping, stage, str(one)] for one in ({}, zero))
                assert offloaded[0] == plain[0]
                assert offloaded[1] == pytest.approx(plain[1], rel=1e-6)
                assert offloaded[2].keys() == plain[2].keys()
                for name, fragment in offloaded[2].items():
                    assert torch.allclose(fragment, plain[2][name], **apart), (precision, clipping, stage, zero, name)


on_nvme = pytest.mark.skipif(not AsyncIOBuilder().is_compatible(verbose=False), reason="libaio's headers are missing")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "cases"),
    [
        ("cpu", [(2, ["offload_optimizer"]), (3, ["offload_optimizer", "offload_param"])]),
        pytest.param("nvme", [(3, ["offload_optimizer"]), (3, ["offload_optimizer", "offload_param"])], marks=on_nvme),
    ],
)
def test_offloaded_runs_resume_to_the_bit(small_corpus, tmp_path, place, cases):
    whole, parts = [], []
    for number, (stage, offloaded) in enumerate(cases):
        for runs, name in ((whole, "whole"), (parts, "parts")):
            folder = tmp_path / f"{name}-{number}"
            given = {"device": place, **({"nvme_path": str(folder)} if place == "nvme" else {})}
            zero = {"stage": stage, **dict.fromkeys(offloaded, given)}
            settings = {"deepspeed": {"zero_optimization": zero}, "precision": "bf16", "evaluation": []}
            runs.append(run_file(folder, small_corpus, **settings))
    starts = [*((path, None) for path in whole), *((path, 3) for path in parts)]
    assert train_each(2, starts) == [[0, 0, 75, 75]] * 2
    assert train_each(2, [(path, None) for path in parts]) == [[0, 0]] * 2
    for one, other, (stage, _) in zip(whole, parts, cases, strict=True):
        assert losses(other) == losses(one)
        index = json.loads((other.parent / "run/checkpoints/step-00000008/index.json").read_text())
        assert index["zero_stage"] == stage
