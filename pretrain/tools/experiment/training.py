"""Trains those of several runs that haven't finished, and says how each ends."""

from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.run.hardware import count_gpus, threads_per_rank
from pretrain.tools.experiment.plan import PlannedRun
from pretrain.tools.experiment.results import results
from pretrain.tools.experiment.runs import Ended, exit_code, lanes, run_all


@dataclass(frozen=True)
class Trained:
    """`code`: the exit code of the whole. `failures`: a line for each run that failed."""

    code: int
    failures: list[str]


def at_once_and_threads(at_once: int | None) -> tuple[int, int | None]:
    """How many runs train at the same time, and the CPU threads of each; None where there are GPUs."""
    gpus = count_gpus()
    at_once = at_once or gpus or 1
    return at_once, None if gpus else threads_per_rank(at_once)


def train_all(runs: Sequence[PlannedRun], at_once: int, title: str, train: bool = True) -> Trained:
    """Trains those of `runs` that haven't finished; none of them unless `train`. Prints a line for each that ends."""
    left = [run for run in runs if not run.finished]
    done = len(runs) - len(left)
    print(f"{title}, {done} of {len(runs)} runs finished", flush=True)
    ended, stopped = run_all(left if train else [], lanes(at_once, count_gpus()), _Reporter(done, len(runs)))
    failures = [
        f"failed: {one.run.name} (exit code {one.code}), {one.run.log}: {one.last_words}"
        for one in ended
        if one.code not in (0, 75)
    ]
    return Trained(exit_code(ended, stopped), failures)


class _Reporter:
    """Prints a line for each run that ends."""

    def __init__(self, done: int, number: int):
        self._done, self._number = done, number

    def __call__(self, ended: Ended) -> None:
        self._done += ended.code == 0
        print(f"{self._done}/{self._number}  {ended.run.name}: {self._how(ended)} ({ended.seconds:.0f} s)", flush=True)

    def _how(self, ended: Ended) -> str:
        run: PlannedRun = ended.run
        if ended.code == 0:
            found = results([run])
            loss = found[0].validation_loss if found else None
            return "finished" if loss is None else f"validation loss {loss:.4f}"
        return "stopped after saving" if ended.code == 75 else f"failed, {run.log}: {ended.last_words}"
