"""Averages of weights: over several checkpoints, or over the steps of a run (`optimizer.ema_decay`).

Izmailov et al. 2018; T5Gemma 2's authors average their last five checkpoints.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from data_pipeline import tokenizer as tokenizers
from data_pipeline.foundation.errors import UserError
from data_pipeline.loading.stream import differences
from pretrain.checkpoint import CONFIG, initial
from pretrain.checkpoint.buffers import BUFFERS, read_buffers
from pretrain.checkpoint.directory import candidates
from pretrain.checkpoint.tensors import PARAMETER, StoredTensors
from pretrain.optimizers.ema import AVERAGE

AVERAGE_OF = "average_of"  # in the identity of the checkpoint: what it is the mean of


def last_checkpoints(run: Path, number: int) -> list[Path]:
    """The newest `number` checkpoints of a run, oldest first. Raises UserError if it has fewer."""
    found = candidates(run)[0][:number]
    if len(found) < number:
        raise UserError(
            f"{run}: --last {number}, but the run has {len(found)} checkpoints; checkpoint.keep_last keeps more of them"
        )
    return found[::-1]


def _identity(stored: StoredTensors) -> dict[str, object]:
    """The facts that weights of one model have in common."""
    model = stored.index.model
    return {
        **{f"model.{name}": value for name, value in model.architecture().items()},
        "tokenizer": stored.index.identity.get("tokenizer_sha256"),
    }


def average(checkpoints: Sequence[Path], out: Path, ema: bool = False) -> int:
    """Writes the checkpoint `out` with the mean of the weights of `checkpoints`; returns the number of parameters.

    It has weights only; its step and data are those of the last of `checkpoints`. `ema`: takes the moving averages
    of the checkpoints instead of their weights. Means are computed in fp64 and kept in fp32. Raises UserError if the
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
    initial.save_weights(origin.model, means | buffers, tokenizer, out, origin, run_file if run_file.exists() else None)
    return sum(mean.numel() for mean in means.values())
