"""Runs whose optimizer states and parameters are kept on the CPU or on NVMe; `test_numerics` compares their steps."""

import json

import pytest
from deepspeed.ops.op_builder import AsyncIOBuilder

from tests.pretrain.runs import losses, run_file, train_each

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
