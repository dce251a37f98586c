"""Training: build everything, loop, done."""

import math
import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

import deepspeed
from omegaconf import OmegaConf

from data_pipeline.atomic import write_bytes, write_json
from data_pipeline.command import STOPPED
from data_pipeline.errors import UserError
from data_pipeline.loading.batches import Batch, TrainingBatches
from pretrain import environment, models, status
from pretrain.checkpoint import CONFIG
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.restore import restore
from pretrain.checkpoint.save import save
from pretrain.checkpoint.tensors import load_weights
from pretrain.config import RunConfig
from pretrain.engine import Engine, quiet_deepspeed
from pretrain.evaluation.hooks import run_hooks
from pretrain.evaluation.validation_loss import METRICS as VALIDATION_METRICS
from pretrain.setup import Setup, prepare
from pretrain.throughput import Meter, flops_per_row, peak_flops, threads_per_rank
from pretrain.tracking import DatasetInfo, Tracker


def train(config: RunConfig, stop_at_step: int | None = None) -> int:
    """Trains, or goes on where the run directory stands; returns the exit code: 0 finished, 75 stopped after saving."""
    rank, ranks = _join()
    try:
        return _train(prepare(config, rank, ranks), stop_at_step)
    except UserError as error:
        if rank == 0:
            raise
        raise SystemExit(error.exit_code) from None  # rank 0 says it
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _train(setup: Setup, stop_at_step: int | None) -> int:
    config, run = setup.config, setup.directory
    first = checkpoint_index.read(setup.resume).step if setup.resume else 0
    leader = setup.cut.rank == 0
    if first >= config.run.max_steps:
        if leader:
            print(
                f"{run} is finished: {first} of {config.run.max_steps} steps. Next: pretrain export {setup.resume} OUT"
            )
        return 0
    attempt = _open_run(setup) if leader else 0
    dist.barrier()

    torch.manual_seed(config.run.seed)
    model = models.build(setup.model)
    if setup.resume:
        load_weights(model, setup.resume)
    flops = flops_per_row(setup.model, model, *_lengths(setup)) * config.batch.global_batch_size
    if leader:
        _announce(setup, model.num_parameters(), first)
    engine = Engine(model, config, setup.cut)
    if setup.resume:
        restore(engine, setup.resume)
    weights = [entry.weight for entry in config.data.train]
    batches = TrainingBatches(
        setup.training, weights, setup.cut, config.run.seed, config.data.lanes, config.data.objective
    )
    tracker = _tracker(setup, attempt) if leader else None
    meter = Meter(
        sum(_lengths(setup)) * config.batch.global_batch_size, flops, peak_flops(config.precision) * setup.cut.ranks
    )
    deadline = time.monotonic() + config.run.max_hours * 3600 if config.run.max_hours else float("inf")

    stopped = False
    done = first
    try:
        for waited, step_batches in _timed(batches.loader(first, config.run.max_steps, config.data.workers)):
            stop = (run / status.STOP).exists() or time.monotonic() > deadline or done + 1 == stop_at_step
            stopped = engine.step(done, step_batches, stop)
            done += 1
            last = done == config.run.max_steps
            meter.step(waited)
            if done % config.tracking.log_every_steps == 0 or last or stopped:
                metrics = {
                    "train/loss": engine.take_loss(),
                    "train/learning_rate": engine.learning_rate,
                    "train/gradient_norm": engine.gradient_norm,
                    "train/skipped_steps": engine.skipped_steps,
                    **meter.take(),
                }
                if tracker:
                    tracker.log(done, metrics)
                    _print_metrics(done, config.run.max_steps, metrics)
            if validation := run_hooks(engine, setup, done, last):
                if tracker:
                    tracker.log(done, validation)
                    _print_validation(setup, done, validation)
                meter.restart()
            if done % config.checkpoint.every_steps == 0 or last or stopped:
                saved = save(engine, setup, done, batches.consumed(done))
                if leader:
                    print(f"saved {saved}", flush=True)
                meter.restart()
            if stopped:
                break
    except BaseException:
        if tracker:
            tracker.close("FAILED")
        raise
    stopped = stopped and done < config.run.max_steps
    if leader:
        _leave(setup, tracker, done, stopped)
    dist.barrier()
    engine.close()
    return STOPPED if stopped else 0


def _join() -> tuple[int, int]:
    """(rank, ranks) of this process; without a launcher it is a run of its own."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")
    quiet_deepspeed()
    if not torch.cuda.is_available():
        torch.set_num_threads(threads_per_rank(int(os.environ.get("LOCAL_SIZE", "1"))))
    deepspeed.init_distributed()
    return dist.get_rank(), dist.get_world_size()


def _open_run(setup: Setup) -> int:
    """Rank 0 makes the run directory ready; returns the number of this attempt."""
    run = setup.directory
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run.directory: {run} can't be made: {error.strerror}") from None
    (run / status.STOP).unlink(missing_ok=True)  # asked of an attempt that is over
    resolved = OmegaConf.to_yaml(OmegaConf.create(setup.config.model_dump(mode="json")))
    config = run / CONFIG
    attempt = status.read(run).attempt + 1
    if config.exists() and config.read_text() != resolved:
        config.rename(run / f"config.before-attempt-{attempt}.yaml")
    write_bytes(config, resolved.encode())
    write_json(run / "environment.json", environment.describe(setup.cut.ranks))
    status.write(run, status.Status("running", attempt))
    return attempt


def _leave(setup: Setup, tracker: Tracker | None, done: int, stopped: bool) -> None:
    if tracker:
        tracker.close("KILLED" if stopped else "FINISHED")
    run = setup.directory
    (run / status.STOP).unlink(missing_ok=True)
    status.write(run, status.Status("stopped" if stopped else "finished", status.read(run).attempt, done))
    if stopped:
        print(f"stopped on request after step {done}; the same command goes on from there", flush=True)
    else:
        directory = checkpoint_index.directory_of(run, done)
        print(f"finished {done} steps. Next: pretrain export {directory} OUT", flush=True)


def _tracker(setup: Setup, attempt: int) -> Tracker:
    config, run = setup.config, setup.directory
    mlflow = config.tracking.mlflow
    contexts = [("train", corpus) for corpus in setup.training] + [
        ("validation", corpus) for corpus in setup.validation
    ]
    return Tracker(
        run,
        attempt=attempt,
        run_name=config.run.name,
        uri=mlflow.uri if mlflow else None,
        experiment=mlflow.experiment if mlflow else "",
        parameters=config.model_dump(mode="json"),
        tags={
            "git_commit": environment.git_commit(),
            "ranks": setup.cut.ranks,
            "zero_stage": config.zero_stage,
            "precision": config.precision,
        },
        datasets=[
            DatasetInfo(
                name=corpus.name,
                digest=corpus.fingerprint,
                source=str(corpus.directory / "manifest.json"),
                context=context,
                profile={key: corpus.manifest["splits"][context][key] for key in ("rows", "tokens", "documents")},
            )
            for context, corpus in contexts
        ],
        artifacts=[run / CONFIG, run / "environment.json"],
    )


def _lengths(setup: Setup) -> tuple[int, int]:
    objective = setup.config.data.objective or setup.training[0].objective
    return objective.inputs_length, objective.targets_length


def _timed(steps: Iterator[list[Batch]]) -> Iterator[tuple[float, list[Batch]]]:
    """Each item with the seconds it was waited for."""
    started = time.perf_counter()
    for item in steps:
        yield time.perf_counter() - started, item
        started = time.perf_counter()


def _announce(setup: Setup, parameters: int, first: int) -> None:
    config, cut = setup.config, setup.cut
    print(
        f"{config.run.name}: {parameters:,} parameters, {config.precision}, ZeRO-{config.zero_stage}, "
        f"{cut.ranks} ranks × {cut.accumulation} × {cut.micro_batch} rows, steps {first} to {config.run.max_steps}",
        flush=True,
    )


def _print_metrics(step: int, steps: int, metrics: dict[str, float]) -> None:
    left = (steps - step) / metrics["train/steps_per_second"]
    print(
        f"step {step}/{steps}  loss {metrics['train/loss']:.4f}  lr {metrics['train/learning_rate']:.2e}  "
        f"norm {metrics['train/gradient_norm']:.3f}  {metrics['train/tokens_per_second']:,.0f} tokens/s  "
        f"{left:.0f} s left",
        flush=True,
    )


def _print_validation(setup: Setup, step: int, metrics: dict[str, float]) -> None:
    for corpus in setup.validation:
        loss, text, entropy = (metrics[f"validation/{corpus.name}/{name}"] for name in VALIDATION_METRICS)
        uniform = math.log(corpus.tokenizer.pieces)
        print(
            f"step {step}  validation on {corpus.name}: loss {loss:.4f}; on text tokens alone {text:.4f} "
            f"(word counts alone give {entropy:.4f}, ln(vocabulary) is {uniform:.4f})",
            flush=True,
        )
