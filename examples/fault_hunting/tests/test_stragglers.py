"""Stragglers: the judgement over made-up times, and real ranks of which one is slowed down."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fault_hunting import clocks
from fault_hunting.clocks import DeviceTimes, HostTimes
from fault_hunting.findings import place
from fault_hunting.stragglers import COMPUTE, DATA, WHOLE, WINDOW, Stragglers, compared, named, waiting

from data_pipeline.base.config_file import load
from data_pipeline.loading.batches import TrainingBatches
from pretrain.config import RunConfig
from pretrain.engine.engine import Engine
from pretrain.engine.ranks import joined_world
from pretrain.evaluate import record
from pretrain.models.layers import RMSNorm
from pretrain.run.environment import this_machine
from pretrain.run.metrics_file import read_metrics
from pretrain.training import trainer
from pretrain.training.run import train
from tests.support.rank_processes import each as each_in_turn
from tests.support.rank_processes import on_ranks
from tests.support.runs import run_file
from tests.support.slow import slow
from tests.support.small_runs import engine_of, micro_batches, own_layout, row_offsets, run_config
from tests.support.tables import each

EVERY = 4  # steps between two judgements, as in a run
FACTOR = 1.3


def times(steps, ranks, seed, noise=0.05, data=0.01):
    """(steps, ranks, 3) of ranks that are equally fast. `noise`: the standard deviation of a step's logarithm.

    Steps differ for all ranks together, and one of ten takes some rank several times as long.
    """
    random = np.random.default_rng(seed)
    own = np.exp(random.normal(0, noise, (steps, ranks)) + random.normal(0, 0.1, (steps, 1)))
    spikes = np.where(random.random((steps, ranks)) < 0.1 / ranks, 1 + random.exponential(1.5, (steps, ranks)), 1.0)
    made = np.empty((steps, ranks, 3))
    made[:, :, COMPUTE] = own * spikes
    made[:, :, DATA] = data * random.exponential(1.0, (steps, ranks))
    return together(made)


def together(made):
    """With the time of the whole step as it follows: all ranks end with the last one."""
    ends = (made[:, :, DATA] + made[:, :, COMPUTE]).max(axis=1, keepdims=True)
    made[:, :, WHOLE] = ends - made[:, :, DATA]
    return made


def judged(made, remote=False):
    """{step: what is named} as a run finds it, where that changes."""
    now, found = None, {}
    for step in range(WINDOW, len(made) + 1, EVERY):
        before, now = now, named(compared(made[step - WINDOW : step], remote), FACTOR, now)
        if (now and (now.cause, now.rank)) != (before and (before.cause, before.rank)):
            found[step] = now
    return found


@each("ranks, seeds", [(64, range(1)), *slow(*((ranks, range(20)) for ranks in (2, 8, 64)))])
def test_nothing_is_named_in_a_thousand_steps_of_equal_ranks(ranks, seeds):
    for seed in seeds:
        assert judged(times(1000, ranks, seed, noise=0.1), remote=True) == {}


SLOWED = list(itertools.product((2, 8, 64), ("device", "loader", "store")))


@each(
    "ranks, cause, seeds", [*((*case, range(4)) for case in SLOWED), *slow(*((*case, range(4, 40)) for case in SLOWED))]
)
def test_what_slows_the_run_by_three_tenths_is_named_within_twenty_steps_and_its_end_too(ranks, cause, seeds):
    for seed in seeds:
        begins, ends, rank = 40 + seed % EVERY, 100, seed % ranks
        made = times(160, ranks, seed)
        slowed = made[begins:ends]
        if cause == "device":
            slowed[:, rank, COMPUTE] *= FACTOR
        else:
            slowed[:, [rank] if cause == "loader" else slice(None), DATA] += FACTOR - 1
        found = judged(together(made), remote=cause == "store")
        (first, one), (last, nothing) = found.items()
        assert begins < first <= begins + 20
        assert ends < last <= ends + 20
        assert (one.cause, one.rank) == (cause, None if cause == "store" else rank)
        assert one.factor == pytest.approx(FACTOR, rel=0.1)
        assert nothing is None


def test_of_two_slow_ranks_the_slowest_is_named_and_kept_while_it_is_slow():
    made = times(200, 8, seed=0)
    made[:, 2, COMPUTE] *= 1.32
    made[:, 6, COMPUTE] *= 1.30
    assert [one.rank for one in judged(together(made)).values()] in ([2], [6])
    made[100:, 6, COMPUTE] *= 2
    assert [one.rank for one in judged(together(made)).values()][-1] == 6


def test_two_long_waits_and_a_difference_without_weight_are_not_named():
    waits, short = times(100, 4, seed=0), times(100, 2, seed=0) * 1e-4
    waits[[30, 37], 1, DATA] += 20.0
    short[:, 1, COMPUTE] *= 3
    assert [judged(together(made)) for made in (waits, short)] == [{}, {}]


def test_the_share_of_waiting():
    """Two ranks, of which one takes half as long: it waits half of the step."""
    made = np.zeros((WINDOW, 2, 3))
    made[:, :, COMPUTE] = [1.0, 2.0]
    assert waiting(made) == pytest.approx(0.25)


def test_the_place_of_a_rank():
    gpus = {"a": ["H100", "H100"], "b": ["A100"], "c": []}
    hosts = [
        {"host": host, "cpu": {"model": "Xeon"}, "gpus": gpus[host], "ranks": ranks}
        for host, ranks in (("a", [0, 1]), ("b", [2, 3]), ("c", [4]))
    ]
    assert [place(rank, hosts) for rank in (1, 3, 4)] == [("a", "GPU 1: H100"), ("b", "GPU 1: A100"), ("c", "Xeon")]


def train_slowed(path, cause, first, share):
    """Trains on this rank. From step `first` on, the device or the loader of rank 1 takes longer by `share`.

    By this rank's clock each of the two passes of a step takes half a second, and nothing else takes any time.
    """
    take_step, forward, load_batches = Engine.step, RMSNorm.forward, TrainingBatches.loader
    now, steps, norms = [0.0], [0], 2 * 12  # those of the model, in two micro-batches

    def step(self, number, *arguments):
        steps[0] = number + 1
        return take_step(self, number, *arguments)

    def forward_on_device(self, x):
        slowed = cause == "device" and dist.get_rank() == 1 and steps[0] >= first
        now[0] += (1 + share if slowed else 1) / norms
        return forward(self, x)

    def slow_loader(self, *arguments):
        for batches in load_batches(self, *arguments):
            now[0] += share if cause == "loader" and dist.get_rank() == 1 and steps[0] + 1 >= first else 0.0
            yield batches

    Engine.step, RMSNorm.forward = step, forward_on_device
    clocks.time = trainer.time = SimpleNamespace(perf_counter=lambda: now[0])
    clocks.FileIO = lambda _: (_ for _ in ()).throw(OSError())  # a machine that tells nothing of waiting
    TrainingBatches.loader = slow_loader
    return train(load(path, [], RunConfig))


@each("cause, stage, share", [("device", 2, 0.6), *slow(("device", 3, 0.6), ("loader", 2, 1.0))])
def test_a_rank_that_is_slowed_down_is_named_within_twenty_steps(small_corpus, tmp_path, cause, stage, share):
    callbacks = [{"name": "fault_hunting:Stragglers", "factor": FACTOR}]
    sections = {"evaluation": [], "checkpoint": {"every_steps": 1000}, "callbacks": callbacks}
    path, first = run_file(tmp_path, small_corpus, stage, run={"max_steps": 42}, **sections), 21
    assert on_ranks(2, train_slowed, path, cause, first, share, joined=False) == [0, 0]
    (event,) = record.table(record.directory(tmp_path / "run") / "stragglers.json")
    assert first < event["step"] < first + 20
    assert (event["rank"], event["slow"]) == (1, cause)
    last = [row.metrics for row in read_metrics(tmp_path / "run") if "train/loss" in row.metrics][-1]
    assert last["stragglers/rank"] == 1
    assert last["stragglers/factor"] == last[f"stragglers/{cause}"] > FACTOR
    assert all(math.isfinite(value) for value in last.values())


COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter_tensor", "all_gather", "broadcast", "all_to_all_single")


def collectives_of_a_step(stage, optimizer):
    """The names of the collectives of a step: of those in which the time counts as this rank's compute, and of the
    others; and the times that the clock began to count."""
    inside, computed, waited, begun = [False], set(), set(), [0]

    def begin(self):
        inside[0] = True
        begun[0] += 1

    def end(self):
        inside[0] = False

    def noted(name, call):
        def collective(*arguments, **options):
            (computed if inside[0] else waited).add(name)
            return call(*arguments, **options)

        return collective

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostTimes, "begin", begin)
        patch.setattr(HostTimes, "end", end)
        settings = {"name": optimizer, "learning_rate": 1e-2}
        engine = engine_of(run_config(stage, precision="bf16", optimizer=settings))
        engine.time_steps(HostTimes())
        for name in COLLECTIVES:
            patch.setattr(dist, name, noted(name, getattr(dist, name)))
        begun[0] = 0
        engine.step(0, row_offsets(own_layout(), 0), micro_batches(own_layout(), 0))
    engine.close()
    return computed, waited, begun[0]


def test_no_rank_computes_while_it_waits_in_a_collective():
    """Of two micro-batches, each is measured at stage 1, its forward pass at stage 2, modules at stage 3."""
    cases = [(stage, optimizer) for stage in (1, 2, 3) for optimizer in ("adamw", "muon")]
    for of_rank in on_ranks(2, each_in_turn, collectives_of_a_step, cases):
        for (stage, optimizer), (computed, waited, begun) in zip(cases, of_rank, strict=True):
            assert "all_reduce" in waited, (stage, optimizer)
            assert ("all_to_all_single" in waited) == (optimizer == "muon"), (stage, optimizer)
            assert computed == set(), (stage, optimizer)
            assert begun == 2 if stage < 3 else begun > 40


def named_while_busy_for(folder, steps):
    """The steps at which something is named, if rank 0 does something else too for so many steps."""
    now, found, timers = [0], [], []
    rank = dist.get_rank()
    trainer = SimpleNamespace(
        config=run_config(),
        run=SimpleNamespace(directory=folder, world=joined_world()),
        engine=SimpleNamespace(device=torch.device("cpu"), time_steps=timers.append),
        report=SimpleNamespace(
            machines=[this_machine(0, 1)],
            connects_to_mlflow=lambda: rank == 0 and now[0] <= steps,
            record_result=lambda step, _: found.append(step),
        ),
    )
    straggling = Stragglers(FACTOR)
    straggling.before_training(trainer)
    (times,) = timers
    straggling.before_steps(trainer)
    for now[0] in range(1, 3 * WINDOW + 1):
        times.compute, trainer.step = 0.2 if rank == 0 else 0.1, now[0]
        straggling.after_step(trainer, SimpleNamespace(waited=0.0))
    return found


def test_steps_in_which_rank_0_does_something_else_too_dont_count(tmp_path):
    """MLflow's client is imported beside the first ones."""
    assert on_ranks(2, named_while_busy_for, tmp_path, WINDOW - EVERY) == [[2 * WINDOW - EVERY], []]
    assert on_ranks(2, named_while_busy_for, tmp_path, 0) == [[WINDOW], []]


# The time of a rank's own part of a step, by a clock that only moves when something is done


class Clock:
    def __init__(self):
        self.now = 0.0

    def does(self, seconds, result=None):
        def work(*arguments):
            self.now += seconds
            return result

        return work


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(clocks, "FileIO", clock.does(0))  # no scheduler to ask
    return clock


def test_only_what_a_rank_computes_by_itself_is_its_compute(clock):
    times = HostTimes()
    for compute in (5.0, 7.0):
        with times.step():
            for seconds in (compute, 2.0):
                times.begin()
                clock.does(seconds)()
                times.end()
                clock.does(4.0)()  # a collective
        clock.does(100.0)()  # a save
        assert (times.compute, times.whole) == (compute + 2.0, compute + 10.0)


def with_queue(monkeypatch, *seconds):
    """Times on a machine whose kernel tells, each time that it is asked, that this thread has waited so long so far.
    The kernel's line has it as the second number, in nanoseconds."""
    queued = iter([f"1 {round(1e9 * one)} 1\n".encode() for one in seconds])
    times = HostTimes()
    times._scheduler = open("/dev/null", "rb", buffering=0)  # noqa: PTH123, SIM115
    monkeypatch.setattr(clocks.os, "pread", lambda *arguments: next(queued))
    return times


def test_what_a_rank_waits_for_its_rows_is_without_its_time_in_the_run_queue(clock, monkeypatch):
    times = with_queue(monkeypatch, 1.0, 3.0, 3.0, 4.0)
    for waited, data in ((5.0, 3.0), (0.5, 0.0)):  # queued outside the wait, too
        times.ask_for_rows()
        times.take_rows()
        times.waited_for_rows(waited)
        assert times.data == data


def test_the_time_in_the_run_queue_is_left_out(clock, monkeypatch):
    times = with_queue(monkeypatch, 0.0, 2.0)
    with times.step():
        times.begin()
        clock.does(5.0)()
        times.end()
    assert (times.compute, times.whole) == (3.0, 5.0)


def test_on_a_device_events_measure_what_a_rank_computes(clock, monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.now

        def elapsed_time(self, end):
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    times = DeviceTimes()
    for _ in range(2):
        with times.step():
            for seconds in (5.0, 6.0):  # micro-batches
                times.begin()
                clock.does(seconds)()
                times.end()
                clock.does(20.0)()  # a reduction
        assert times.compute == 11.0
