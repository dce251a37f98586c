"""Loads the model of a checkpoint into a single process, saves weights as a checkpoint, and averages checkpoints.

A run can start from a checkpoint of weights, and `evaluate`, `export` and `generate` can read it.
"""

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml
from torch import Tensor

from data_pipeline.base.atomic import new_directory
from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus import tokenizer as tokenizers
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.loading.stream import differences
from pretrain import models
from pretrain.config import RunConfig
from pretrain.engine.checkpoint import BUFFERS, CONFIG, rank_file
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.directory import candidates
from pretrain.engine.checkpoint.index import Index, SavedFragment, write_index, write_table
from pretrain.engine.checkpoint.tensors import (
    PARAMETER,
    StoredTensors,
    load_weights,
    model_buffers,
    read_buffers,
    verify_together,
    write_buffers,
    write_weights,
)
from pretrain.engine.optimizers import AVERAGE
from pretrain.hardware import device_type
from pretrain.models import ModelConfig
from pretrain.models.layers import SkipInit
from pretrain.models.model import Model
from pretrain.run.train_state import TrainState

MODEL = "model.yaml"
AVERAGE_OF = "average_of"  # key in the identity of an averaged checkpoint: the checkpoints it is the mean of


@dataclass(frozen=True)
class TrainedModel:
    """A model, in fp32 and evaluation mode, and its tokenizer.

    Attributes:
        objective: the name of the objective that the model was trained on, which decides what its inputs begin and end
            with; None: unknown.
    """

    model: Model
    tokenizer: Tokenizer
    objective: str | None = None

    @classmethod
    def open(cls, directory: Path, together: bool = False) -> "TrainedModel":
        """Loads a checkpoint. Raises UserError if `directory` isn't one, FailedError if it is damaged.

        `together`: all ranks of a process group open it at the same time, and each verifies its share.
        """
        index = checkpoint_index.read(directory)
        config = index.model
        if together:
            verify_together(directory, config)
        else:
            StoredTensors(directory).verify()
        with SkipInit():
            model = models.build(config)
        load_weights(model, directory)
        return cls(model.eval(), tokenizers.load(directory), objective_of(directory, index))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def on_best_device(self) -> "TrainedModel":
        """The same model, moved to a GPU if there is one."""
        return replace(self, model=self.model.to(device_type()))


def config_of_run(checkpoint: Path) -> RunConfig | None:
    """The config of the run that saved `checkpoint`, with MLflow off, since the password of its URI isn't recorded.
    None: the checkpoint has no config. Raises UserError for a config that isn't valid any more."""
    path = checkpoint / CONFIG
    return load(path, ["tracking.mlflow=null"], RunConfig) if path.exists() else None


def objective_of(directory: Path, index: Index) -> str | None:
    """The kind of batches that the run of the checkpoint in `directory` trains on: an objective's name; None: unknown.

    Checkpoints of earlier versions lack the name. Their run file has the name, or the first corpus that is still the
    same.
    """
    if index.objective is not None:
        return index.objective
    data, path = index.identity.get("data", {}), directory / CONFIG
    if objective := data.get("objective"):
        return str(objective["name"])
    if not path.exists():
        return None
    fingerprints = {one["corpus"] for one in data.get("train", [])}
    for entry in yaml.safe_load(path.read_text(encoding="utf-8"))["data"]["train"]:
        if "://" in entry["corpus"] and not models.FAMILIES[index.model.family].inputs_begin_with_bos:
            continue  # nothing depends on the objective that would be worth waiting for a store
        with contextlib.suppress(UserError):
            if (corpus := open_corpus(entry["corpus"])).fingerprint in fingerprints:
                return corpus.objective.kind_of_batches
    return None


def save_weights(
    config: ModelConfig,
    state: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    out: Path,
    origin: Index | None = None,
    run_file: Path | None = None,
) -> None:
    """Writes the checkpoint `out`, which must not exist or must be empty. It appears only when it is complete.

    `state`: the model's `state_dict()`; the checkpoint keeps its parameters and buffers. The file MODEL in the
    checkpoint is the `model:` section of a run file; run files may extend it. MODEL has every key of the architecture,
    null too, so that a file merged before leaves none of its own. It has a key of training or of random weights if the
    value isn't the default. `origin`: the index of a checkpoint whose
    step and data the new checkpoint takes over; None: step 0. `run_file`: the run file to copy.
    """
    progress = origin.train_state if origin else TrainState.new()
    model = models.meta_model(config)
    names = [name for name, _ in model.named_parameters()]
    with new_directory(out) as partial:
        tokenizers.save(tokenizer, partial)
        others = config.model_dump(include={*config.training_only, *config.initial_only}, exclude_defaults=True)
        settings = {"family": config.family, **config.architecture(), **others}
        (partial / MODEL).write_text(yaml.safe_dump({"model": settings}, sort_keys=False), encoding="utf-8")
        parameters = {f"{PARAMETER}/{name}": state[name] for name in names}
        write_weights(parameters, partial / f"{rank_file(0)}.safetensors")
        fragments = {name: SavedFragment(0, state[name].numel(), list(state[name].shape)) for name in names}
        write_table(partial, 0, fragments)
        write_buffers({name: state[name] for name in model_buffers(model) if name in state}, partial)
        if run_file is not None:
            shutil.copyfile(run_file, partial / CONFIG)
        write_index(
            partial,
            {},
            train_state=TrainState(progress.step, progress.position, progress.skipped),
            consumed=origin.consumed if origin else [],
            config_fingerprint=origin.config_fingerprint if origin else "",
            identity={
                **(origin.identity if origin else {}),
                "model": config.model_dump(),
                "tokenizer_sha256": tokenizer.sha256,
            },
            world_size=1,
            zero_stage=0,
            objective=origin.objective if origin else None,
        )


def last_checkpoints(run: Path, number: int) -> list[Path]:
    """The newest `number` checkpoints of a run, oldest first. Raises UserError if it has fewer."""
    found = candidates(run)[0][:number]
    if len(found) < number:
        raise UserError(
            f"{run}: --last {number}, but the run has {len(found)} checkpoints; checkpoint.keep_last keeps more of them"
        )
    return found[::-1]


def _identity(stored: StoredTensors) -> dict[str, object]:
    """The facts that checkpoints must have in common to be averaged."""
    model = stored.index.model
    return {
        **{f"model.{name}": value for name, value in model.architecture().items()},
        "tokenizer": stored.index.identity.get("tokenizer_sha256"),
    }


def average(checkpoints: Sequence[Path], out: Path, ema: bool = False) -> int:
    """Writes the checkpoint `out` with the mean of the weights of `checkpoints`. Returns the number of parameters.

    `out` has weights only, with the step and data of the last of `checkpoints`. `ema`: averages the moving
    averages of the checkpoints instead of their weights. Means are computed in fp64 and kept in fp32.

    Izmailov et al. 2018; T5Gemma 2's authors average their last five checkpoints. Raises UserError if the
    checkpoints are of different models, FailedError if one is damaged.
    """
    stored = [StoredTensors(directory) for directory in checkpoints]
    first, last = stored[0], stored[-1]
    for one in stored[1:]:
        if found := differences(_identity(first), _identity(one)):
            raise UserError(f"{one.directory}: not of the same model as {first.directory}: {'; '.join(found)}")
    state = AVERAGE if ema else PARAMETER
    buffers = read_buffers(last.directory)
    for one in stored:
        other = read_buffers(one.directory)
        if other.keys() != buffers.keys() or any(not torch.equal(other[name], buffers[name]) for name in buffers):
            raise UserError(f"{one.directory}: its {BUFFERS} differs from that of {last.directory}")
        if ema and not all(AVERAGE in one.states(name) for name in one.shapes):
            raise UserError(f"{one.directory}: has no moving average; optimizer.ema_decay keeps one")
        one.verify()
    means = {
        name: torch.stack([one.whole(state, name).double() for one in stored]).mean(dim=0).float()
        for name in first.shapes
    }
    steps = [one.index.step for one in stored]
    average_of = f"the {'moving averages' if ema else 'weights'} after steps {', '.join(map(str, steps))}"
    origin = replace(last.index, identity={**last.index.identity, AVERAGE_OF: average_of})
    run_file = last.directory / CONFIG
    tokenizer = tokenizers.load(last.directory)
    save_weights(origin.model, means | buffers, tokenizer, out, origin, run_file if run_file.exists() else None)
    return sum(mean.numel() for mean in means.values())
