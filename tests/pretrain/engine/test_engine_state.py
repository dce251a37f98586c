"""The copy of an engine's state that a checkpoint is written from, and what is restored of a checkpoint."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.run.train_state import TrainState
from tests.support.rank_processes import on_ranks
from tests.support.small_runs import T5, engine_of, micro_batches, own_layout, row_offsets, run_config

ADAFACTOR = {"name": "adafactor", "learning_rate": 1e-2, "min_dim_size_to_factor": 16}


def take_steps(engine: Any, first: int, last: int) -> None:
    for step in range(first, last):
        engine.step(step, row_offsets(own_layout(), step), micro_batches(own_layout(), step))


def copied(engine: Any) -> dict[str, Tensor]:
    """The tensors of the engine's state, by "STATE/NAME"."""
    from pretrain.engine.checkpoint.engine_state import PinnedStaging

    copy = PinnedStaging(engine).take()
    copy.finish()
    return copy.tensors


def save(engine: Any, directory: Path) -> None:
    """Writes the engine's state as a checkpoint."""
    from pretrain.engine.checkpoint.engine_state import PinnedStaging
    from pretrain.engine.checkpoint.index import write_index
    from pretrain.engine.checkpoint.tensors import write_part

    copy = PinnedStaging(engine).take()
    copy.finish()
    directory.mkdir()
    described = write_part(directory, 0, copy.image, copy.fragments, lambda: None)
    write_index(
        directory,
        described,
        train_state=TrainState(1, 8, []),
        consumed=[8],
        config_fingerprint="0" * 64,
        identity={"model": T5},
        world_size=1,
        zero_stage=1,
    )


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    """The kinds of states with a tensor that differs: parameter, and the optimizer's."""
    assert one.keys() == other.keys()
    return {name.split("/")[0] for name in one if not torch.equal(one[name], other[name])}


def restored(directory: Path) -> list[set[str]]:
    """What differs from a checkpoint after further steps, after its weights are restored, and after all of it is."""
    from pretrain.engine.checkpoint.engine_state import restore

    engine = engine_of(run_config(1, optimizer=ADAFACTOR))
    take_steps(engine, 0, 1)
    save(engine, directory)
    saved, found = copied(engine), []
    take_steps(engine, 1, 3)
    for weights_only in (None, True, False):
        if weights_only is not None:
            restore(engine, directory, weights_only)
        found.append(differing(copied(engine), saved))
    engine.close()
    return found


def test_weights_alone_or_all_of_a_checkpoint_are_restored(tmp_path):
    """Adafactor has elementwise moments of norms, and factored ones of matrices."""
    states = {"exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col"}
    assert on_ranks(1, restored, tmp_path / "checkpoint") == [[{"parameter"} | states, states, set()]]


def restored_to_before_the_first_step(directory: Path) -> list[tuple[set[str], bool]]:
    """For each optimizer: what differs from a checkpoint of before its first step once that is restored, at once and
    after steps; and whether the first step is then taken again to the bit."""
    from pretrain.engine.checkpoint.engine_state import restore

    found = []
    for name, optimizer in BEFORE_STEPS.items():
        engine = engine_of(run_config(1, optimizer={"name": name, "learning_rate": 1e-2, **optimizer}))
        save(engine, directory / name)
        saved = copied(engine)
        restore(engine, directory / name)
        take_steps(engine, 0, 1)
        first = copied(engine)
        take_steps(engine, 1, 3)
        restore(engine, directory / name)
        differs = differing(copied(engine), saved)
        take_steps(engine, 0, 1)
        found.append((differs, not differing(copied(engine), first)))
        engine.close()
    return found


BEFORE_STEPS: dict[str, dict[str, Any]] = {
    "adafactor": {"min_dim_size_to_factor": 16},
    "adamw": {},
    "adamw_scale": {"ema_decay": 0.9},
    "muon": {"newton_schulz_dtype": "fp32"},
}


def test_a_checkpoint_of_before_the_first_applied_step_is_restored(tmp_path):
    """Such a checkpoint has no moments."""
    assert on_ranks(1, restored_to_before_the_first_step, tmp_path) == [[(set(), True)] * len(BEFORE_STEPS)]


def sizes_and_fingerprint() -> tuple[int, int, str, str]:
    """(bytes of a copy, those that were estimated, fingerprint of the weights, the same by its definition)."""
    from pretrain.engine.checkpoint.engine_state import copy_bytes, fingerprint_of_masters

    engine = engine_of(run_config(1))
    take_steps(engine, 0, 1)
    tensors, sums = copied(engine), []
    for name, _ in engine.module.named_parameters():
        bits = tensors[f"parameter/{name}"].numpy().view(np.int32).astype(np.int64)
        sums += [bits.sum(), (bits * np.arange(1, len(bits) + 1)).sum()]  # modulo 2**64
    expected = hashlib.blake2b(np.array(sums).tobytes(), digest_size=16).hexdigest()
    found = copy_bytes(engine), fingerprint_of_masters(engine)
    engine.close()
    return sum(tensor.nbytes for tensor in tensors.values()), found[0], found[1], expected


def test_a_copy_takes_the_bytes_that_are_said_and_weights_have_the_fingerprint_of_its_definition():
    """A fingerprint is in each checkpoint, so that another definition would refuse the checkpoints of before."""
    ((taken, said, fingerprint, expected),) = on_ranks(1, sizes_and_fingerprint)
    assert said == taken
    assert fingerprint == expected
    assert len(fingerprint) == 32
