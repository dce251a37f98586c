"""MOSES' metrics (Polykovskiy et al. 2020), computed by the code and the reference statistics of the wheel molsets.

The wheel needs two names that its dependencies no longer have. This program gives them to it, so it runs in a process
of its own, and reads molecules from standard input, a SMILES a line:

    python -m molecules.metrics [--all] < SMILES
"""

import argparse
import json
import subprocess
import sys
import types
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

INSTALL = "pip install --no-deps molsets==0.3.1 fcd_torch==1.0.7 rdkit==2026.9.1"
_THREADS = 1


def measured(smiles: Sequence[str], everything: bool = False) -> dict[str, float]:
    """The metrics of `smiles` by the names of MOSES' table, computed in another process on one core.

    They are those of `columns`, without the ones that aren't defined; with less than two valid molecules only `valid`
    is there. Raises RuntimeError with what to install if a package is missing, and with the exit code if the process
    was killed.
    """
    command = [sys.executable, "-P", "-m", "molecules.metrics", *(["--all"] if everything else [])]
    done = subprocess.run(command, input="\n".join(smiles), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"the metrics' process ended with exit code {done.returncode}"]
        raise RuntimeError(lines[-1])
    return json.loads(done.stdout)


def columns(everything: bool = False) -> list[str]:
    """The names of the metrics, in order. Without `everything`: those that take seconds."""
    compared = ["FCD", *(["SNN", "Frag", "Scaf"] if everything else [])]
    more = ["IntDiv", "IntDiv2", "Filters", "logP", "SA", "QED", "weight"] if everything else []
    of_parts = [f"{name}/{part}" for name in compared for part in ("Test", "TestSF")]
    return ["valid", "unique@1000", "unique@10000", *of_parts, "Novelty", *more]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m molecules.metrics", description=__doc__)
    parser.add_argument("--all", action="store_true", help="all columns of MOSES' table")
    everything = parser.parse_args().all
    print(json.dumps(_metrics(sys.stdin.read().splitlines(), everything)))


def _metrics(smiles: list[str], everything: bool) -> dict[str, float]:
    warnings.filterwarnings("ignore")
    try:
        moses = _moses()
    except ImportError as error:
        sys.exit(f"{error}; the metrics need: {INSTALL}")
    functions, data = moses.metrics.metrics, moses.dataset.dataset
    found = {"valid": functions.fraction_valid(smiles)}
    known = functions.remove_invalid(smiles, canonize=True)
    if len(known) < 2:
        return found
    for number in (1000, 10_000):
        found[f"unique@{number}"] = functions.fraction_unique(known, number)
    molecules = [functions.get_mol(one) for one in known]
    references = {"Test": data.get_statistics("test"), "TestSF": data.get_statistics("test_scaffolds")}
    options = {"n_jobs": 1, "device": "cpu", "batch_size": 512}
    kinds = {"FCD": (functions.FCDMetric, known)}
    if everything:
        for name in ("SNN", "Frag", "Scaf"):
            kinds[name] = getattr(functions, f"{name}Metric"), molecules
    for name, (kind, of) in kinds.items():
        metric = kind(**options)
        generated = metric.precalc(of)
        for part, reference in references.items():
            found[f"{name}/{part}"] = metric.metric(as_floats(reference[name]), as_floats(generated))
    found["Novelty"] = functions.novelty(molecules, data.get_dataset("train"))
    if everything:
        found["IntDiv"] = functions.internal_diversity(molecules)
        found["IntDiv2"] = functions.internal_diversity(molecules, p=2)
        found["Filters"] = functions.fraction_passes_filters(molecules)
        for name in ("logP", "SA", "QED", "weight"):
            metric = functions.WassersteinMetric(getattr(functions, name), **options)
            found[name] = metric(gen=molecules, pref=references["Test"][name])
    return {name: float(value) for name, value in found.items() if value == value}


def as_floats(precalculated: Mapping[str, Any]) -> dict[str, Any]:
    """What a metric has precalculated, with counts as floats.

    MOSES passes counts of integers to SciPy's cosine, which multiplies the sums of their squares as 64-bit integers.
    For the fragments of 30,000 molecules the product overflows, and Frag is 1.
    """
    return {
        key: {one: float(count) for one, count in value.items()} if isinstance(value, Counter) else value
        for key, value in precalculated.items()
    }


def _moses() -> types.ModuleType:
    """The package moses of the wheel molsets, with the two names that it misses today."""
    import pandas  # with the two below 3 s, and `measured` needs none of them
    import torch
    from rdkit import rdBase  # README.md says how to install it

    torch.set_num_threads(_THREADS)
    rdBase.DisableLog("rdApp.*")
    six = types.ModuleType("rdkit.six")  # gone from rdkit; the wheel takes one function from it
    six.iteritems = dict.items  # type: ignore[attr-defined]
    sys.modules.setdefault("rdkit.six", six)
    if not hasattr(pandas.DataFrame, "append"):  # gone in pandas 2
        pandas.DataFrame.append = lambda one, other, sort=False: pandas.concat([one, other], sort=sort)
    import moses.metrics.metrics  # only now does it find both names

    return moses


if __name__ == "__main__":
    main()
