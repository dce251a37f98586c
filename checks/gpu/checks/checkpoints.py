"""A checkpoint from the device, restored on the CPU at another stage, and back: the same bits."""

from pathlib import Path

import torch
from torch import Tensor

from checks.gpu.corpus import make
from checks.gpu.report import Json, Report
from data_pipeline.base.config_file import check
from data_pipeline.loading.batches import TrainingBatches
from pretrain.config import RunConfig
from pretrain.engine.checkpoint.tensors import PARAMETER, StoredTensors
from pretrain.engine.sharding import Sharding
from pretrain.run.train_state import TrainState
from pretrain.run.world import World
from tests.support.checkpoint_runs import OPTIMIZERS
from tests.support.rank_processes import on_ranks

STEPS = 3
MODEL: Json = {
    "family": "t5",
    "d_model": 36,
    "d_kv": 9,
    "d_ff": 50,
    "num_heads": 3,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
}


def checkpoints(report: Report) -> None:
    device = report.device.type
    path = [(device, 1), ("cpu", 3), (device, 2), ("cpu", 1)]
    report.fact("path", [f"{where}, stage {stage}" for where, stage in path])
    corpus = make(report.folder / "corpus")
    optimizers = list(OPTIMIZERS)
    if report.small:
        optimizers = optimizers[1:3]
        report.skip("adamw and muon", "two of four optimizers on a CPU")
    saved: list[list[Path]] = []
    for number, (where, stage) in enumerate(path):
        runs = [_config(report.folder, corpus, name, stage, number) for name in optimizers]
        (of_rank,) = on_ranks(1, _saved_again, runs, saved[-1] if saved else None, device=where)
        saved.append(of_rank)
    for number, (where, stage) in enumerate(path[1:], 1):
        for name, first, later in zip(optimizers, saved[0], saved[number], strict=True):
            report.expect(f"{name}: the same bits after {where}, stage {stage}", _equal(first, later))


def _config(folder: Path, corpus: Path, optimizer: str, stage: int, number: int) -> RunConfig:
    values = {
        "run": {"name": optimizer, "directory": str(folder / f"{optimizer}-{number}"), "max_steps": 9},
        "model": MODEL,
        "data": {"train": [{"corpus": str(corpus)}], "lanes": 4, "workers": 0},
        "batch": {"global_batch_size": 8},
        "optimizer": {"name": optimizer, **OPTIMIZERS[optimizer]},
        "precision": "bf16",
        "compute": {"compile": False},
        "deepspeed": {"zero_optimization": {"stage": stage, "sub_group_size": 1000}},
        "tracking": {"mlflow": None},
    }
    return check(values, RunConfig, "checkpoints")


def _saved_again(runs: list[RunConfig], sources: list[Path] | None) -> list[Path]:
    """Trains a few steps, or restores each of `sources`; saves at once and returns the checkpoints."""
    return [_saved(run, sources[number] if sources else None) for number, run in enumerate(runs)]


def _saved(config: RunConfig, source: Path | None) -> Path:
    from pretrain.engine.checkpoint.engine_state import restore
    from pretrain.engine.checkpoint.save import Saver
    from pretrain.engine.construction import construct
    from pretrain.engine.engine import Engine
    from pretrain.training.prepare import prepare

    setup = prepare(config, World.on_this_node())
    _begin(config)
    sharding = Sharding.of(config, setup.world.size)
    engine = Engine.initialize(construct(config, setup.model, sharding), config, sharding)
    if source:
        restore(engine, source)
    else:
        layout = setup.plan.layout
        for step, batches in enumerate(TrainingBatches(setup.stream, layout).loader(STEPS, 0)):
            assert engine.step(step, layout.row_offsets(step * 8, len(batches)), batches).applied
    saver = Saver.open(engine, setup.origin)
    saver.start(TrainState(STEPS, STEPS * 8, []))
    saved = saver.wait()
    assert saved is not None
    assert saved.error is None, saved.error
    engine.close()
    return saved.directory


def _begin(config: RunConfig) -> None:
    """Makes the run's directory, with the config that every checkpoint has a copy of."""
    run = Path(config.run.directory)
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("{}")


def _equal(one: Path, other: Path) -> bool:
    first, second = _tensors(one), _tensors(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _tensors(directory: Path) -> dict[str, Tensor]:
    """The parameters and all optimizer state, by "STATE/NAME"."""
    stored = StoredTensors(directory)
    stored.verify()
    found = {}
    for name in stored.shapes:
        for state in (PARAMETER, *stored.states(name)):
            found[f"{state}/{name}"] = stored.whole(state, name)
        for scalar, value in stored.scalars(name).items():
            found[f"{scalar}/{name}"] = torch.tensor(value)
    factored = stored.factored_state()
    return found | {f"{state}/{name}": one for name, states in factored.items() for state, one in states.items()}
