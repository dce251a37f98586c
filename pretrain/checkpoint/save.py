"""Saving a run: named fragments of fp32 parameters and optimizer state, safetensors and JSON.

Each rank writes what it owns, by parameter name and offset: `rank-00000.safetensors` with a tensor "STATE/NAME" for
each fragment (STATE is "parameter" or the optimizer's own name for it, as "exp_avg"), and `rank-00000.json` with where
the fragments belong. What an optimizer keeps of a parameter in another shape, as means of rows, is written whole by the
rank that has the parameter's first element. Nothing is pickled. A checkpoint appears under its name when every rank's
files are on disk.
"""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from safetensors.torch import save_file
from torch import Tensor

from data_pipeline import tokenizer
from data_pipeline.atomic import fingerprint, flush, sha256
from data_pipeline.errors import FailedError
from data_pipeline.loading.stream import Progress, Skipped
from data_pipeline.safetensors_file import os_errors
from pretrain.checkpoint import CONFIG, rank_file
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.index import Index, directory_of
from pretrain.checkpoint.tensors import PARAMETER
from pretrain.engine import Engine
from pretrain.optimizers import factored_state
from pretrain.optimizers.fragments import fragments, optimizer_state
from pretrain.setup import Setup


def save(engine: Engine, setup: Setup, step: int, progress: Progress) -> Path:
    """Writes the checkpoint of `step` steps done; all ranks call it together. Raises FailedError on all if one does."""
    rank, run = setup.cut.rank, setup.directory
    final = directory_of(run, step)
    temporary = final.with_name(f".{final.name}.tmp")
    progress = replace(progress, skipped=_union(progress.skipped))
    error = None
    if rank == 0:
        error = _attempt(lambda: _begin(temporary, setup))
    _agree(error, final)
    error = _attempt(lambda: _write_rank(temporary, rank, engine.deepspeed))
    _agree(error, final)
    if rank == 0:
        error = _attempt(lambda: _complete(temporary, final, setup, step, progress))
    _agree(error, final)
    return final


def _begin(temporary: Path, setup: Setup) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    tokenizer.save(setup.training[0].tokenizer, temporary)
    shutil.copyfile(setup.directory / CONFIG, temporary / CONFIG)


def _write_rank(directory: Path, rank: int, engine: DeepSpeedEngine) -> None:
    state, factored = optimizer_state(engine), factored_state(engine)
    tensors: dict[str, Tensor] = {}
    table: dict[str, Any] = {"fragments": {}}
    for fragment in fragments(engine):
        slots = state.get(fragment.flat, {})
        elementwise = [name for name, value in slots.items() if value.dim()]
        whole = factored.get(fragment.name, {}) if fragment.start == 0 else {}
        table["fragments"][fragment.name] = {
            "start": fragment.start,
            "size": fragment.size,
            "shape": fragment.shape,
            "scalars": {name: float(value) for name, value in slots.items() if not value.dim()},
            "states": elementwise,
            "whole": list(whole),
        }
        tensors[f"{PARAMETER}/{fragment.name}"] = fragment.of(fragment.flat.data).cpu()
        for name in elementwise:
            tensors[f"{name}/{fragment.name}"] = fragment.of(slots[name]).cpu()
        for name, value in whole.items():
            tensors[f"{name}/{fragment.name}"] = value.cpu()
    path = directory / f"{rank_file(rank)}.safetensors"
    with os_errors():
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    path.with_suffix(".json").write_text(json.dumps(table))


def _complete(temporary: Path, final: Path, setup: Setup, step: int, progress: Progress) -> None:
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    for path in files:
        flush(path)
    index = Index(
        step=step,
        position=progress.position,
        consumed=progress.consumed,
        skipped=[asdict(one) for one in progress.skipped],
        config_fingerprint=fingerprint(setup.config.model_dump()),
        identity=setup.identity,
        world_size=setup.cut.ranks,
        zero_stage=setup.config.zero_stage,
        files={
            str(path.relative_to(temporary)): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files
        },
    )
    (temporary / checkpoint_index.INDEX).write_text(index.as_json())
    flush(temporary / checkpoint_index.INDEX)
    shutil.rmtree(final, ignore_errors=True)  # only what a former attempt wrote of the same step
    temporary.rename(final)
    flush(final.parent)
    checkpoint_index.set_latest(setup.directory, step)
    _retain(setup)


def _union(skipped: list[Skipped]) -> list[Skipped]:
    """What any rank has skipped: each meets only the damage in its own share of the rows."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, skipped)
    by_place = {(one.corpus, one.shard, one.offset): one for rank in of_ranks for one in rank}
    return [by_place[place] for place in sorted(by_place)]


def _retain(setup: Setup) -> None:
    settings = setup.config.checkpoint
    steps = checkpoint_index.all_steps(setup.directory)
    for step in steps[: -settings.keep_last]:
        if not settings.keep_every_steps or step % settings.keep_every_steps:
            shutil.rmtree(directory_of(setup.directory, step))


def _attempt(write: Any) -> OSError | None:
    try:
        write()
        return None
    except OSError as error:
        return error


def _agree(error: OSError | None, final: Path) -> None:
    """Raises on every rank if any rank has an error: nobody waits for a rank that gave up."""
    failed = torch.tensor([int(error is not None)], device=_communication_device())
    dist.all_reduce(failed)
    if int(failed):
        why = error.strerror if error is not None else "another rank failed"
        raise FailedError(f"{final}: can't be saved: {why}; the checkpoint before it is untouched")


def _communication_device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
