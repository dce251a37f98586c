"""Restoring a run from a checkpoint."""

from pathlib import Path

import torch

from pretrain.checkpoint.tensors import PARAMETER, StoredTensors
from pretrain.engine import Engine
from pretrain.optimizers import set_factored_state
from pretrain.optimizers.fragments import fragments, optimizer_state


def restore(engine: Engine, directory: Path) -> None:
    """Puts fp32 parameters and optimizer state into an engine whose model already has the checkpoint's weights."""
    stored = StoredTensors(directory)
    owned = fragments(engine.deepspeed)
    state = optimizer_state(engine.deepspeed)
    for fragment in owned:
        fragment.of(fragment.flat.data).copy_(stored.read(PARAMETER, fragment.name, fragment.start, fragment.size))
        slots = state.setdefault(fragment.flat, {})
        for name, value in stored.scalars(fragment.name).items():
            slots[name] = torch.tensor(value, dtype=torch.float32, device=fragment.flat.device)
        for name in stored.states(fragment.name):
            if name not in slots:
                slots[name] = torch.zeros_like(fragment.flat.data)
            fragment.of(slots[name]).copy_(stored.read(name, fragment.name, fragment.start, fragment.size))
    set_factored_state(engine.deepspeed, stored.factored_state())
