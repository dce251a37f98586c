"""`pretrain experiment`: trains the run files of a folder with several seeds, through `launch local`, and compares."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from data_pipeline.foundation.atomic import write_bytes, write_json
from data_pipeline.foundation.command import STOPPED
from data_pipeline.foundation.formatting import counted, masked
from data_pipeline.foundation.processes import Process, ProcessGroup, announce, caught
from pretrain.evaluation.record import png
from pretrain.hardware import VISIBLE, count_gpus, threads_per_rank
from pretrain.tools.experiment import experiment_folder, report
from pretrain.tools.experiment.experiment_folder import PlannedRun, plan_experiment
from pretrain.tools.experiment.results import as_csv, results
from pretrain.tracking.mlflow_store import client, one_line, parent_run, settle_parent
from pretrain.tracking.tracker import sync


def places(at_once: int | None) -> tuple[list[dict[str, str]], int | None]:
    """The environment variables of each of the runs that train at the same time, and the CPU threads of a run.

    GPUs are divided among the runs, by default one for each; if there are more runs than GPUs, runs share one. Threads
    are None where there are GPUs.

    2 runs on 4 GPUs -> "0,1" and "2,3"; 2 runs on 1 GPU -> "0" and "0"
    """
    gpus, given = count_gpus(), os.environ.get(VISIBLE)
    at_once = at_once or gpus or 1
    if not gpus:
        return [{} for _ in range(at_once)], threads_per_rank(at_once)
    names = [name.strip() for name in given.split(",")] if given else [str(number) for number in range(gpus)]
    each = max(1, gpus // at_once)
    shares = [[names[(slot * each + number) % gpus] for number in range(each)] for slot in range(at_once)]
    return [{VISIBLE: ",".join(share)} for share in shares], None


def train_all(
    runs: Sequence[PlannedRun], environments: Sequence[Mapping[str, str]], title: str, train: bool = True
) -> tuple[int, list[str]]:
    """Trains those of `runs` that haven't finished, none of them unless `train`, one at a time in each of
    `environments`, and prints a line for each that ends.

    Returns the exit code, 1 if a run failed, else 75 if one stopped before its end; and a line for each that failed.

    A run that starts from another's weights waits for it, and isn't started if that one failed. Otherwise a run that
    fails doesn't end the others. After a signal no run is started; those that train get it too: they save
    and stop, and at a second signal they end at once.
    """
    waiting = [run for run in runs if not run.finished]
    done = len(runs) - len(waiting)
    print(f"{title}, {done} of {len(runs)} runs finished", flush=True)
    if not train:
        return 0, []
    free, codes, failures = list(environments), set[int](), list[str]()
    working: dict[Process, tuple[PlannedRun, Mapping[str, str]]] = {}
    with ProcessGroup() as group:

        def pass_on(number: int) -> None:
            if len(received) == 1:
                announce(number, "the runs that train save and stop; no other run is started")
            group.send_signal(number)

        with caught(pass_on) as received:
            while working or (waiting and not received):
                while free and not received and (run := _first_ready(waiting, [run for run, _ in working.values()])):
                    environment = free.pop(0)
                    process = start(group, run, environment)
                    working[process] = run, environment
                    if received:  # a signal that came while it started
                        process.send_signal(received[0])
                if first := group.watch():
                    run, environment = working.pop(first)
                    free.append(environment)
                    group.remove(first)
                    code = first.code or 0
                    codes.add(code)
                    done += code == 0
                    seconds = time.monotonic() - first.started
                    print(f"{done}/{len(runs)}  {run.name}: {_outcome(run, code)} ({seconds:.0f} s)", flush=True)
                    if code not in (0, STOPPED):
                        failures.append(f"failed: {run.name} (exit code {code}), {run.log}: {_last_line(run)}")
                    if code:
                        waiting = [one for one in waiting if not one.follows(run)]
    return 1 if failures else STOPPED if received or STOPPED in codes else 0, failures


def _outcome(run: PlannedRun, code: int) -> str:
    """The validation loss of a run that has finished; else how its launcher ended."""
    if code:
        return "stopped after saving" if code == STOPPED else f"failed, {run.log}: {_last_line(run)}"
    loss = next((result.validation_loss for result in results([run])), None)
    return "finished" if loss is None else f"validation loss {loss:.4f}"


def _last_line(run: PlannedRun) -> str:
    lines = run.log.read_text(errors="replace").split("\n") if run.log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "its launcher printed nothing")


def _first_ready(waiting: list[PlannedRun], working: Sequence[PlannedRun]) -> PlannedRun | None:
    """Takes the first run out of `waiting` that starts from the weights of no run that is still to end."""
    for run in waiting:
        if not any(run.follows(other) for other in (*waiting, *working) if other is not run):
            waiting.remove(run)
            return run
    return None


def start(group: ProcessGroup, run: PlannedRun, environment: Mapping[str, str]) -> Process:
    """Starts the launcher of a run; its output goes to the run's log."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-u", "-m", "launch", "local", str(run.file), *run.overrides]
    with run.log.open("ab") as log:
        return group.add(Process(command, {**os.environ, **environment}, output=log))


def experiment(
    directory: Path,
    seeds: int,
    budget: str | None,
    at_once: int | None,
    out: Path | None,
    overrides: Sequence[str],
    train: bool = True,
) -> int:
    """Trains what hasn't finished, unless `train` is False, then writes and prints the table; returns the exit code.

    `out` gets runs in ROW/seed-N, their launchers' output in ROW/seed-N.log, and table.json, table.md, runs.csv and
    curves.png. Calling it again continues: finished runs are kept, and interrupted ones resume.
    """
    found = experiment_folder.read(directory)
    out = out or Path("runs", "-".join([found.name, *(budget.replace("%", "percent").split() if budget else [])]))
    environments, threads = places(at_once)
    runs = plan_experiment(found, seeds, budget, overrides, out, threads)
    size = f"{counted(len(found.rows), 'row')} × {counted(seeds, 'seed')}"
    trained = train_all(runs, environments, f"{out}: {size}", train)
    ended = results(runs, filter(None, (group.metric for group in found.groups)))
    lines = report.lines(found, ended)
    files = [out / name for name in ("table.json", "table.md", "runs.csv", "curves.png")]
    write_json(files[0], {"name": found.name, "rows": lines})
    write_bytes(files[1], report.markdown(lines).encode())
    write_bytes(files[2], as_csv(ended).encode())
    write_bytes(files[3], png(report.picture(found, ended)))
    losses = {line.row: line.validation_loss.mean for line in lines if line.validation_loss}
    return conclude(trained, runs, losses, files, report.text(lines), out)


def conclude(
    trained: tuple[int, Sequence[str]],
    runs: Sequence[PlannedRun],
    losses: Mapping[str, float],
    files: Sequence[Path],
    text: str,
    out: Path,
) -> int:
    """Sends `losses` and `files` to MLflow, and prints the table `text` and which runs failed.

    `trained`: what `train_all` returned, whose exit code this returns too.
    """
    code, failures = trained
    if problem := _log_to_parents(runs, losses, files):
        print(f"warning: {problem}")
    print("\n" + text + "\n")
    for line in failures:
        print(line)
    again = "" if code == 0 else "; run the same command again to continue"
    print(f"{out}: {', '.join(file.name for file in files)}{again}")
    return code


def _log_to_parents(runs: Sequence[PlannedRun], losses: Mapping[str, float], files: Sequence[Path]) -> str | None:
    """Logs `files` and the mean validation losses of rows to the parent of `runs`, in each MLflow that they use.

    Returns what went wrong, in a line: an MLflow that is away ends nothing.
    """
    stores = {(mlflow.uri, mlflow.experiment, mlflow.parent) for run in runs if (mlflow := run.config.tracking.mlflow)}
    problems = []
    for uri, experiment, parent in sorted(stores):
        try:
            for run in runs:
                if run.finished and run.config.tracking.mlflow and run.config.tracking.mlflow.uri == uri:
                    sync(run.directory, uri)  # sends what MLflow was too slow to take when the run ended
            store = client(uri)
            found = store.get_experiment_by_name(experiment)
            if found is None or parent is None:
                continue  # none of the runs has reached MLflow
            run_id = parent_run(store, found.experiment_id, parent)
            for file in files:
                store.log_artifact(run_id, str(file))
            for row, loss in losses.items():
                store.log_metric(run_id, f"{row}/validation_loss", loss)
            settle_parent(store, found.experiment_id, run_id)
        except Exception as error:  # MLflow's errors are of many kinds
            problems.append(f"MLflow at {masked(uri)}: {one_line(error)}; the table isn't there")
    return "; ".join(problems) or None
