"""Activation checkpointing and compilation of layers: the same numbers at every stage, and nothing compiled twice."""

import pytest
import torch

from tests.pretrain.rank_processes import on_ranks
from tests.pretrain.small_runs import micro_batches, run_config, setup

STEPS = 6
CHECKPOINTED = {"activation_checkpointing": True}
COMPILED = {"compile": True}


def trained(stage: int, model: dict, compute: dict, grow: int = 0) -> dict:
    """Losses, gradient norms and graphs so far of each step, whose rows are `grow` tokens longer than the last's."""
    from torch._dynamo.utils import counters

    from pretrain import layerwise
    from pretrain.construction import construct
    from pretrain.engine import Engine

    layerwise.BACKEND = "aot_eager"  # what is traced, guarded and differentiated is alike; no kernels are made
    config = run_config(stage, model, optimizer={"learning_rate": 1e-2}, compute=compute)
    prepared = setup(config)
    engine = Engine(construct(prepared), config, prepared.cut)
    result: dict = {"losses": [], "norms": [], "graphs": [], "validation": []}
    for step in range(STEPS):
        batches = micro_batches(prepared.cut, step, 16 + grow * step, 8 + grow * step)
        engine.step(step, batches, False)
        metrics = engine.take_metrics()
        result["losses"].append(metrics["train/loss"])
        result["norms"].append(metrics["train/gradient_norm"])
        result["validation"].append(float(engine.losses(batches[0])["labels"].sum()))
        result["graphs"].append(counters["stats"]["unique_graphs"])
    result["breaks"] = sum(counters["graph_break"].values())
    result["names"] = [name for name, _ in engine.deepspeed.module.named_parameters()]
    engine.close()
    return result


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_checkpointing_changes_no_bit(stage):
    """With dropout: what is computed again draws the same."""
    model = {"dropout_rate": 0.1}
    plain, checkpointed = (on_ranks(2, trained, stage, model, compute)[0] for compute in ({}, CHECKPOINTED))
    assert plain == checkpointed


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_compiled_layers_give_the_same_losses_and_are_compiled_once(stage):
    """Rows of every other step have padding: two kinds for each of encoder and decoder layers, four graphs."""
    plain = on_ranks(2, trained, stage, {}, {})[0]
    for compute in (COMPILED, COMPILED | CHECKPOINTED):
        compiled = on_ranks(2, trained, stage, {}, compute)[0]
        assert compiled["losses"] == pytest.approx(plain["losses"], abs=1e-4)
        assert compiled["norms"] == pytest.approx(plain["norms"], rel=1e-3)
        assert compiled["validation"] == pytest.approx(plain["validation"], rel=1e-4)
        assert compiled["graphs"] == [2, 4, 4, 4, 4, 4]
        assert compiled["breaks"] == 0
        assert compiled["names"] == plain["names"]


def test_rows_of_ever_other_widths_are_not_compiled_ever_again():
    """At stage 3. Both kinds of rows have come in two widths after four steps."""
    compiled = on_ranks(2, trained, 3, {}, COMPILED, 1)[0]
    assert compiled["graphs"][3:] == [compiled["graphs"][3]] * (STEPS - 3)
    assert compiled["breaks"] == 0


def held_for_backward(compute: dict) -> int:
    """Bytes that one forward pass keeps, each storage once, parameters aside."""
    from pretrain.construction import construct

    config = run_config(1, {"num_encoder_layers": 6, "num_decoder_layers": 6, "dropout_rate": 0.1}, compute=compute)
    prepared = setup(config)
    model = construct(prepared)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = model(**micro_batches(prepared.cut, 0, 64, 32)[0])
    assert losses["labels"].requires_grad
    return sum(storages.values())


def test_checkpointed_layers_keep_their_inputs_alone():
    plain, checkpointed = (on_ranks(1, held_for_backward, compute)[0] for compute in ({}, CHECKPOINTED))
    assert checkpointed < 0.4 * plain
