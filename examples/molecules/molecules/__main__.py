"""MOSES' molecules as text, the row of its table for some samples, and scaffolds that a model decorates.

python -m molecules data data/molecules
python -m molecules check samples.jsonl
python -m molecules scaffolds runs/molecules
"""

import contextlib
import csv
import gzip
import importlib.util
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.base.command import path_argument, path_option, run_command
from data_pipeline.base.errors import UserError
from molecules import decoration
from molecules.hook import filled
from molecules.metrics import INSTALL, columns, measured
from pretrain.cli.app import Checkpoint
from pretrain.engine.checkpoint.index import checkpoint_in
from pretrain.tools.evaluate import opened_checkpoint

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def moses_smiles(part: str) -> list[str]:
    """The SMILES of a part of MOSES' data, `train`, `test` or `test_scaffolds`, in the wheel's order.

    Raises UserError without the wheel.
    """
    package = importlib.util.find_spec("moses")
    if package is None or package.origin is None:
        raise UserError(f"needs MOSES' data: {INSTALL}")
    with gzip.open(Path(package.origin).parent / f"dataset/data/{part}.csv.gz", "rt", encoding="ascii") as file:
        return [row["SMILES"] for row in csv.DictReader(file)]


@app.command("data", epilog="Example: python -m molecules data data/molecules")
def _data(
    out: Annotated[Path, path_argument("OUT", "The new folder.")],
    number: Annotated[int | None, typer.Option(min=1, help="Number of training molecules. Default: all.")] = None,
    seed: Annotated[int, typer.Option(help="Determines which molecules are taken.")] = 0,
) -> None:
    """Write MOSES' 1,584,663 training molecules: OUT/train.txt, a SMILES a line."""
    if out.exists():
        raise UserError(f"{out}: exists")
    smiles = moses_smiles("train")
    if number is not None:
        smiles = random.Random(seed).sample(smiles, min(number, len(smiles)))
    out.mkdir(parents=True)
    (out / "train.txt").write_text("".join(f"{one}\n" for one in smiles), encoding="ascii")
    print(f"{out / 'train.txt'}: {len(smiles):,} molecules")


@app.command("check", epilog="Example: python -m molecules check samples.jsonl --all")
def _check(
    samples: Annotated[
        list[Path], path_argument("FILE", "SMILES a line (.txt, .txt.gz), or answers of pretrain generate (.jsonl).")
    ],
    everything: Annotated[bool, typer.Option("--all", help="All columns of MOSES' table: 9 core-minutes.")] = False,
    out: Annotated[Path | None, path_option("--out", "Append the row to this CSV file of such rows.")] = None,
) -> None:
    """Compute the row of MOSES' table for 30,000 molecules of each file."""
    heading = ["samples", "molecules", *columns(everything)]
    if out is not None:
        _begin(out, heading)
    for path in samples:
        smiles = list(read_samples(path))
        print(f"{path}: {len(smiles):,} molecules")
        try:
            found = measured(smiles, everything)
        except RuntimeError as error:
            raise UserError(str(error)) from error
        for name, value in found.items():
            print(f"  {name:<12} {value:.4f}")
        if out is not None:
            row: dict[str, object] = {"samples": path.name, "molecules": len(smiles), **found}
            with out.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, heading, lineterminator="\n").writerow(row)


def read_samples(path: Path) -> Iterable[str]:
    """The molecules of a file: lines of text, or the answers that `pretrain generate --output` has written."""
    data = path.read_bytes()
    for line in (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines():
        if path.suffix == ".jsonl":
            answer = json.loads(line)
            yield filled(answer["text"], answer["generated"])
        else:
            yield line


def _begin(out: Path, heading: list[str]) -> None:
    """Writes the heading to a new file. Raises UserError for a file with another heading."""
    with out.open("a+", encoding="utf-8", newline="") as file:
        file.seek(0)
        found = next(csv.reader(file), None)
        if found is None:
            csv.writer(file, lineterminator="\n").writerow(heading)
        elif found != heading:
            raise UserError(f"--out {out}: has other columns; expected {','.join(heading)}; name another file")


@app.command("scaffolds", epilog="Example: python -m molecules scaffolds runs/molecules")
def _scaffolds(
    checkpoint: Checkpoint,
    number: Annotated[int, typer.Option(min=2, help="Number of scaffolds with an open place.")] = 500,
    samples: Annotated[int, typer.Option(min=1, help="Number of samples of each.")] = 10,
    seed: Annotated[int, typer.Option(help="Determines scaffolds and samples.")] = 0,
    out: Annotated[Path | None, path_option("--out", "A CSV file.")] = None,
) -> None:
    """Fill blanks in molecules of the scaffold test: branches, and spans at any place."""
    smiles = moses_smiles("test_scaffolds")
    random.Random(seed).shuffle(smiles)
    with opened_checkpoint(checkpoint_in(checkpoint), 32) as session:
        rows = decoration.table(session.trained, smiles, number, samples, seed)
    with contextlib.nullcontext(sys.stdout) if out is None else out.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows([decoration.columns(samples), *rows])


if __name__ == "__main__":
    run_command(app)
