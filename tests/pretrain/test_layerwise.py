"""Activation checkpointing and compilation of layers: the same numbers at every stage, nothing compiled twice."""

import pytest
import torch

from tests import tables
from tests.pretrain.rank_processes import each, on_ranks
from tests.pretrain.small_models import MODELS, ONE_OF_EACH_FAMILY
from tests.pretrain.small_runs import engine_of, micro_batches, own_layout, run_config

STEPS = 4
CHECKPOINTED = {"activation_checkpointing": True}
COMPILED = {"compile": True}


def trained(
    stage: int,
    model: dict,
    compute: dict,
    targets: int = 8,
    grow: int = 0,
    steps: int = STEPS,
    backend: str = "aot_eager",
) -> dict:
    """The loss, gradient norm and number of graphs so far of each step. Each step's rows are `grow` tokens longer than
    the last's."""
    from torch._dynamo.utils import counters

    from pretrain.zero import layers as layerwise

    torch._dynamo.reset()
    counters.clear()
    layerwise.BACKEND = backend  # tracing and guards are the same; no kernels are made
    # a small rate: at 1e-2 rounding grows tenfold a step in a model whose embeddings are all one matrix
    config = run_config(stage, model, optimizer={"learning_rate": 1e-3}, compute=compute)
    layout = own_layout()
    engine = engine_of(config)
    result: dict = {"losses": [], "norms": [], "graphs": [], "validation": []}
    for step in range(steps):
        batches = micro_batches(layout, step, 16 + grow * step, targets + grow * step)
        engine.step(step, 0, batches)
        metrics = engine.take_metrics()
        result["losses"].append(metrics["train/loss"])
        result["norms"].append(metrics["train/gradient_norm"])
        result["validation"].append(float(engine.losses(batches[0])["labels"].sum()))
        result["graphs"].append(counters["stats"]["unique_graphs"])
    result["breaks"] = sum(counters["graph_break"].values())
    result["names"] = [name for name, _ in engine.deepspeed.module.named_parameters()]
    engine.close()
    return result


def family(name: str) -> dict:
    return {**MODELS[name], "vocab_size": 100, "dropout_rate": 0.0}


DROPOUT = {"dropout_rate": 0.1}
ROTARY = "t5gemma"
OTHER_FAMILIES = tuple(name for name in ONE_OF_EACH_FAMILY if MODELS[name]["family"] not in ("t5", ROTARY))


OF_T5 = {
    (3, "plain with dropout"): (3, DROPOUT, {}),
    (3, "checkpointed with dropout"): (3, DROPOUT, CHECKPOINTED),
    (3, "plain"): (3, {}, {}),
    (3, "compiled and checkpointed"): (3, {}, COMPILED | CHECKPOINTED, 8, 0, STEPS, "eager"),
}
OTHERS_OF_T5 = {
    **{(stage, "plain"): (stage, {}, {}) for stage in (2, 3)},
    (3, "compiled"): (3, {}, COMPILED),
    (2, "compiled and checkpointed"): (2, {}, COMPILED | CHECKPOINTED),
    "growing": (3, {}, COMPILED, 8, 1, 6, "eager"),
}


def compiled_and_plain(names: tuple[str, ...], stage: int) -> dict:
    """The cases of families."""
    ways = {"plain": ({}, 16), "compiled and checkpointed": (COMPILED | CHECKPOINTED, 16, 0, STEPS, "eager")}
    return {(name, way): (stage, family(name), *settings) for name in names for way, settings in ways.items()}


@pytest.fixture(scope="module")
def runs() -> dict:
    """The results of each way of computing, all on one rank: each rank compiles for itself."""
    return results(1, OF_T5 | compiled_and_plain((ROTARY,), stage=1))


@pytest.fixture(scope="module")
def other_runs() -> dict:
    return results(2, OTHERS_OF_T5 | compiled_and_plain((ROTARY,), stage=3))


def results(ranks: int, cases: dict) -> dict:
    return dict(zip(cases, on_ranks(ranks, each, trained, list(cases.values()), seconds=800)[0], strict=True))


def test_checkpointing_changes_no_bit(runs):
    """Holds with dropout: recomputed layers draw the same masks."""
    assert runs[3, "checkpointed with dropout"] == runs[3, "plain with dropout"]


@tables.each("model", [3, ROTARY])
def test_compiled_layers_give_the_same_losses_and_are_compiled_once(runs, model):
    """Every other step has padding. After both kinds of rows have come, nothing is compiled again. The runs are T5's
    at stage 3 and another family's at stage 1."""
    compare(runs, model, "compiled and checkpointed")


@pytest.mark.slow
@tables.each("model, way", [(3, "compiled"), *((model, "compiled and checkpointed") for model in (2, ROTARY))])
def test_so_do_those_of_other_stages(other_runs, model, way):
    compare(other_runs, model, way)


@pytest.mark.soak
def test_so_do_those_of_all_other_families(subtests):
    runs = results(2, compiled_and_plain(OTHER_FAMILIES, stage=3))
    for name in OTHER_FAMILIES:
        with subtests.test(name):
            compare(runs, name, "compiled and checkpointed")


def compare(runs: dict, model: int | str, way: str) -> None:
    plain, compiled = runs[model, "plain"], runs[model, way]
    assert compiled["losses"] == pytest.approx(plain["losses"], abs=1e-4)
    assert compiled["norms"] == pytest.approx(plain["norms"], rel=1e-3)
    assert compiled["validation"] == pytest.approx(plain["validation"], rel=1e-4)
    first, second, *later = compiled["graphs"]
    assert 0 < first < second
    assert later == [second] * (STEPS - 2)
    assert compiled["breaks"] == 0
    assert compiled["names"] == plain["names"]


@pytest.mark.slow
def test_rows_of_new_widths_are_not_compiled_every_time(other_runs):
    """At stage 3, both kinds of rows have come in two widths after four steps."""
    compiled = other_runs["growing"]
    assert compiled["graphs"][3:] == [compiled["graphs"][3]] * 3
    assert compiled["breaks"] == 0
