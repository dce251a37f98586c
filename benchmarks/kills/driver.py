"""What does a training run lose when it is killed again and again?

    PYTHONPATH=benchmarks python -m kills.driver [--peers ours transformers] [--kills 20] [--seeds 0 1 2] [--steps 150]

Each peer trains a small model on the same text: once undisturbed, and once with SIGKILL to all its processes at moments
that the seed draws from the time of the undisturbed run. After each kill the run is started again with the command that
the peer's documentation resumes with. The steps that made the final weights are then compared with those of the
undisturbed run. Where they differ, the undisturbed run is repeated, to see whether it differs from itself.
"""

import argparse
import csv
import json
import shutil
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from kills import text
from kills.history import compare, moments
from kills.peers import PEERS, Peer, python_of
from kills.record import WEIGHTS
from kills.runs import Stuck, run

Curve = dict[str, list[Any]]
"""What the picture shows of a run: the steps after which the run was killed, and the difference of each step's loss."""


@dataclass(frozen=True)
class Result:
    """One peer and one seed.

    Attributes:
        lost, twice, loss: those of `history.Difference`.
        weights: the largest difference of an element of the final weights.
        control: the largest difference of a loss between two undisturbed runs; None: not tried, since the killed run is
            equal.
        seconds, processor: lost for each kill, by the clock and of processor time.
        removed: checkpoints that were moved away by hand.
        crashes: starts that failed by themselves. `message`: the last line of the latest one.
    """

    peer: str
    seed: int
    kills: int
    steps: int
    rows: int
    lost: int
    twice: int
    loss: float
    weights: float
    control: float | None
    seconds: float
    processor: float
    removed: int
    crashes: int
    message: str


def largest_difference(one: Path, other: Path) -> float:
    """The largest difference of an element of two files of weights; infinite if they have other tensors."""
    first, second = torch.load(one, weights_only=True), torch.load(other, weights_only=True)
    if first.keys() != second.keys():
        return float("inf")
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def measure(peer: Peer, python: Path, work: Path, seed: int, steps: int, kills: int) -> tuple[Result, Curve]:
    folder = work / f"{peer.name}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    undisturbed = run(peer, python, work, folder / "undisturbed", seed, steps)
    drawn = moments(undisturbed.steps, kills, seed)
    killed = run(peer, python, work, folder / "killed", seed, steps, drawn)
    difference = compare(undisturbed.steps, killed.steps)
    weights = largest_difference(undisturbed.folder / WEIGHTS, killed.folder / WEIGHTS)
    control = None
    if difference.loss > 0 or weights > 0:
        repeated = run(peer, python, work, folder / "repeated", seed, steps)
        control = compare(undisturbed.steps, repeated.steps).loss
    result = Result(
        peer=peer.name,
        seed=seed,
        kills=len(killed.kills),
        steps=steps,
        rows=sum(len(step.rows) for step in undisturbed.steps),
        lost=difference.lost,
        twice=difference.twice,
        loss=difference.loss,
        weights=weights,
        control=control,
        seconds=round((killed.seconds - undisturbed.seconds) / max(1, len(killed.kills)), 2),
        processor=round((killed.processor - undisturbed.processor) / max(1, len(killed.kills)), 2),
        removed=len(killed.removed),
        crashes=len(killed.crashes),
        message=killed.crashes[-1] if killed.crashes else "",
    )
    return result, {"kills": [kill.step for kill in killed.kills], "losses": [*difference.losses.values()]}


def summary(results: list[Result]) -> Iterator[dict[str, str]]:
    """A row for each peer, of all its seeds."""
    for name in dict.fromkeys(one.peer for one in results):
        own = [one for one in results if one.peer == name]
        yield {
            "peer": name,
            "seeds": str(len(own)),
            "kills": str(sum(one.kills for one in own)),
            "rows": f"{sum(one.rows for one in own):,}",
            "rows lost": f"{sum(one.lost for one in own):,}",
            "rows read twice": f"{sum(one.twice for one in own):,}",
            "largest difference of losses": f"{max(one.loss for one in own):.2g}",
            "of final weights": f"{max(one.weights for one in own):.2g}",
            "processor seconds lost a kill": f"{statistics.median(one.processor for one in own):.1f}",
            "checkpoints removed by hand": str(sum(one.removed for one in own)),
        }


def add(folder: Path, result: Result, curve: Curve) -> None:
    """Writes a result into the files of `folder`, in place of an earlier one of the same peer and seed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "runs.json"
    found = json.loads(path.read_text()) if path.exists() else []
    found = [one for one in found if (one["result"]["peer"], one["result"]["seed"]) != (result.peer, result.seed)]
    found.append({"result": asdict(result), "curve": curve})
    found.sort(key=lambda one: ([*PEERS].index(one["result"]["peer"]), one["result"]["seed"]))
    path.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")
    rows = [*summary([Result(**one["result"]) for one in found])]
    with (folder / "kills.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=[*PEERS])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--work", type=Path, default=Path("build/kills"), help="a folder for the runs")
    parser.add_argument("--venvs", type=Path, default=Path.home() / ".cache/encdec-pretrain/kills")
    parser.add_argument("--write", type=Path, help="a folder for the results, docs/results/kills")
    given = parser.parse_args()
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    text.write(work / "text.jsonl")
    failed = False
    for seed in given.seeds:
        for name in given.peers:
            peer = PEERS[name]
            try:
                result, curve = measure(peer, python_of(peer, given.venvs), work, seed, given.steps, given.kills)
            except Stuck as error:
                print(f"{name}, seed {seed}: doesn't come to its end: {error}", file=sys.stderr)
                failed = True
                continue
            print(json.dumps(asdict(result)), flush=True)
            if given.write:
                add(given.write, result, curve)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
