"""What this project assumes of DeepSpeed beyond its documentation is checked when a run starts."""

from typing import Any

import deepspeed
import pytest
import torch

from data_pipeline.foundation.errors import FailedError, UserError
from pretrain.zero import deepspeed_private
from tests.pretrain.rank_processes import on_ranks
from tests.pretrain.small_runs import engine_of, micro_batches, own_layout, run_config

CASES: list[tuple[int, str, dict[str, Any] | None]] = [
    *((stage, precision, None) for stage in (1, 2, 3) for precision in ("fp32", "bf16")),
    (2, "fp32", {"offload_optimizer": {"device": "cpu"}}),
    (3, "bf16", {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
]


@pytest.mark.slow
def test_other_weights_and_lost_fragments_are_noticed():
    """Two ranks, two steps, every stage: first nothing is wrong, then a weight differs, then one has no fragment.

    In fp32 a weight can't differ where the fp32 weights are those of the model."""
    for of_rank in on_ranks(2, complaints):
        for case, (differing, lost) in zip(CASES, of_rank, strict=True):
            if case[1] == "fp32" and not case[2]:
                assert differing is None, case
            else:
                assert "fp32 weights are not those that the model computes with" in differing, case
            assert lost is None or "are not each of its elements once" in lost, case
        assert sum(lost is not None for _, lost in of_rank) == 5  # stage 3 has no such mapping to lose


def complaints() -> list[tuple[str | None, str | None]]:
    return [complaints_of(*case) for case in CASES]


def complaints_of(stage: int, precision: str, zero: dict[str, Any] | None) -> tuple[str | None, str | None]:
    config = run_config(stage, zero=zero, precision=precision)
    layout = own_layout()
    engine = engine_of(config)
    for step in range(2):
        engine.step(step, 8 * step, micro_batches(layout, step))
    deepspeed_private.check(engine.deepspeed)
    parameter = next(engine.deepspeed.module.parameters())
    live: torch.Tensor = getattr(parameter, "ds_tensor", parameter).data.view(-1)
    buffers = deepspeed_private.fragments(engine.deepspeed)
    addresses = {fragment.buffer.untyped_storage().data_ptr() for fragment in buffers}
    differing = None
    if live.untyped_storage().data_ptr() not in addresses:
        live += 1.0
        differing = refusal(engine)
        live -= 1.0
    lost = None
    if stage < 3:
        parameter._hp_mapping = None
        lost = refusal(engine)
    return differing, lost


def refusal(engine: Any) -> str:
    with pytest.raises(FailedError) as error:
        deepspeed_private.check(engine.deepspeed)
    return str(error.value)


def test_another_version_is_refused_with_what_vouches_for_it(monkeypatch):
    deepspeed_private.check_version()
    monkeypatch.setattr(deepspeed, "__version__", "0.20.0")
    with pytest.raises(UserError, match=r"deepspeed 0\.20\.0 is installed, but only 0\.19\.8 was tested.*pytest"):
        deepspeed_private.check_version()
