"""docs/results/speedrun/ladders/enwik8.png: the speedrun's ladder beside the textbook's, from their JSON files.

.venv/bin/python -m docs.pictures.ladders
"""

from pathlib import Path
from statistics import fmean
from typing import Any

from data_pipeline.base.atomic import write_bytes
from data_pipeline.base.json_file import read_json
from experiments.ladder.compared import Other
from experiments.ladder.ladder_file import LadderFile, Rung
from experiments.ladder.ladder_report import Report
from experiments.ladder.rungs import Ladder, SizedRung
from experiments.ladder.scaling_law import fit
from pretrain.evaluate.record import png

FOLDER = Path(__file__).parents[1] / "results" / "speedrun" / "ladders"


def sized(rung: dict[str, Any]) -> SizedRung:
    return SizedRung(**{key: value for key, value in rung.items() if key != "losses"})


if __name__ == "__main__":
    saved = read_json(FOLDER / "enwik8-record.json", dict)
    every = [*saved["rungs"], saved["next"]]
    rungs = [Rung(name=one["name"], overrides=one["overrides"]) for one in every]
    file = LadderFile(
        run=str(FOLDER.parents[3] / saved["run"]), fit_over=saved["fit_over"], rungs=rungs[:-1], next=rungs[-1]
    )
    ladder = Ladder(saved["name"], file, Path(saved["run"]), [*map(sized, saved["rungs"])], sized(saved["next"]))
    law = fit([rung["flops"] for rung in saved["rungs"]], [fmean(rung["losses"].values()) for rung in saved["rungs"]])
    losses = {rung["name"]: {int(seed): loss for seed, loss in rung["losses"].items()} for rung in every}
    report = Report(ladder, losses, law, None, Other.read(FOLDER / "enwik8-textbook.json"))
    write_bytes(FOLDER / "enwik8.png", png(report.picture()))
