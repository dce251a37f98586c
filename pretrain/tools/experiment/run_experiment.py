"""`pretrain experiment`: runs the run files of a folder with several seeds, and compares them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from data_pipeline.foundation.atomic import write_bytes, write_json
from data_pipeline.foundation.formatting import counted, masked
from pretrain.evaluation.record import png
from pretrain.tools.experiment import experiment_file, report
from pretrain.tools.experiment.launches import places, train_all
from pretrain.tools.experiment.planned_runs import PlannedRun, plan_experiment
from pretrain.tools.experiment.results import as_csv, results
from pretrain.tracking.mlflow_run import parent_run, settle_parent
from pretrain.tracking.store import client, one_line
from pretrain.tracking.tracker import sync


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
