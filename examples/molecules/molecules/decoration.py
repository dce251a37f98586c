"""Molecules with a blank, which a model fills: a branch of a ring or chain, or any few symbols.

The molecules are those of MOSES' scaffold test, whose scaffolds no training molecule has. The control fills a blank
with what the model has written into another molecule's, so it doesn't depend on the input.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from molecules.hook import BLANK
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import Answers

SYMBOLS = re.compile(r"Cl|Br|\[nH\]|.")  # atoms, bonds, digits and brackets
_LONGEST_SPAN = 10  # symbols
_LONGEST = 80  # tokens of an answer


@dataclass(frozen=True)
class Blank:
    """A molecule whose `middle` is blank."""

    before: str
    middle: str
    after: str

    @property
    def prompt(self) -> str:
        return self.before + BLANK + self.after


def branch(smiles: str, draw: random.Random) -> Blank | None:
    """A molecule without one of its branches, whose rings are its own; None: the molecule has no such branch."""
    found, opened = [], list[int]()
    for place, symbol in enumerate(smiles):
        if symbol == "(":
            opened.append(place)
        elif symbol == ")":
            start = opened.pop() + 1
            inside = re.sub(r"\[nH\]", "", smiles[start:place])
            if all(inside.count(digit) % 2 == 0 for digit in "123456"):
                found.append((start, place))
    if not found:
        return None
    start, end = draw.choice(found)
    return Blank(smiles[:start], smiles[start:end], smiles[end:])


def span(smiles: str, draw: random.Random) -> Blank | None:
    """A molecule without some neighbouring symbols, at any place."""
    symbols = SYMBOLS.findall(smiles)
    length = draw.randint(1, min(_LONGEST_SPAN, len(symbols) - 1))
    start = draw.randint(0, len(symbols) - length)
    parts = symbols[:start], symbols[start : start + length], symbols[start + length :]
    return Blank(*map("".join, parts))


BLANKS = {"a branch": branch, "any span": span}


def columns(samples: int) -> list[str]:
    """The columns of `table` with this number of samples of each blank."""
    return ["blank", "filled by", "valid, %", "scaffold kept, %", "as in the molecule, %", f"different, of {samples}"]


def table(trained: TrainedModel, smiles: Sequence[str], number: int, samples: int, seed: int) -> list[list[str]]:
    """The rows of the table, as `columns` has them, for the first `number` of the `smiles` that have such a blank."""
    rows = []
    for kind, blank in BLANKS.items():
        drawn = (blank(one, random.Random(f"{seed}/{kind}/{one}")) for one in smiles)
        blanks = [*islice(filter(None, drawn), number)]
        settings = GenerationSettings(max_new_tokens=_LONGEST, temperature=1.0, seed=seed)
        answers = Answers(trained, [one.prompt for one in blanks], settings, samples=samples).following(0)
        spans = [[one.generated.removeprefix(BLANK) for one in islice(answers, samples)] for _ in blanks]
        half = len(blanks) // 2
        for name, given in (("the model", spans), ("another molecule's answers", [*spans[half:], *spans[:half]])):
            rows.append([kind, name, *judged(blanks, given)])
    return rows


def judged(blanks: Sequence[Blank], spans: Sequence[Sequence[str]]) -> list[str]:
    """The figures of `columns` for some `spans` of each of the `blanks`. A scaffold is kept if it is a part of the
    filled molecule."""
    from rdkit import Chem, rdBase  # README.md says how to install it
    from rdkit.Chem.Scaffolds import MurckoScaffold

    rdBase.DisableLog("rdApp.*")
    valid = kept = same = different = answers = 0
    for blank, given in zip(blanks, spans, strict=True):
        core = Chem.MolFromSmiles((blank.before + blank.after).replace("()", ""))
        scaffold = core and MurckoScaffold.GetScaffoldForMol(core)
        whole = Chem.CanonSmiles(blank.before + blank.middle + blank.after)
        found = set()
        for one in given:
            answers += 1
            if molecule := Chem.MolFromSmiles(blank.before + one + blank.after):
                valid += 1
                kept += bool(scaffold and molecule.HasSubstructMatch(scaffold))
                found.add(Chem.MolToSmiles(molecule))
                same += Chem.MolToSmiles(molecule) == whole
        different += len(found)
    return [*(f"{100 * count / answers:.1f}" for count in (valid, kept, same)), f"{different / len(blanks):.1f}"]
