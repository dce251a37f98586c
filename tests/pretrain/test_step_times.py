"""The time of a rank's own part of a step, by a clock that only moves when something is done."""

import pytest
import torch

from pretrain.zero import step_times
from pretrain.zero.step_times import DeviceTimes, HostTimes


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
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(step_times, "FileIO", clock.does(0))  # no scheduler to ask
    return clock


def test_what_a_rank_waits_in_collectives_is_not_its_compute(clock):
    times = HostTimes()
    reduce = times.waiting(clock.does(3.0))
    for compute in (5.0, 7.0):
        with times.step():
            clock.does(compute)()
            reduce()
            reduce()
        clock.does(100.0)()  # a save
        assert (times.compute, times.whole) == (compute, compute + 6.0)


def test_nor_is_what_it_waits_for_an_asynchronous_one(clock):
    class Work:
        wait = staticmethod(clock.does(3.0, True))
        other = 4

    times = HostTimes()
    with times.step():
        handle = times.waiting(clock.does(0.5, Work()))("tensor")
        clock.does(5.0)()
        assert handle.wait() is True
        assert handle.other == 4
    assert times.compute == 5.0


def test_what_a_rank_waits_for_its_rows(clock):
    def loader():
        for seconds in (1.0, 2.0):
            clock.does(seconds)()
            yield seconds

    times = HostTimes()
    for seconds in times.loading(loader()):
        clock.does(10.0)()
        assert times.data == seconds


def test_the_time_in_the_run_queue_is_left_out(clock, monkeypatch):
    """The second number of the kernel's line, in nanoseconds."""
    queued = iter([b"1 0 1\n", b"1 2000000000 1\n"])
    times = HostTimes()
    times._scheduler = open("/dev/null", "rb", buffering=0)  # noqa: PTH123, SIM115
    monkeypatch.setattr(step_times.os, "pread", lambda *arguments: next(queued))
    with times.step():
        clock.does(5.0)()
    assert (times.compute, times.whole) == (3.0, 5.0)


def test_on_a_device_the_forward_passes_count_without_the_gathering_of_weights(clock, monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.now

        def elapsed_time(self, end):
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    times = DeviceTimes()
    gather = times.waiting(clock.does(3.0, "weights"))
    for _ in range(2):
        with times.step():
            for seconds in (5.0, 6.0):  # micro-batches
                with times.forward():
                    assert gather() == "weights"
                    clock.does(seconds)()
                gather()
                clock.does(20.0)()  # backward
        assert times.compute == 11.0
