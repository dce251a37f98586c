"""`pretrain experiment`: runs the run files of a folder with several seeds, and compares them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from data_pipeline.foundation.atomic import write_bytes, write_json
from data_pipeline.foundation.formatting import counted
from pretrain.evaluation.record import png
from pretrain.tools.experiment import curves, experiment_file, experiment_table, mlflow_parent
from pretrain.tools.experiment.launches import Trained, at_once_and_threads, train_all
from pretrain.tools.experiment.planned_runs import PlannedRun, plan_experiment
from pretrain.tools.experiment.results import Result, as_csv, results


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
    found = experiment_file.read(directory)
    out = out or Path("runs", "-".join([found.name, *(budget.replace("%", "percent").split() if budget else [])]))
    at_once, threads = at_once_and_threads(at_once)
    runs = plan_experiment(found, seeds, budget, overrides, out, threads)
    size = f"{counted(len(found.rows), 'row')} × {counted(seeds, 'seed')}"
    trained = train_all(runs, at_once, f"{out}: {size}", train)
    ended = results(runs, filter(None, (group.metric for group in found.groups)))
    files, lines = write(found, ended, out)
    losses = {line.row: line.validation_loss.mean for line in lines if line.validation_loss}
    return conclude(trained, runs, losses, files, experiment_table.text(lines), out)


def conclude(
    trained: Trained,
    runs: Sequence[PlannedRun],
    losses: Mapping[str, float],
    files: Sequence[Path],
    text: str,
    out: Path,
) -> int:
    """Sends `losses` and `files` to MLflow, prints the table `text` and which runs failed; returns the exit code."""
    if problem := mlflow_parent.log(runs, losses, files):
        print(f"warning: {problem}")
    print("\n" + text + "\n")
    for line in trained.failures:
        print(line)
    again = "" if trained.code == 0 else "; run the same command again to continue"
    print(f"{out}: {', '.join(file.name for file in files)}{again}")
    return trained.code


def write(
    found: experiment_file.Experiment, results: Sequence[Result], out: Path
) -> tuple[list[Path], list[experiment_table.Line]]:
    """Writes the files of the table; returns them and the table's lines."""
    lines = experiment_table.lines(found, results)
    write_json(out / "table.json", {"name": found.name, "rows": experiment_table.as_json(lines)})
    write_bytes(out / "table.md", experiment_table.markdown(lines).encode())
    write_bytes(out / "runs.csv", as_csv(results).encode())
    write_bytes(out / "curves.png", png(curves.picture(found, results)))
    return [out / name for name in ("table.json", "table.md", "runs.csv", "curves.png")], lines
