"""Restores a run from a checkpoint, whatever ZeRO stage and number of ranks wrote it."""

from pathlib import Path

import torch

from pretrain.checkpoint.buffers import load_buffers
from pretrain.checkpoint.tensors import PARAMETER, StoredTensors
from pretrain.run import watchdog
from pretrain.zero.deepspeed_private import in_memory, optimizer_state, update_parameters
from pretrain.zero.engine import Engine
from pretrain.zero.optimizer import set_factored_state


def restore(engine: Engine, directory: Path) -> None:
    """Loads a checkpoint's parameters and optimizer state into an engine. All ranks call it together.

    Each rank reads what it owns. The files must have been verified before.
    """
    stored = StoredTensors(directory)
    state = optimizer_state(engine.deepspeed)
    with stored.kept_open():
        for fragment in (fragment for owned in in_memory(engine.deepspeed) for fragment in owned):
            watchdog.alive()
            elements = (fragment.name, fragment.start, fragment.size)
            fragment.view(fragment.buffer.data).copy_(stored.read(PARAMETER, *elements))
            slots = state.setdefault(fragment.buffer, {})
            for name, value in stored.scalars(fragment.name).items():
                slots[name] = torch.tensor(value, dtype=torch.float32, device=fragment.buffer.device)
            for name in stored.states(fragment.name):
                if name not in slots:
                    slots[name] = torch.zeros_like(fragment.buffer.data)
                fragment.view(slots[name]).copy_(stored.read(name, *elements))
    set_factored_state(engine.deepspeed, stored.factored_state())
    update_parameters(engine.deepspeed)
    load_buffers(engine.deepspeed.module, directory)
