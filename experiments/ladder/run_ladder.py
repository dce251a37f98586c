"""Trains models of growing size, fits a law to their losses and predicts the next one's."""

from collections.abc import Sequence
from pathlib import Path

from data_pipeline.base.atomic import write_bytes, write_json
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import counted
from experiments.ladder import ladder_file, rungs
from experiments.ladder.compared import Other
from experiments.ladder.ladder_report import Report
from pretrain.evaluate.record import png
from pretrain.tools.experiment.results import results
from pretrain.tools.experiment.run_experiment import conclude, places, train_all


def ladder(
    path: Path,
    seeds: int,
    at_once: int | None,
    out: Path | None,
    overrides: Sequence[str],
    train: bool = True,
    train_next: bool = False,
    against: Path | None = None,
) -> int:
    """Trains what hasn't finished of the rungs, and of the next one if `train_next`; returns the exit code.

    `out` gets runs in RUNG/seed-N as `pretrain experiment` does, and ladder.json, ladder.md and ladder.png.
    Calling it again continues. `against`: the ladder.json of another recipe, to compare the compute for equal losses
    with.
    """
    other = Other.read(against) if against else None
    found = rungs.sized(path, *ladder_file.read(path), overrides)
    if other and found.file.fit_over != "flops":
        raise UserError(f"--against: compares over FLOPs; {path} has fit_over: {found.file.fit_over}")
    out = out or Path("runs", found.name)
    environments, threads = places(at_once)
    runs = rungs.planned_runs(found, seeds, out, threads)
    to_train = [run for run in runs if train_next or run.row != found.next.name]
    size = f"{counted(len(found.all) if train_next else len(found.rungs), 'rung')} × {counted(seeds, 'seed')}"
    code = train_all(to_train, environments, f"{out}: {size}", train)
    report = Report.of(found, results(runs), other)
    write_json(out / "ladder.json", report.as_json())
    write_bytes(out / "ladder.md", report.markdown().encode())
    write_bytes(out / "ladder.png", png(report.picture()))
    files = [out / f"ladder.{kind}" for kind in ("json", "md", "png")]
    return conclude(code, files, report.text(), out)
