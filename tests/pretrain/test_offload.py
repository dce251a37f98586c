"""Optimizer states and parameters kept on the CPU or on NVMe: the same losses, fragments and checkpoints."""

import json

import pytest
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

from tests.pretrain.rank_processes import each, on_ranks
from tests.pretrain.runs import losses, run_file, train_each
from tests.pretrain.small_runs import micro_batches, own_layout, run_config

OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
BOTH = OPTIMIZER | {"offload_param": {"device": "cpu"}}


def trained(
    stage: int, zero: dict, precision: str, clipping: float, steps: int
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The losses, the norms of gradients, and this rank's fragments of the fp32 parameters."""
    from pretrain.zero.construction import construct
    from pretrain.zero.deepspeed_private import fragments
    from pretrain.zero.engine import Engine

    optimizer = {"learning_rate": 1e-2, "gradient_clipping": clipping}
    config = run_config(stage, {"tie_embeddings": True}, zero, precision=precision, optimizer=optimizer)
    layout = own_layout()
    engine = Engine(construct(config, config.model), config)
    losses, norms = [], []
    for step in range(steps):
        engine.step(step, 0, micro_batches(layout, step))
        metrics = engine.take_metrics()
        losses.append(metrics["train/loss"])
        norms.append(metrics["train/gradient_norm"])
    held = {one.name: one.view(one.buffer.data).to("cpu", copy=True) for one in fragments(engine.deepspeed)}
    engine.close()
    return losses, norms, held


# the last bit of a norm depends on where its gradients lie, and with it the factor that clips them: after a few steps
# that has moved weights whose gradients are nearly zero
@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "clipping", "steps", "apart"),
    [
        ("fp32", 0, 4, {"rtol": 0, "atol": 0}),
        ("bf16", 0, 4, {"rtol": 0, "atol": 0}),
        ("bf16", 0.5, 1, {"rtol": 2**-22, "atol": 1e-8}),
    ],
)
def test_what_is_offloaded_learns_the_same(precision, clipping, steps, apart, device):
    cases = [(stage, zero) for stage in (1, 2, 3) for zero in ({}, OPTIMIZER)] + [(3, BOTH)]
    runs = [(*case, precision, clipping, steps) for case in cases]
    for found in on_ranks(2 if device == "cpu" else 1, each, trained, runs, device=device):
        for plain, offloaded in ((0, 1), (2, 3), (4, 5), (4, 6)):
            assert found[offloaded][0] == found[plain][0]
            assert found[offloaded][1] == pytest.approx(found[plain][1], rel=1e-6)
            assert found[offloaded][2].keys() == found[plain][2].keys()
            for name, fragment in found[offloaded][2].items():
                assert torch.allclose(fragment, found[plain][2][name], **apart), name


on_nvme = pytest.mark.skipif(not AsyncIOBuilder().is_compatible(verbose=False), reason="libaio's headers are missing")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "device", "offloaded"),
    [
        (2, "cpu", ["offload_optimizer"]),
        (3, "cpu", ["offload_optimizer", "offload_param"]),
        pytest.param(3, "nvme", ["offload_optimizer"], marks=on_nvme),
        pytest.param(3, "nvme", ["offload_optimizer", "offload_param"], marks=on_nvme),
    ],
)
def test_an_offloaded_run_resumes_to_the_bit(small_corpus, tmp_path, stage, device, offloaded):
    place = {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}
    zero = dict.fromkeys(offloaded, place)
    deepspeed = {"zero_optimization": {"stage": stage, **zero}}
    settings = {
        "deepspeed": deepspeed,
        "precision": "bf16",
        "evaluation": [],
        "tracking": {"mlflow": None, "log_every_steps": 1},
    }
    whole, parts = (run_file(tmp_path / name, small_corpus, **settings) for name in ("whole", "parts"))
    assert train_each(2, [(whole, None), (parts, 3)]) == [[0, 75]] * 2
    assert train_each(2, [(parts, None)]) == [[0]] * 2
    assert losses(parts) == losses(whole)
    assert json.loads((parts.parent / "run/checkpoints/step-00000008/index.json").read_text())["zero_stage"] == stage
