"""The norms of a training step: those that plain PyTorch gives, at every stage, and a step that isn't changed."""

import itertools
import json
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diagnostics.norms import by_layer, norms_figure

from data_pipeline.loading.batch_layout import BatchLayout
from pretrain import models
from pretrain.evaluate import record
from pretrain.evaluate.hook import EvalResult
from pretrain.run.metrics_file import read_metrics
from tests.support.forked import run_forked
from tests.support.rank_processes import on_ranks
from tests.support.runs import losses, run_file, train_ranks
from tests.support.small_runs import engine_of, micro_batches, own_layout, row_offsets, run_config

CASES = {1: [(1, "fp32"), (3, "bf16")], 2: list(itertools.product((1, 2, 3), ("fp32", "bf16")))}  # by number of ranks
OPTIMIZER = {"learning_rate": 1e-2, "gradient_clipping": 0.5}
MODEL = {"num_encoder_layers": 1, "num_decoder_layers": 1, "z_loss": 1e-4}
STEPS = (1, 2, 3)  # the rows of odd ones have padding, and those are measured


def measured_steps() -> dict[Any, Any]:
    return {case: _measured(*case) for case in CASES[dist.get_world_size()]}


def _measured(stage: int, precision: str) -> list[Any]:
    """The norms by layer after the first and the third of three steps; the second isn't measured."""
    from diagnostics.step_norms import StepNorms  # DeepSpeed is imported in the process group

    layout = own_layout(4 // dist.get_world_size())
    settings = run_config(stage, MODEL, precision=precision, optimizer=OPTIMIZER)
    engine = engine_of(settings)
    found: list[Any] = []
    outcomes = []
    for step in STEPS:
        if step == 2:
            outcomes.append(engine.step(step, row_offsets(layout, step), micro_batches(layout, step)))
            continue
        norms = StepNorms(engine)
        with norms.measuring():
            outcomes.append(engine.step(step, row_offsets(layout, step), micro_batches(layout, step)))
        assert norms.error is None, norms.error
        for sums in (norms.parameters, norms.activations):
            dist.all_reduce(sums)
        found.append(by_layer(norms.names, norms.parameters, norms.layers, norms.activations, engine.gradient_norm))
    plain = engine_of(settings)
    again = [plain.step(step, row_offsets(layout, step), micro_batches(layout, step)) for step in STEPS]
    assert [one.loss for one in outcomes] == [one.loss for one in again]
    engine.close()
    return found


def plain_steps() -> list[dict[str, dict[str, float]]]:
    """The same norms by layer, from whole batches, autograd and torch's AdamW."""
    torch.manual_seed(0)
    model = models.build(run_config(model=MODEL).model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    outputs: dict[str, torch.Tensor] = {}
    for stack in ("encoder", "decoder"):
        layer = getattr(model, stack).layers[0]
        layer.register_forward_hook(lambda *three, stack=stack: outputs.update({f"{stack}.layers.0": three[2]}))
    found = []
    for step in STEPS:
        (rows,) = micro_batches(BatchLayout(0, 1, 8, 1), step)
        optimizer.zero_grad()
        counted = rows["labels"] != -100
        (model(**rows)["labels"].sum() / counted.sum()).backward()
        gradients = {
            name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
        }
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        updates = {name: parameter.detach() - weights[name] for name, parameter in model.named_parameters()}
        of_step = {"gradient": _by_layer(gradients), "weight": _by_layer(weights), "update": _by_layer(updates)}
        mask = rows.get("encoder_attention_mask", torch.ones_like(rows["encoder_input_ids"]))
        real = {"encoder.layers.0": mask == 1, "decoder.layers.0": counted}
        of_step["activation"] = {
            name: output[real[name]].square().mean().sqrt().item() for name, output in outputs.items()
        }
        found.append(of_step)
    return [found[0], found[2]]


def _by_layer(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    pieces: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        words = name.split(".")
        pieces.setdefault(".".join(words[:3] if "layers" in words else words[:-1]), []).append(tensor.flatten())
    return {layer: torch.cat(those).norm().item() for layer, those in pieces.items()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_norms_are_those_of_plain_training_and_change_nothing(ranks):
    """At each stage on two ranks, in fp32; in bf16 within its rounding of gradients. On one rank, two of them."""
    wanted = plain_steps()
    for of_rank, case in itertools.product(on_ranks(ranks, measured_steps), CASES[ranks]):
        within = 1e-4 if case[1] == "fp32" else 0.2
        for one, other in zip(of_rank[case], wanted, strict=True):
            assert [norms["layer"] for norms in one] == [*other["weight"]], case
            for norms in one:
                for kind, values in other.items():
                    found = norms[kind]
                    if kind == "activation" and norms["layer"] not in values:
                        assert found is None
                    else:
                        same = pytest.approx(values[norms["layer"]], rel=within, abs=1e-7)
                        assert found == same, (case, kind, norms["layer"])
                assert norms["update_to_weight"] == pytest.approx(norms["update"] / norms["weight"])


@pytest.mark.slow
def test_a_run_with_norms_has_them_in_metrics_a_table_and_a_picture(small_corpus, tmp_path):
    """Also after a restart on another number of ranks; its losses are those of a run without."""
    plain = run_file(tmp_path / "plain", small_corpus, 3, evaluation=[])
    assert train_ranks(plain, 2) == [0, 0]
    hooks = [{"hook": "norms", "every_steps": 3}]
    path = run_file(tmp_path / "norms", small_corpus, 3, evaluation=hooks)
    assert train_ranks(path, 2, stop=4) == [75, 75]
    assert train_ranks(path, 2) == [0, 0]
    assert losses(path) == losses(plain)
    rows = read_metrics(tmp_path / "norms/run")
    steps = [row.step for row in rows if "norms/gradient/embedding" in row.metrics]
    assert steps == [3, 6, 8]
    by_step = {row.step: row.metrics for row in rows if "train/gradient_norm" in row.metrics}
    for row in rows:
        gradients = [value for name, value in row.metrics.items() if name.startswith("norms/gradient/")]
        if gradients:
            assert math.hypot(*gradients) == pytest.approx(by_step[row.step]["train/gradient_norm"], rel=1e-6)
    folder = tmp_path / "norms/run/artifacts/evaluation"
    table = json.loads((folder / "norms.json").read_text())
    assert table["columns"] == ["step", "layer", "gradient", "weight", "update", "update_to_weight", "activation"]
    layers = [row[1] for row in table["data"] if row[0] == 8]
    assert {"embedding", "encoder.layers.0", "decoder.layers.0", "decoder.final_norm", "lm_head"} <= {*layers}
    assert len(table["data"]) == 3 * len(layers)
    assert sorted(one.name for one in (folder / "norms").iterdir()) == [f"step-0000000{step}.png" for step in (3, 6, 8)]
    refused = run_forked("evaluate", tmp_path / "norms/run", "--hook", "norms")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "--hook norms: the hook measures training steps, and a checkpoint has none" in refused.stderr


def test_the_picture_takes_ratios_that_json_lacks(tmp_path):
    """A layer without weights has no ratio: NaN in a step, and "NaN" in the table of earlier steps."""
    ratio = {
        "layer": "a",
        "gradient": 1.0,
        "weight": 0.0,
        "update": 0.0,
        "update_to_weight": math.nan,
        "activation": 2.0,
    }
    record.keep(tmp_path, 5, EvalResult(tables={"ratios": [ratio]}))
    norms_figure([*record.table(tmp_path / "ratios.json"), {"step": 6, **ratio}])  # takes both forms
