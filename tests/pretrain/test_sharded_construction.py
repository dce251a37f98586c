"""Models built under ZeRO-3: the same weights, a share of the memory."""

import pytest
import torch
import torch.distributed as dist

from data_pipeline.loading.stream import Progress
from pretrain import models
from pretrain.checkpoint.tensors import StoredTensors
from pretrain.models.model import Model, whole_shape
from tests.pretrain.rank_processes import on_ranks
from tests.pretrain.small_runs import T5, micro_batches, run_config, setup

FAMILIES = {
    "t5": {"tie_embeddings": True},
    "t5 v1.1": {"tie_embeddings": False, "feed_forward": "gated-gelu", "positions": "learned", "max_positions": 64},
    "bart": {"family": "bart"},
}


def whole(model: Model) -> dict[str, torch.Tensor]:
    """Every parameter of a sharded model."""
    import deepspeed

    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
    return found


def constructed(precision: str, changes: dict) -> tuple:
    from pretrain.construction import construct

    config = run_config(3, changes, precision=precision)
    model = construct(setup(config))
    held = sum(parameter.ds_tensor.numel() for parameter in model.parameters())
    own = sum(parameter.numel() for parameter in model.parameters())
    return whole(model), held, own, model.num_parameters(), model.flops(512, 114)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["t5", "t5 v1.1"])
def test_a_sharded_model_starts_with_the_same_values_of_which_a_rank_holds_its_share(family, precision):
    results = on_ranks(2, constructed, precision, FAMILIES[family])
    config = run_config(3, FAMILIES[family])
    torch.manual_seed(config.run.seed)
    plain = models.build(config.model)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    expected = {name: value.to(dtype) for name, value in plain.named_parameters(remove_duplicate=False)}
    for values, held, own, num_parameters, flops in results:
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[name], expected[name]) for name in expected)
        assert num_parameters == plain.num_parameters()
        assert flops == plain.flops(512, 114)
        assert own == 0
        assert held - num_parameters / 2 < len(expected)  # each parameter is padded to a multiple of the ranks
