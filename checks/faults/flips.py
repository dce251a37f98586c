"""Single bits that flip on one rank of a run: which are found, when, by what, and what is lost.

    python -m checks.faults.flips --each 20 --seed 1 --csv FILE

A small T5 trains for 12 steps on two ranks in bf16 at ZeRO stage 2, with a checkpoint every four steps, and each step
replayed and its memory compared. For each place, EACH runs draw an element, a bit and
a step from the seed, and flip it on rank 1; of a checkpoint, after the run has failed in that step. A run that fails is
started again, as `launch` does. `steps lost` are those that were taken again; `result` compares the losses of all
steps, each as it was last taken, and the last checkpoint's weights with those of the undisturbed run.
"""

import argparse
import csv
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import FailedError
from pretrain.config import RunConfig
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.directory import all_steps, checkpoint_directory
from pretrain.engine.ranks import joined_world
from tests.conftest import run, write_c4, write_corpus_file
from tests.support.rank_processes import each, on_ranks
from tests.support.runs import run_file

COLUMNS = ("place", "number", "step", "element", "bit", "found at step", "by", "steps lost", "result")
FLIPPED = 1  # the rank
STEPS, SAVE_EVERY, MICRO_BATCHES = 12, 4, 2
ON_DISK = "a checkpoint on disk"
BY = {  # what an error or a warning says, and who says it
    "changed between two updates": "checksum before the update",
    "different gradients from the same micro-batch": "replay",
    "other weights than": "comparison at a save",
    "differ from those that the run saved": "comparison at a start",
}


def _flip(values: Tensor, drawn: np.random.Generator) -> tuple[int, int]:
    """Flips a bit of an element of `values` in place; returns both numbers."""
    element, bit = int(drawn.integers(values.numel())), int(drawn.integers(8 * values.element_size()))
    values.view(-1)[element : element + 1].view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return element, bit


def _any_of(tensors: list[Tensor], drawn: np.random.Generator) -> tuple[int, int]:
    sizes = np.array([one.numel() for one in tensors])
    return _flip(tensors[int(drawn.choice(len(tensors), p=sizes / sizes.sum()))], drawn)


def _weights(engine: Any, drawn: np.random.Generator) -> tuple[int, int]:
    return _any_of([one.data for one in engine.module.parameters()], drawn)


def _masters(engine: Any, drawn: np.random.Generator) -> tuple[int, int]:
    from pretrain.engine.deepspeed_private import flat_buffers

    return _any_of([one.tensor.data for one in flat_buffers(engine)], drawn)


def _moments(engine: Any, drawn: np.random.Generator) -> tuple[int, int]:
    from pretrain.engine.deepspeed_private import wrapped

    return _any_of([state[key] for state in wrapped(engine).state.values() for key in ("exp_avg", "exp_avg_sq")], drawn)


AT_REST: dict[str, Callable[[Any, np.random.Generator], tuple[int, int]]] = {
    "a bf16 weight, between updates": _weights,
    "an fp32 weight of the optimizer, between updates": _masters,
    "a moment, between updates": _moments,
}
GRADIENT, REDUCED = "a gradient, before it is reduced", "a reduced gradient, before the update"
PLACES = (*AT_REST, GRADIENT, REDUCED, ON_DISK)


class Trial:
    """One flip in a run, on this rank. `losses`: of each step, as it was last taken. `taken`: all steps, in order."""

    def __init__(self, path: Path, place: str, number: int, seed: int):
        self.path, self.place, self.number = path, place, number
        self.drawn = np.random.default_rng([seed, PLACES.index(place) if place else 99, number])
        self.step = int(self.drawn.integers(6, STEPS + 1))
        self.where: tuple[int, int] = (-1, -1)
        self.losses: dict[int, float] = {}
        self.taken: list[int] = []
        self.found = self.by = self.weights = ""
        self._armed: int | None = None

    def run(self) -> None:
        """Trains until the end, starting again after a finding."""
        if self.place == ON_DISK:
            self._train(fail_in=self.step)
            self._damage()
        for _ in range(3):
            before = len(self.taken)
            error = self._train()
            if not error:
                last = checkpoint_directory(self.path.parent / "run", STEPS)
                self.weights = checkpoint_index.read(last).weights or ""
                return
            self.found = self.found or str(self.taken[-1] if len(self.taken) > before else "start")
            self.by = self.by or next((by for said, by in BY.items() if said in error), error)

    def _train(self, fail_in: int | None = None) -> str:
        from pretrain.engine.engine import Engine
        from pretrain.training import run

        right = Engine.step

        def step(engine: Any, number: int, *arguments: Any) -> Any:
            if number + 1 == fail_in:
                raise FailedError("on purpose")
            if self.place == GRADIENT and not self.taken and dist.get_rank() == FLIPPED:
                self._watch_gradient(engine.deepspeed.module)
            self.taken.append(number + 1)
            self._flip_in_step(engine, number + 1)
            outcome = right(engine, number, *arguments)
            self.losses[number + 1] = outcome.loss
            return outcome

        Engine.step = step  # type: ignore[method-assign]
        try:
            run.train_in_group(joined_world(), load(self.path, [], RunConfig))
        except FailedError as error:
            return str(error)
        finally:
            Engine.step = right  # type: ignore[method-assign]
        return ""

    def _watch_gradient(self, module: torch.nn.Module) -> None:
        """Adds the hook that flips a bit of a gradient, before a replay adds its own, which then see it."""
        parameters = [one for one in module.parameters() if one.requires_grad]
        passes = 0

        def hook(gradient: Tensor) -> Tensor | None:
            nonlocal passes
            if self._armed is None:
                return None
            passes += 1
            if passes <= self._armed:
                return None
            gradient, self._armed = gradient.clone(memory_format=torch.contiguous_format), None
            self.where = _flip(gradient, self.drawn)
            return gradient

        parameters[int(self.drawn.integers(len(parameters)))].register_hook(hook)

    def _flip_in_step(self, engine: Any, step: int) -> None:
        """Flips the bit, if it is this rank's, in this step, and hasn't flipped before."""
        if step != self.step or self.taken.count(step) > 1 or dist.get_rank() != FLIPPED:
            return
        if self.place in AT_REST:
            self.where = AT_REST[self.place](engine.deepspeed, self.drawn)
        elif self.place == GRADIENT:
            self._armed = int(self.drawn.integers(MICRO_BATCHES))
        elif self.place == REDUCED:
            optimizer = engine.deepspeed.optimizer.optimizer
            update = optimizer.step

            def updated(*arguments: Any, **named: Any) -> Any:
                gradients = [
                    one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None
                ]
                self.where = _any_of(gradients, self.drawn)
                optimizer.step = update
                return update(*arguments, **named)

            optimizer.step = updated

    def _damage(self) -> None:
        """Flips a bit of a file of this rank in the newest checkpoint. All ranks wait for it."""
        dist.barrier()
        if dist.get_rank() == FLIPPED:
            root = self.path.parent / "run"
            newest = checkpoint_directory(root, all_steps(root)[-1])
            files = sorted(newest.glob(f"rank-{FLIPPED:05d}.*"))
            file = files[int(self.drawn.integers(len(files)))]
            with file.open("r+b") as opened:
                place, bit = int(self.drawn.integers(file.stat().st_size)), int(self.drawn.integers(8))
                opened.seek(place)
                (byte,) = opened.read(1)
                opened.seek(place)
                opened.write(bytes([byte ^ 1 << bit]))
            self.where = place, bit
        dist.barrier()


def trial(path: Path, place: str, number: int, seed: int) -> Trial:
    """Runs one flip. All ranks call this together."""
    made = Trial(path, place, number, seed)
    made.run()
    return made


def line(one: Trial, undisturbed: Trial) -> list[str]:
    """The row of a trial."""
    again = len(one.taken) - len(set(one.taken))
    same = (one.losses, one.weights) == (undisturbed.losses, undisturbed.weights)
    result = ("same" if same else "differs") if one.weights else "refused"
    by = one.by
    if one.place == ON_DISK:
        by = "checksum of the file" if again or one.found else ""
    step, (element, bit) = one.step, one.where
    return [
        one.place,
        *map(str, (one.number, step, element, bit)),
        one.found,
        by,
        str(again),
        result,
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m checks.faults.flips", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--each", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", type=Path, required=True)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="flips-"))
    write_c4(folder / "c4.json.gz", 200)
    done = run("data-pipeline", "build", write_corpus_file(folder / "corpus.yaml"))
    assert done.returncode == 0, done.stderr
    cases = [("", 0), *((place, number) for place in PLACES for number in range(given.each))]
    trials = [
        (_run_file(folder / f"{place or 'undisturbed'}-{number}", folder / "corpus"), place, number, given.seed)
        for place, number in cases
    ]
    found = on_ranks(2, each, trial, trials, seconds=3600)[FLIPPED]
    with given.csv.open("w", encoding="utf-8", newline="") as file:
        write = csv.writer(file, lineterminator="\n").writerow
        write(COLUMNS)
        for one in found[1:]:
            write(line(one, found[0]))
            print(" | ".join(line(one, found[0])))
    return 0


def _run_file(folder: Path, corpus: Path) -> Path:
    return run_file(
        folder,
        corpus,
        run={"max_steps": STEPS},
        precision="bf16",
        evaluation=[],
        callbacks=[
            {"name": "fault_hunting:Replay", "every_steps": 1},
            {"name": "fault_hunting:MemoryChecksums", "every_steps": 1},
            {"name": "fault_hunting:WeightComparison"},
        ],
        checkpoint={"every_steps": SAVE_EVERY, "keep_last": 9},
    )


if __name__ == "__main__":
    sys.exit(main())
