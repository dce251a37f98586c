"""`pretrain experiment`: runs the run files of a folder with several seeds, and compares them."""

from collections.abc import Sequence
from pathlib import Path

from data_pipeline.foundation.atomic import write_bytes, write_json
from data_pipeline.foundation.progress import counted
from pretrain.evaluation.record import png
from pretrain.experiment import curves, folder, parent, table
from pretrain.experiment.plan import PlannedRun, plan
from pretrain.experiment.results import Result, results
from pretrain.experiment.runs import Ended, exit_code, lanes, run_all
from pretrain.run.hardware import count_gpus, threads_per_rank


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
    curves.png. Called again, it goes on: finished runs stay, cut ones resume.
    """
    found = folder.read(directory)
    out = out or Path("runs", "-".join([found.name, *(budget.replace("%", "percent").split() if budget else [])]))
    gpus = count_gpus()
    at_once = at_once or gpus or 1
    runs = plan(found, seeds, budget, overrides, out, None if gpus else threads_per_rank(at_once))
    left = [run for run in runs if not run.finished]
    done = len(runs) - len(left)
    size = f"{counted(len(found.rows), 'row')} × {counted(seeds, 'seed')}"
    print(f"{out}: {size}, {done} of {len(runs)} runs finished", flush=True)
    reporter = _Reporter(done, len(runs))
    ended, stopped = run_all(left if train else [], lanes(at_once, gpus), reporter)
    files, lines = write(found, results(runs), out)
    if problem := parent.log(runs, lines, files):
        print(f"warning: {problem}")
    print("\n" + table.text(lines) + "\n")
    code = exit_code(ended, stopped)
    for one in ended:
        if one.code not in (0, 75):
            print(f"failed: {one.run.name} (exit code {one.code}), {one.run.log}: {one.last_words}")
    again = "" if code == 0 else "; run the same command again to continue"
    print(f"{out}: {', '.join(file.name for file in files)}{again}")
    return code


def write(found: folder.Experiment, results: Sequence[Result], out: Path) -> tuple[list[Path], list[table.Line]]:
    """Writes the files of the table; returns them and the table's lines."""
    lines = table.lines(found, results)
    write_json(out / "table.json", {"name": found.name, "rows": table.as_json(lines)})
    write_bytes(out / "table.md", table.markdown(lines).encode())
    write_bytes(out / "runs.csv", table.as_csv(results).encode())
    write_bytes(out / "curves.png", png(curves.picture(found, results)))
    return [out / name for name in ("table.json", "table.md", "runs.csv", "curves.png")], lines


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
