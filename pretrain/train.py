"""Training: build everything, loop, done."""

import time
from collections.abc import Iterable, Iterator

from data_pipeline.command import STOPPED
from data_pipeline.loading.batches import Batch, TrainingBatches
from data_pipeline.loading.device import on_device
from data_pipeline.loading.stream import Progress
from pretrain import status
from pretrain.config import RunConfig
from pretrain.construction import construct
from pretrain.journal import Journal
from pretrain.ranks import joined
from pretrain.setup import Setup, prepare
from pretrain.throughput import Meter


def train(config: RunConfig, stop_at_step: int | None = None) -> int:
    """Trains, or goes on where the run directory stands; returns the exit code: 0 finished, 75 stopped after saving."""
    with joined(config.run.cpu_threads) as (rank, ranks):
        setup = prepare(config, rank, ranks)
        if setup.first_step >= config.run.max_steps:
            Journal.nothing_left(setup)
            return 0
        with Journal(setup) as journal:
            return _train(setup, journal, stop_at_step)


def _train(setup: Setup, journal: Journal, stop_at_step: int | None) -> int:
    from pretrain.checkpoint.restore import restore  # DeepSpeed chooses its accelerator when it is imported
    from pretrain.checkpoint.save import save
    from pretrain.engine import Engine
    from pretrain.evaluation.hooks import run_hooks
    from pretrain.micro_batch import settled

    config = setup.config
    model = construct(setup)
    meter = Meter.of(setup, model)
    engine = Engine(model, config, setup.cut)
    if setup.resume:
        restore(engine, setup.resume)
    setup = settled(setup, engine)
    journal.announce(model.num_parameters(), setup.cut)
    batches = TrainingBatches(setup.stream, setup.cut, setup.progress)
    deadline = time.monotonic() + config.run.max_hours * 3600 if config.run.max_hours else float("inf")

    first = step = setup.first_step
    stopping = False
    steps = on_device(
        batches.loader(config.run.max_steps - first, config.data.workers, config.data.prefetch), engine.device
    )
    meter.restart()
    for waited, step_batches in _timed(steps):
        stop = step + 1 == stop_at_step or time.monotonic() > deadline or status.stop_requested(setup.directory)
        stopping = engine.step(step, step_batches, stop)
        step += 1
        meter.step(waited)
        last = step == config.run.max_steps
        if step % config.tracking.log_every_steps == 0 or last or stopping:
            journal.log(step, {**engine.take_metrics(), **meter.take()})
        if metrics := run_hooks(engine, setup, step, last):
            journal.log(step, metrics)
            meter.restart()
        if step % config.checkpoint.every_steps == 0 or last or stopping:
            progress = Progress.at(setup.stream, batches.position(step - first), batches.skipped)
            journal.saved(save(engine, setup, step, progress))
            meter.restart()
        if stopping:
            break
    engine.close()
    finished = step == config.run.max_steps
    journal.finish(step, finished)
    return 0 if finished else STOPPED


def _timed(steps: Iterable[list[Batch]]) -> Iterator[tuple[float, list[Batch]]]:
    """Each item with the seconds it was waited for."""
    started = time.perf_counter()
    for item in steps:
        yield time.perf_counter() - started, item
        started = time.perf_counter()
