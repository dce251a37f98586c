"""`batch.micro_batch_size: auto`: the largest micro-batch that fits, chosen once and without side effects."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from data_pipeline.base.config_file import load
from data_pipeline.base.processes import control_groups
from pretrain.config import RunConfig
from pretrain.config.batch import BatchPlan, BatchSection
from pretrain.config.run_config import ComputeSection
from pretrain.engine import construction
from pretrain.engine.ranks import joined_world
from pretrain.engine.sharding import Sharding
from pretrain.models.layers import Layer
from pretrain.run import watchdog
from pretrain.training import micro_batch
from pretrain.training.micro_batch import fastest
from pretrain.training.prepare import prepare
from tests.support import tables
from tests.support.rank_processes import each, on_ranks
from tests.support.runs import losses, run_file
from tests.support.small_runs import own_sharding, run_config


@pytest.mark.slow
def test_losses_are_those_of_a_run_that_measured_nothing(small_corpus, tmp_path):
    """And the choice is kept: what was measured under the same conditions isn't measured again."""
    auto, fixed = (
        [
            run_file(
                tmp_path / f"{micro}-{stage}",
                small_corpus,
                stage,
                batch={"global_batch_size": 16, "micro_batch_size": micro},
                precision=precision,
                evaluation=[],
            )
            for stage, precision in ((1, "bf16"), (2, "fp32"), (3, "bf16"))
        ]
        for micro in ("auto", 8)
    )
    assert on_ranks(2, trained_with_memory, [(path, 4) for path in auto], seconds=600) == [[75] * 3] * 2
    kept = [path.parent / "run/micro_batch.json" for path in auto]
    chosen = [json.loads(path.read_text()) for path in kept]
    # a rank's whole share
    assert [(one["micro_batch_size"], one["measured_for"]["ranks"]) for one in chosen] == [(8, 2)] * 3
    rest = [(path, None) for path in (*auto, *fixed)]
    assert on_ranks(2, trained_with_memory, rest, seconds=600) == [[0] * 6] * 2
    assert [json.loads(path.read_text()) for path in kept] == chosen
    assert [losses(path) for path in auto] == [losses(path) for path in fixed]


def trained_with_memory(starts: list[tuple[Path, int | None]]) -> list[int]:
    """The exit codes of runs on a machine with 64 GiB of free memory."""
    from pretrain.engine import memory
    from tests.support.runs import _train_each

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "available_memory", lambda: 64 * 2**30)
        return _train_each(starts)


def chosen_with(
    path: Path, free: int, pack: int, total: int = 2**30, folder: str = "", fitting: int = 100
) -> tuple[int, Any]:
    """The choice, and the (rows, inputs, targets) of the tensors that were tried, where a row of a tensor takes 100
    bytes, all else 500, and `free` are free besides 44 for each parameter of the rank. On the second rank the memory
    of more than `fitting` rows isn't there."""
    from pretrain.engine.construction import construct
    from pretrain.engine.deepspeed_private import fragments
    from pretrain.engine.engine import Engine

    overrides = [f"run.directory={path.parent}/{folder or f'{free}-{pack}'}", f"data.packing_ratio={pack}"]
    run = prepare(load(path, overrides, RunConfig), joined_world())
    sharding = own_sharding(run.config)
    engine = Engine.initialize(construct(run.config, run.model, sharding), run.config, sharding)
    tried: list[tuple[int, int, int]] = []

    def peak(passes: partial[None]) -> int:
        batch = passes.args[1]
        tried.append((*batch["encoder_input_ids"].shape, batch["labels"].size(1)))
        passes()
        return 500 + 100 * tried[-1][0]

    measure = engine.measure

    def measured(batch: Any) -> None:
        if dist.get_rank() and len(batch["labels"]) > fitting:
            engine.counted([batch])  # in which ranks meet
            raise torch.OutOfMemoryError
        measure(batch)

    coming = 20 * sum(one.size for one in fragments(engine.deepspeed)) / 0.9
    memory = SimpleNamespace(
        free=lambda: free * (1 + dist.get_rank()) + coming,  # the second rank has more
        total=lambda: total,
        peak=peak,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch, "DeviceMemory", lambda device: memory)
        patch.setattr(engine, "measure", measured)
        layout = micro_batch.choose(run, engine).layout
    assert layout.micro_batch * layout.accumulation == 12
    engine.close()
    return layout.micro_batch, tried


def test_the_largest_divisor_of_a_ranks_share_that_fits_the_rank_with_least(small_corpus, tmp_path):
    """A share has 12 rows, which must fit into 90 % of the free memory. No more than 4 rows of tensors are ever tried,
    each as wide as a row of the run, 32 inputs and 8 targets, or as four of them, in a multiple of 64.

    AdamW's moments will take 8 bytes for each parameter, and the copy from which a checkpoint is written 12."""
    path = run_file(tmp_path, small_corpus, batch={"global_batch_size": 24, "micro_batch_size": "auto"})
    expected = {10_000: 12, 1_300: 6, 1_100: 4, 950: 3, 0: 1}
    packed = {10_000: 12, 800: 6, 700: 4, 600: 1}  # 800, 700 and 600 bytes
    cases = [*((path, free, 1) for free in expected), *((path, free, 4) for free in packed)]
    plain, of_four = [(1, 32, 8), (4, 32, 8)], [(1, 128, 64), (3, 128, 64)]
    found = [(rows, plain) for rows in expected.values()] + [(rows, of_four) for rows in packed.values()]
    assert on_ranks(2, each, chosen_with, cases) == [found] * 2


def test_where_four_rows_do_not_fit_each_rank_takes_one(small_corpus, tmp_path):
    path = run_file(tmp_path, small_corpus, 1, batch={"global_batch_size": 24, "micro_batch_size": "auto"})
    assert on_ranks(2, chosen_with, path, 10_000, 1, 2**30, "", 3) == [(1, [])] * 2


def test_what_was_measured_for_other_rows_or_another_machine_is_measured_anew(small_corpus, tmp_path):
    path = run_file(tmp_path, small_corpus, batch={"global_batch_size": 12, "micro_batch_size": "auto"})
    starts = [(1, 2**34), (1, 2**34), (2, 2**34), (2, 2**35), (2, 2**35)]
    found = on_ranks(1, each, chosen_with, [(path, 10_000, *start, "run") for start in starts])
    assert [tried != [] for _, tried in found[0]] == [True, False, True, True, False]


def test_the_size_with_the_fastest_step_is_chosen():
    """64 rows: 4 × 0.10 or 2 × 0.18; then 4 × 0.10 or 2 × 0.22. A gain of 1 % is less than times vary."""
    assert fastest({16: 0.10, 32: 0.18}, 64) == 32
    assert fastest({16: 0.10, 32: 0.22}, 64) == 16
    assert fastest({16: 0.10, 32: 0.202}, 64) == 32
    assert fastest({1: 0.3}, 64) == 1


def test_on_a_gpu_the_largest_sizes_that_fit_are_timed(monkeypatch):
    """The slowest rank decides; a rank's own times would let ranks choose different sizes."""
    timed: list[int] = []
    most = [64]

    def microseconds(_: object, rows: int) -> int:
        timed.append(rows)
        return 10 * rows + (1000 if rows == 64 else 0)

    def measure(rows: int) -> None:
        if rows > most[0]:
            raise torch.OutOfMemoryError

    forgotten: list[int] = []
    config = run_config(compute={"compile": True})
    run = SimpleNamespace(plan=BatchPlan(BatchSection(global_batch_size=256), ranks=2), config=config, ranks=2)
    engine = SimpleNamespace(device=torch.device("cuda"), measure=measure, sharding=Sharding.of(config, 2))
    for name, value in {
        "_fitting": lambda *_: [1, 2, 4, 8, 16, 32, 64],
        "full_rows": lambda _, rows, each, masked: rows if not masked else None,  # as most rows of a run
        "on_gpu": lambda rows, _: rows,
        "examples_per_row": lambda _: 1,
        "_microseconds": microseconds,
        "forget_compiled": lambda: forgotten.append(len(timed)),
        "min_over_ranks": lambda value: value,
        "max_over_ranks": lambda value: max(value, 320 if value == 160 else value),  # another rank is slow with 16 rows
    }.items():
        monkeypatch.setattr(micro_batch, name, value)
    assert micro_batch._fastest(run, engine) == 32
    assert timed == [8, 16, 32, 64]
    assert forgotten == [4]  # when all are timed
    timed.clear()
    most[0] = 16  # more need memory that is not there after all: 16 × 80 or, on the slow rank, 8 × 320
    assert micro_batch._fastest(run, engine) == 8
    assert timed == [8, 16]
    most[0] = 0
    assert micro_batch._fastest(run, engine) == 1
    engine.device = torch.device("cpu")
    assert micro_batch._fastest(run, engine) == 64


class LinearLayer(Layer, torch.nn.Linear):
    run = torch.nn.Linear.forward


def test_after_the_search_layers_are_compiled_for_the_rows_of_the_run(monkeypatch):
    """PyTorch compiles for one row, then for any number; after the search, for those that come. The watchdog still
    hears of it."""
    sizes: list[bool] = []
    told: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        sizes.append(any(isinstance(one, torch.SymInt) for one in inputs))
        return graph.forward

    monkeypatch.setattr(construction, "BACKEND", backend)
    monkeypatch.setattr(watchdog, "compiling", told.append)
    torch.compiler.reset()
    model = torch.nn.Sequential(torch.nn.ModuleList([LinearLayer(2, 2)]))
    for one in (torch.nn.Sequential(), model):  # as for two runs of a process
        construction.prepare_layers(one, ComputeSection(compile=True), stage=2)
    for rows in (1, 4, 8):
        model[0][0](torch.ones(rows, 2))
    assert (sizes, told) == ([False, True], [True, False, True, False])
    told.clear()
    construction.forget_compiled()
    model[0][0](torch.ones(8, 2))
    assert (sizes, told) == ([False, True, False], [True, False])


@tables.each(
    "controllers, root, limit, usage, cache",
    [
        ("0::", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("4:memory:", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_containers_limit_is_seen(tmp_path, controllers, root, limit, usage, cache):
    """So are the limits of a group above it, and that of a container, which sees its own group as the root."""

    def group(path: str, most: str, taken: int, cached: int) -> None:
        directory = tmp_path / root / path
        directory.mkdir(parents=True, exist_ok=True)
        (directory / limit).write_text(f"{most}\n")
        (directory / usage).write_text(f"{taken}\n")
        (directory / "memory.stat").write_text(f"anon 5\n{cache} {cached}\n")

    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"3:cpu:/other\n{controllers}/job/step\n")
    assert list(control_groups(tmp_path)) == []
    group("", "9000", 1000, 100)
    assert list(control_groups(tmp_path)) == [(9000, 900)]
    group("job/step", "max", 700, 0)
    group("job", "5000", 800, 50)
    assert list(control_groups(tmp_path)) == [(5000, 750), (9000, 900)]
