"""How should threads of libgomp wait for one another: what does each way cost, alone and beside busy processes?

    python benchmarks/waiting_threads.py [--csv FILE] [--rounds 3]

A process for each way trains the model of `launch init` on all cores, 12 steps at a time, in turns, beside no other
process, one, and two that keep a core busy each. Tokens/s: the median over the rounds, and the least and the most.
`import pretrain` sets the way that is best (pretrain/hardware.py), unless the user sets OMP_WAIT_POLICY or
GOMP_SPINCOUNT.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

WAYS = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "spin 20000": {"GOMP_SPINCOUNT": "20000"},
    "spin 1000": {"GOMP_SPINCOUNT": "1000"},
}
BUSY = (0, 1, 2)
STEPS, LONGEST = 12, 8.0  # of a turn: steps after the first, and seconds
MINUTES = 5.5  # after which no other turns begin
BUSY_LOOP = "import time; end = time.time() + 90\nwhile time.time() < end: pass"  # ends though this script is killed


def train() -> None:
    """For each line of stdin, trains for a turn and prints tokens/s."""
    import torch
    from peers import Work, our_model, tokens

    from pretrain.engine.memory import keep_freed_memory

    keep_freed_memory()  # as a rank does
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    work = Work("t5gemma2", "t5gemma2-1.2m", 4, 512, 114)
    model = our_model(work.config)
    assert model.config.vocab_size
    batch = {name: ids % model.config.vocab_size for name, ids in tokens(work).items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(**batch)["labels"].mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    print("ready", flush=True)
    for _ in sys.stdin:
        step()
        began, done = time.perf_counter(), 0
        while done < STEPS and time.perf_counter() - began < LONGEST:
            step()
            done += 1
        print(done * work.rows * (work.inputs + work.targets) / (time.perf_counter() - began), flush=True)


def child(way: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, __file__, "--train"]
    process = subprocess.Popen(
        command, env={**environment, **WAYS[way]}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    if process.stdout.readline() != "ready\n":
        raise SystemExit(f"{way}: the process that trains has ended")
    return process


def turn(process: subprocess.Popen[str]) -> float:
    assert process.stdin
    assert process.stdout
    print("go", file=process.stdin, flush=True)
    return float(process.stdout.readline())


def measure(rounds: int) -> list[tuple[int, int, str, float]]:
    """(round, busy processes, way, tokens/s)."""
    end = time.monotonic() + 60 * MINUTES
    found, children, busy = [], {way: child(way) for way in WAYS}, list[subprocess.Popen[bytes]]()
    try:
        for number in range(rounds):
            for beside in BUSY if time.monotonic() < end else ():
                busy = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(beside)]
                order = list(WAYS)[:: 1 if number % 2 == 0 else -1]
                for way in order:
                    found.append(row := (number, beside, way, turn(children[way])))
                    print(f"round {number + 1}, {beside} busy, {way}: {row[-1]:,.0f} tokens/s", flush=True)
                for process in busy:
                    process.kill()
                    process.wait()
    finally:
        for beside_us in busy:
            beside_us.kill()
        for one in children.values():
            one.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path, default=Path("waiting_threads.csv"), help="where each turn is written")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train()
        return
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.2f}")
    found = measure(given.rounds)
    with given.csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("round", "busy processes", "way", "tokens per second"))
        writer.writerows((number, beside, way, f"{rate:.0f}") for number, beside, way, rate in found)
    rates = defaultdict(list)
    for _, beside, way, rate in found:
        rates[beside, way].append(rate)
    print(f"{'busy':>4}  {'way':10}  {'tokens/s':>8}  {'least':>7}  {'most':>7}  {'of default':>10}")
    for (beside, way), each in rates.items():
        middle, default = statistics.median(each), statistics.median(rates[beside, "default"])
        spread = f"{min(each):>7,.0f}  {max(each):>7,.0f}"
        print(f"{beside:>4}  {way:10}  {middle:>8,.0f}  {spread}  {middle / default:>10.2f}")


if __name__ == "__main__":
    main()
