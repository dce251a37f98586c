"""Measures how far a sharded optimizer's steps are from the same optimizer's without sharding, as a table.

    python -m tests.support.exactness [--steps 20]

Two small models of odd shapes, a T5 with tied embeddings and a BART, train on random batches under DeepSpeed, at each
ZeRO stage on 1, 2 and 4 ranks, with clipping and two parameter groups. A plain loop on one process, without DeepSpeed,
takes the same steps on the same batches. A figure is the largest relative L2 difference of a parameter at the end, over
both models, all in fp32. In bf16 it is the largest relative difference of a step's loss; bf16 rounds by up to 2⁻⁹.
"""

import argparse
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import Batch
from pretrain import models
from pretrain.config import RunConfig
from pretrain.engine import optimizers
from tests.support.rank_processes import each, on_ranks
from tests.support.small_runs import own_layout, own_rows, own_sharding, row_offsets, run_config

STAGES, RANKS, PRECISIONS = (1, 2, 3), (1, 2, 4), ("fp32", "bf16")
ROWS = 8  # of a global batch

_ONE_LAYER = {"num_encoder_layers": 1, "num_decoder_layers": 1}
_T5 = {"family": "t5", "vocab_size": 57, "d_kv": 6, **_ONE_LAYER}
_BART = {"family": "bart", "vocab_size": 61, "max_positions": 15, "dropout_rate": 0.0, **_ONE_LAYER}
MODELS: dict[str, dict[str, Any]] = {
    "t5": {**_T5, "d_model": 20, "d_ff": 26, "num_heads": 3, "tie_embeddings": True},
    "bart": {**_BART, "d_model": 18, "d_ff": 26, "num_heads": 3},
    # twice as wide as its base, so matrices have rates of their own
    "t5 with muP": {**_T5, "d_model": 24, "d_ff": 32, "num_heads": 4, "mup": {"base_width": 12}},
}
OF_TABLE = ("t5", "bart")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"learning_rate": 3e-3},
    "adamw_scale": {"learning_rate": 2e-2},
    "adafactor": {"learning_rate": 2e-2, "min_dim_size_to_factor": 16},
    "muon": {"learning_rate": 5e-3, "newton_schulz_dtype": "fp32"},
}


def config(model: str, optimizer: str, steps: int, stage: int = 1, precision: str = "fp32", **zero: Any) -> RunConfig:
    """The run file of this test; its data and directories are not used."""
    common = {"name": optimizer, "learning_rate": 1e-3, "weight_decay": 0.1, "gradient_clipping": 0.5}
    return run_config(
        stage,
        MODELS[model],
        {"sub_group_size": 1000, **zero},  # at stage 3 several flat tensors for each group
        run={"name": "exactness", "directory": "run", "max_steps": steps},
        batch={"global_batch_size": ROWS},
        optimizer={**common, **OPTIMIZERS.get(optimizer, {})},
        schedule={"name": "cosine", "warmup_steps": 3},
        precision=precision,
    )


def build(settings: RunConfig, device: torch.device | None = None) -> nn.Module:
    torch.manual_seed(0)
    return models.build(settings.model).to(device)


def global_batch(settings: RunConfig, step: int) -> Batch:
    """{"encoder_input_ids": (rows, 11), "labels": (rows, 7)}; the rows have 1 to 7 labels."""
    draws = torch.Generator().manual_seed(step)
    size = settings.model.vocab_size
    labels = torch.randint(3, size, (ROWS, 7), generator=draws)
    lengths = torch.randint(1, 8, (ROWS, 1), generator=draws)
    return {
        "encoder_input_ids": torch.randint(3, size, (ROWS, 11), generator=draws),
        "labels": torch.where(torch.arange(7) < lengths, labels, IGNORE_INDEX),
    }


def whole_parameters(engine: Any) -> dict[str, Tensor]:
    """The whole parameters, gathered from all ranks, which call this together."""
    with engine.whole() as module:
        return {name: parameter.detach().float().clone() for name, parameter in module.named_parameters()}


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative L2 difference of a parameter.

    The biases of keys are left out: softmax cancels them, so their true gradient is zero, and an optimizer that
    normalises gradients turns the rounding errors into arbitrary updates.
    """
    differences = [
        (found[name] - tensor).norm() / tensor.norm()
        for name, tensor in expected.items()
        if not name.endswith(".k.bias")
    ]
    return torch.stack(differences).max().item()  # NaN if one is


@dataclass(frozen=True)
class Case:
    """A cell of the table, for one model."""

    model: str
    optimizer: str
    stage: int
    precision: str = "fp32"
    offload: bool = False  # of the optimizer, to the CPU's memory


def measure(ranks: int, cases: list[Case], steps: int, device: str = "cpu") -> dict[Case, float]:
    """The difference of each case, on `ranks` processes on `device`."""
    given = [(case, steps) for case in cases]
    return dict(zip(cases, on_ranks(ranks, each, difference, given, seconds=800, device=device)[0], strict=True))


def difference(case: Case, steps: int) -> float:
    """The difference from a plain loop in fp32 on the same device: of parameters or, in bf16, of losses.

    The ranks that have joined call this together.
    """
    from pretrain.engine.engine import Engine

    zero = {"offload_optimizer": {"device": "cpu"}} if case.offload else {}
    settings = config(case.model, case.optimizer, steps, case.stage, case.precision, **zero)
    engine = Engine.initialize(build(settings), settings, own_sharding(settings))
    layout = own_layout(ROWS // dist.get_world_size() // 2)
    own = (own_rows(layout, global_batch(settings, step)) for step in range(steps))
    losses = [engine.step(step, row_offsets(layout, step), batches).loss for step, batches in enumerate(own)]
    parameters = whole_parameters(engine)
    engine.close()
    expected, expected_losses = _expected(case.model, case.optimizer, steps, engine.device)
    if case.precision == "fp32":
        return largest_difference(parameters, expected)
    found, wanted = torch.tensor(losses), torch.tensor(expected_losses)
    return ((found - wanted).abs() / wanted).max().item()


@cache
def _expected(model: str, optimizer: str, steps: int, device: torch.device) -> tuple[dict[str, Tensor], list[float]]:
    """The parameters and the losses of each step in a plain loop without DeepSpeed."""
    from pretrain.engine.engine import set_rates

    settings = config(model, optimizer, steps)
    whole = build(settings, device)
    plain = optimizers.build(whole, settings.optimizer)
    losses = []
    for step in range(steps):
        batch = {name: tensor.to(device) for name, tensor in global_batch(settings, step).items()}
        loss = whole(**batch)["labels"].sum() / (batch["labels"] != IGNORE_INDEX).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), settings.optimizer.gradient_clipping)
        set_rates(plain, settings, step)
        plain.step()
        plain.zero_grad()
        losses.append(loss.item())
    return {name: parameter.detach() for name, parameter in whole.named_parameters()}, losses


def all_cases() -> list[Case]:
    return [
        Case(model, optimizer, stage, precision)
        for optimizer in OPTIMIZERS
        for stage in STAGES
        for precision in PRECISIONS
        for model in OF_TABLE
    ]


def table(of_ranks: dict[int, dict[Case, float]]) -> str:
    columns = [(precision, ranks) for precision in PRECISIONS for ranks in of_ranks]
    heads = [f"{precision} {ranks} ranks" for precision, ranks in columns]
    lines = [f"{'optimizer':12}{'stage':>6}" + "".join(f"{head:>14}" for head in heads)]
    for optimizer in OPTIMIZERS:
        for stage in STAGES:
            found = [
                max(of_ranks[ranks][Case(model, optimizer, stage, precision)] for model in OF_TABLE)
                for precision, ranks in columns
            ]
            lines.append(f"{optimizer:12}{stage:6}" + "".join(f"{value:14.1e}" for value in found))
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    print(table({ranks: measure(ranks, all_cases(), steps) for ranks in RANKS}))
