"""`batch.micro_batch_size: auto`: the largest micro-batch that fits, chosen once and without side effects."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.processes import left_by_control_groups
from pretrain.config import RunConfig
from pretrain.config.batch import BatchPlan, BatchSection
from pretrain.trainer import micro_batch
from pretrain.trainer.micro_batch import fastest
from pretrain.trainer.validate import validate
from tests import tables
from tests.pretrain.rank_processes import each, on_ranks
from tests.pretrain.runs import losses, run_file


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
    from pretrain.zero import memory
    from tests.pretrain.runs import _train_each

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "available_memory", lambda: 64 * 2**30)
        return _train_each(starts)


def chosen_with(path: Path, free: int) -> tuple[int, int]:
    """The choice, and the most rows that were tried, where a row takes 100 bytes, all else 500, and `free` are free."""
    import torch.distributed as dist

    from pretrain.zero.construction import construct
    from pretrain.zero.engine import Engine

    overrides = [f"run.directory={path.parent}/{free}"]
    run = validate(load(path, overrides, RunConfig), dist.get_rank(), dist.get_world_size())
    engine = Engine(construct(run.config, run.model), run.config)
    tried: list[int] = []

    def peak(passes: partial[None]) -> int:
        tried.append(len(passes.args[1]["labels"]))
        passes()
        return 500 + 100 * tried[-1]

    memory = SimpleNamespace(free=lambda: free * (1 + dist.get_rank()), peak=peak)  # the second rank has more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch, "DeviceMemory", lambda device: memory)
        patch.setattr(micro_batch, "_MOMENTS", 0)
        layout = micro_batch.choose(run, engine).layout
    assert layout.micro_batch * layout.accumulation == 12
    engine.close()
    return layout.micro_batch, max(tried)


def test_the_largest_divisor_of_a_ranks_share_that_fits_the_rank_with_least(small_corpus, tmp_path):
    """A share has 12 rows, which must fit into 90 % of the free memory. No more than 4 rows are ever tried."""
    path = run_file(tmp_path, small_corpus, batch={"global_batch_size": 24, "micro_batch_size": "auto"})
    expected = {10_000: 12, 1_300: 6, 1_100: 4, 950: 3, 0: 1}
    cases = [(path, free) for free in expected]
    assert on_ranks(2, each, chosen_with, cases) == [[(rows, 4) for rows in expected.values()]] * 2


def test_the_size_with_the_fastest_step_is_chosen():
    """64 rows: 4 × 0.10 or 2 × 0.18; then 4 × 0.10 or 2 × 0.22. A gain of 1 % is less than times vary."""
    assert fastest({16: 0.10, 32: 0.18}, 64) == 32
    assert fastest({16: 0.10, 32: 0.22}, 64) == 16
    assert fastest({16: 0.10, 32: 0.202}, 64) == 32
    assert fastest({1: 0.3}, 64) == 1


def test_on_a_gpu_the_largest_sizes_that_fit_are_timed(monkeypatch):
    """The slowest rank decides; a rank's own times would let ranks choose different sizes."""
    timed: list[int] = []

    def microseconds(_: object, rows: int) -> int:
        timed.append(rows)
        return 10 * rows + (1000 if rows == 64 else 0)

    run = SimpleNamespace(plan=BatchPlan(BatchSection(global_batch_size=256), ranks=2))
    engine = SimpleNamespace(device=torch.device("cuda"))
    for name, value in {
        "_fitting": lambda *_: [1, 2, 4, 8, 16, 32, 64],
        "full_rows": lambda _, rows: rows,
        "_microseconds": microseconds,
        "least": lambda value, _: min(value, -320 if value == -160 else value),  # another rank is slow with 16 rows
    }.items():
        monkeypatch.setattr(micro_batch, name, value)
    assert micro_batch._fastest(run, engine) == 32
    assert timed == [8, 16, 32, 64]
    engine.device = torch.device("cpu")
    assert micro_batch._fastest(run, engine) == 64


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
    assert list(left_by_control_groups(tmp_path)) == []
    group("", "9000", 1000, 100)
    assert list(left_by_control_groups(tmp_path)) == [8100]
    group("job/step", "max", 700, 0)
    group("job", "5000", 800, 50)
    assert list(left_by_control_groups(tmp_path)) == [4250, 8100]
