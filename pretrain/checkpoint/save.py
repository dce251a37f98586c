"""Saving a run: named fragments of fp32 parameters and optimizer state, safetensors and JSON.

Each rank writes what it owns, by parameter name and offset: `rank-00000.safetensors` with a tensor "STATE/NAME" for
each fragment (STATE is "parameter" or the optimizer's own name for it, as "exp_avg"), and then `rank-00000.json` with
where the fragments belong. What an optimizer keeps of a parameter in another shape, as means of rows, is written whole
by the rank that has the parameter's first element. Nothing is pickled. A checkpoint appears under its name when every
rank's files are on disk.

Training waits only until its state is copied. A thread of each rank writes the copy; that of rank 0 sees by the others'
.json files that they are done. Ranks tell one another of a failure where they meet anyway, between two steps.
"""

import json
import shutil
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from data_pipeline import tokenizer
from data_pipeline.atomic import TEMPORARY_SUFFIX, atomic_path, fingerprint, flush, sha256
from data_pipeline.errors import FailedError
from data_pipeline.loading.stream import Skipped
from data_pipeline.safetensors_file import os_errors
from pretrain.checkpoint import CONFIG, rank_file
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.index import Index, directory_of
from pretrain.checkpoint.tensors import PARAMETER
from pretrain.engine import Engine
from pretrain.optimizers import factored_state
from pretrain.optimizers.fragments import in_memory, optimizer_state
from pretrain.ranks import of_rank_0
from pretrain.setup import Setup
from pretrain.standing import Standing

_SECONDS_BETWEEN_LOOKS = 0.02


@dataclass(frozen=True)
class Saved:
    """A checkpoint of `step`: `stall_seconds` training waited for it, `write_seconds` it took to be on disk.

    `gigabytes`: of all ranks. `error`: why it isn't there; the one before it is untouched.
    """

    directory: Path
    step: int
    stall_seconds: float
    write_seconds: float
    gigabytes: float = 0.0
    error: str | None = None


class Saver:
    """Saves a run beside its training, one checkpoint at a time; all ranks make one and call it together."""

    def __init__(self, engine: Engine, setup: Setup):
        self._engine, self._setup = engine, setup
        self._token, self._number = of_rank_0(uuid.uuid4().hex[:8]), 0
        self._writing: _Writing | None = None

    @property
    def failed(self) -> bool:
        """Whether the checkpoint that is being saved has failed on this rank; `wait` then makes an end of it."""
        return self._writing is not None and self._writing.error is not None

    def start(self, standing: Standing) -> Saved | None:
        """Copies the state of the run and begins to write it; returns what became of the checkpoint before."""
        before = self.wait()
        started = time.perf_counter()
        self._number += 1
        final = directory_of(self._setup.directory, standing.step)
        temporary = final.with_name(f".{final.name}.{self._token}-{self._number}{TEMPORARY_SUFFIX}")
        standing = replace(standing, skipped=_union(standing.skipped))
        tensors, table = _copy(self._engine)
        self._writing = _Writing(self._setup, standing, temporary, final, tensors, table)
        self._writing.stall_seconds = time.perf_counter() - started
        self._writing.start()
        return before

    def done(self) -> Saved | None:
        """The checkpoint that was being saved, once it is there: told once, on rank 0, whose thread completes it."""
        writing = self._writing
        if writing is None or self._setup.cut.rank or writing.is_alive() or writing.error is not None:
            return None
        return self._end(failed=False)

    def wait(self) -> Saved | None:
        """Waits until the checkpoint being saved is there, or has failed; what became of it, on every rank.

        None where there is none, or where `done` has told it.
        """
        writing = self._writing
        if writing is not None:
            writing.written.wait()
        if self._any(self.failed) and writing is not None:
            writing.given_up.set()
        if writing is not None:
            writing.join()
        failed = self._any(self.failed)
        return self._end(failed) if writing is not None else None

    def _end(self, failed: bool) -> Saved:
        writing, self._writing = self._writing, None
        assert writing is not None
        error = (writing.error or "another rank failed") if failed else None
        return Saved(
            writing.final,
            writing.standing.step,
            writing.stall_seconds,
            writing.write_seconds,
            writing.gigabytes,
            error and f"{writing.final}: can't be saved: {error}; the checkpoint before it is untouched",
        )

    def _any(self, condition: bool) -> bool:
        count = torch.tensor([int(condition)], device=self._engine.device)
        dist.all_reduce(count)
        return bool(int(count))


class _Writing(threading.Thread):
    """Writes one checkpoint: this rank's files, and on rank 0 what makes it whole.

    A daemon: a process that ends with an error doesn't wait for it.
    """

    def __init__(
        self,
        setup: Setup,
        standing: Standing,
        temporary: Path,
        final: Path,
        tensors: dict[str, Tensor],
        table: dict[str, Any],
    ):
        super().__init__(name="checkpoint", daemon=True)
        self.setup, self.standing, self.temporary, self.final = setup, standing, temporary, final
        self.error: str | None = None
        self.written, self.given_up = threading.Event(), threading.Event()  # this rank's part; the whole
        self.stall_seconds = self.write_seconds = self.gigabytes = 0.0
        self._tensors, self._table = tensors, table

    def run(self) -> None:
        started = time.perf_counter()
        try:
            self._write_part()
            self.written.set()
            if self.setup.cut.rank == 0:
                self._complete()
        except (OSError, FailedError) as error:
            self.error = (error.strerror if isinstance(error, OSError) else None) or str(error)
        except BaseException as error:
            self.error = repr(error)
            raise
        finally:
            self._tensors.clear()
            self.written.set()
            if self.error is not None:
                shutil.rmtree(self.temporary, ignore_errors=True)
            self.write_seconds = time.perf_counter() - started

    def _write_part(self) -> None:
        self.temporary.mkdir(parents=True, exist_ok=True)
        name = rank_file(self.setup.cut.rank)
        path = self.temporary / f"{name}.safetensors"
        with os_errors():
            save_file(self._tensors, path)
        flush(path)
        self._table["file"] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        self._tensors.clear()
        table = self.temporary / f"{name}.json"
        unnamed = table.with_name(f".{table.name}{TEMPORARY_SUFFIX}")
        unnamed.write_text(json.dumps(self._table))
        flush(unnamed)
        unnamed.replace(table)  # the last touch: rank 0 may rename the whole directory from here on

    def _complete(self) -> None:
        setup, ranks = self.setup, self.setup.cut.ranks
        tokenizer.save(setup.training[0].tokenizer, self.temporary)
        shutil.copyfile(setup.directory / CONFIG, self.temporary / CONFIG)
        files = {}
        for rank in range(ranks):
            table = self.temporary / f"{rank_file(rank)}.json"
            while not table.exists():
                if self.given_up.wait(_SECONDS_BETWEEN_LOOKS):
                    raise FailedError("another rank failed")
            files[f"{rank_file(rank)}.safetensors"] = json.loads(table.read_text())["file"]
        for path in self.temporary.rglob("*"):
            name = str(path.relative_to(self.temporary))
            if path.is_file() and name not in files and not name.endswith(TEMPORARY_SUFFIX):
                flush(path)
                files[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        self.gigabytes = sum(file["bytes"] for file in files.values()) / 1e9
        index = Index(
            step=self.standing.step,
            position=self.standing.position,
            consumed=setup.stream.mixture.consumed(self.standing.position),
            skipped=[asdict(one) for one in self.standing.skipped],
            config_fingerprint=fingerprint(setup.config.model_dump()),
            identity=setup.identity,
            world_size=ranks,
            zero_stage=setup.config.zero_stage,
            files=dict(sorted(files.items())),
            health=asdict(self.standing.health),
        )
        with atomic_path(self.temporary / checkpoint_index.INDEX) as path:
            path.write_text(index.as_json())
        flush(self.temporary)
        replaced = self.temporary.with_name(
            f"{self.temporary.name.removesuffix(TEMPORARY_SUFFIX)}-old{TEMPORARY_SUFFIX}"
        )
        if self.final.exists():  # of an attempt that came as far, and went on from before it
            self.final.rename(replaced)
        self.temporary.rename(self.final)
        flush(self.final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        checkpoint_index.set_latest(setup.directory, self.standing.step)
        _retain(setup, self.standing.step)


def _copy(engine: Engine) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by "STATE/NAME" in host memory, where they belong) of what this rank owns."""
    tensors: dict[str, Tensor] = {}
    table: dict[str, Any] = {"fragments": {}}
    state, factored = optimizer_state(engine.deepspeed), factored_state(engine.deepspeed)
    for fragment in (fragment for owned in in_memory(engine.deepspeed) for fragment in owned):
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
        tensors[f"{PARAMETER}/{fragment.name}"] = _on_host(fragment.of(fragment.flat.data))
        for name in elementwise:
            tensors[f"{name}/{fragment.name}"] = _on_host(fragment.of(slots[name]))
        for name, value in whole.items():
            tensors[f"{name}/{fragment.name}"] = _on_host(value)
    return tensors, table


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _union(skipped: list[Skipped]) -> list[Skipped]:
    """What any rank has skipped: each meets only the damage in its own share of the rows."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, skipped)
    by_place = {(one.corpus, one.shard, one.offset): one for rank in of_ranks for one in rank}
    return [by_place[place] for place in sorted(by_place)]


def _retain(setup: Setup, step: int) -> None:
    """Removes old checkpoints; those after `step` are of an attempt that went on from before it, and will be redone."""
    settings = setup.config.checkpoint
    steps = [done for done in checkpoint_index.all_steps(setup.directory) if done <= step]
    for old in steps[: -settings.keep_last]:
        if not settings.keep_every_steps or old % settings.keep_every_steps:
            shutil.rmtree(directory_of(setup.directory, old))
