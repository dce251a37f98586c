"""Trains the run files of a folder with several seeds, through `launch local`, and compares them."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from data_pipeline.base.atomic import write_bytes
from data_pipeline.base.command import STOPPED
from data_pipeline.base.formatting import counted
from data_pipeline.base.processes import Process, ProcessGroup, announce, caught
from data_pipeline.base.progress import set_activity
from pretrain.hardware import VISIBLE, count_gpus, threads_per_rank
from pretrain.tools.experiment import experiment_folder, report
from pretrain.tools.experiment.experiment_folder import PlannedRun, plan_experiment
from pretrain.tools.experiment.results import as_csv, results


class Outcome(NamedTuple):
    """The exit code of an experiment, and the directory of its runs and its table."""

    code: int
    out: Path


def places(at_once: int | None) -> tuple[list[dict[str, str]], int | None]:
    """The environment variables of each of the runs that train at the same time, and the CPU threads of a run.

    GPUs are divided among the runs, by default one for each; if there are more runs than GPUs, runs share one. Threads
    are None where there are GPUs.

    2 runs on 4 GPUs -> "0,1" and "2,3"; 2 runs on 1 GPU -> "0" and "0"
    """
    gpus, visible = count_gpus(), os.environ.get(VISIBLE)
    at_once = at_once or gpus or 1
    if not gpus:
        return [{} for _ in range(at_once)], threads_per_rank(at_once)
    names = [name.strip() for name in visible.split(",")] if visible else [str(number) for number in range(gpus)]
    each = max(1, gpus // at_once)
    shares = [[names[(slot * each + number) % gpus] for number in range(each)] for slot in range(at_once)]
    return [{VISIBLE: ",".join(share)} for share in shares], None


def train_all(
    runs: Sequence[PlannedRun], environments: Sequence[Mapping[str, str]], title: str, train: bool = True
) -> int:
    """Trains the unfinished `runs`, unless `train` is False, one at a time in each of
    `environments`, and prints a line for each that ends. Returns the exit code, 1 if a run failed, else 75 if one
    stopped before its end.

    A run that fails doesn't end the others. After a signal no run is started; those that train get it too: they save
    and stop, and at a second signal they end at once.
    """
    waiting = [run for run in runs if not run.finished]
    done = len(runs) - len(waiting)
    print(f"{title}, {done} of {len(runs)} runs finished", flush=True)
    if not train:
        return 0
    free, codes = list(environments), set[int]()
    working: dict[Process, tuple[PlannedRun, Mapping[str, str]]] = {}
    with ProcessGroup() as group:

        def pass_on(number: int) -> None:
            if len(received) == 1:
                announce(number, "the runs that train save and stop; no other run is started")
            group.send_signal(number)

        with caught(pass_on) as received:
            while working or (waiting and not received):
                while free and waiting and not received:
                    run, environment = waiting.pop(0), free.pop(0)
                    process = start(group, run, environment)
                    working[process] = run, environment
                    if received:  # a signal that came while it started
                        process.send_signal(received[0])
                set_activity(f"{done}/{len(runs)}  training {', '.join(run.name for run, _ in working.values())}")
                ended = group.watch()
                assert ended is not None, "a run is training"
                run, environment = working.pop(ended)
                free.append(environment)
                group.remove(ended)
                code, seconds = ended.code or 0, time.monotonic() - ended.started
                codes.add(code)
                done += code == 0
                print(f"{done}/{len(runs)}  {run.name}: {_outcome(run, code)} ({seconds:.0f} s)", flush=True)
    return 1 if codes - {0, STOPPED} else STOPPED if received or STOPPED in codes else 0


def _outcome(run: PlannedRun, code: int) -> str:
    """The validation loss of a run that has finished; else how its launcher ended, with the last line of its log."""
    if code == STOPPED:
        return "stopped after saving"
    if code:
        *_, last = run.log.read_text(errors="replace").strip().split("\n")
        return f"failed (exit code {code}), {run.log}: {last}"
    loss = next((result.validation_loss for result in results([run])), None)
    return "finished" if loss is None else f"validation loss {loss:.4f}"


def start(group: ProcessGroup, run: PlannedRun, environment: Mapping[str, str]) -> Process:
    """Starts the launcher of a run; its output goes to the run's log."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with run.log.open("ab") as log:
        return group.add(Process(run.launcher, {**os.environ, **environment}, output=log))


def experiment(
    directory: Path,
    seeds: int,
    budget: str | None,
    at_once: int | None,
    out: Path | None,
    overrides: Sequence[str],
    train: bool = True,
) -> Outcome:
    """Trains what hasn't finished, unless `train` is False, then writes and prints the table.

    `out` gets runs in ROW/seed-N, their launchers' output in ROW/seed-N.log, and table.txt and runs.csv.
    Calling it again continues: finished runs are kept, and interrupted ones resume.
    """
    found = experiment_folder.read(directory)
    out = out or Path("runs", "-".join([found.name, *(budget.replace("%", "percent").split() if budget else [])]))
    environments, threads = places(at_once)
    set_activity(f"checking {counted(len(found.rows), 'run file')}")
    runs = plan_experiment(found, seeds, budget, overrides, out, threads)
    size = f"{counted(len(found.rows), 'row')} × {counted(seeds, 'seed')}"
    compared = ", ".join(dict.fromkeys(group.baseline for group in found.groups))
    code = train_all(runs, environments, f"{out}: {size}, compared with {compared}", train)
    set_activity("making the table")
    ended = results(runs)
    text = report.text(report.lines(found, ended))
    files = [out / "table.txt", out / "runs.csv"]
    for file, content in zip(files, (f"{text}\n", as_csv(ended)), strict=True):
        write_bytes(file, content.encode())
    return Outcome(conclude(code, files, text, out), out)


def conclude(code: int, files: Sequence[Path], text: str, out: Path) -> int:
    """Prints the table `text`. Returns `code`, the exit code of `train_all`."""
    does = "continues" if code == STOPPED else "tries those that failed again"
    again = f"; the same command {does}" if code else ""
    print(f"\n{text}\n\n{out}: {', '.join(file.name for file in files)}{again}")
    return code
