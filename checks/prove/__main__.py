"""Tries the claims of the README on this machine, with kills and texts that nobody has chosen before.

    python -m checks.prove [--seed N] [--at STEP] [--text FILE] [--only 3,6] [--folder DIR]

The seed is the clock's, and is printed. It decides the corpus's seed, the weights, the moment of each kill, the damaged
byte. What a claim is compared with is computed here: with transformers' models and PyTorch's optimizers, by the
definition, or from bytes. Exit code 1: a claim doesn't hold here.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pretrain  # noqa: F401  before torch, whose waiting threads it limits
from checks.prove.claims import CLAIMS
from checks.prove.proof import STEPS, Proof, Wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m checks.prove", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the clock's seconds")
    parser.add_argument("--at", type=int, help=f"the step after which runs are killed, 1 to {STEPS - 2}")
    parser.add_argument("--text", default="", help="a file of text or JSON Lines; default: the King James Bible")
    parser.add_argument("--only", default="", help="numbers of claims, such as 3,6")
    parser.add_argument("--folder", type=Path, help="where to work, and what to keep; default: a temporary folder")
    given = parser.parse_args(arguments)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # transformers is imported later
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    at = 3 + given.seed % (STEPS - 5) if given.at is None else given.at
    numbers = [int(one) for one in given.only.split(",") if one] or range(1, len(CLAIMS) + 1)
    if not 1 <= at <= STEPS - 2 or not {*numbers} <= {*range(1, len(CLAIMS) + 1)}:
        parser.error(f"--at is 1 to {STEPS - 2}, --only has numbers from 1 to {len(CLAIMS)}")
    if given.text and not Path(given.text).is_file():
        parser.error(f"--text: {given.text} is no file")
    folder = given.folder or Path(tempfile.mkdtemp(prefix="prove-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {given.seed}, kills after step {at}, text {given.text or 'King James Bible'}", flush=True)
    proof, failed, began = Proof(folder.resolve(), given.seed, at, given.text), 0, time.monotonic()
    for number in numbers:
        claim, started = CLAIMS[number - 1], time.monotonic()
        look = ""
        try:
            here, verdict = claim.holds(proof), "PASS"
        except Wrong as wrong:
            here, verdict, failed = str(wrong), "FAIL", failed + 1
            look = f"\n   look at {wrong.look or claim.look}"
        seconds = f"{time.monotonic() - started:.0f} s"
        print(f"{number:2} {claim.text} · {claim.figure} · {here} · {verdict} ({seconds}){look}")
        sys.stdout.flush()
    print(f"{len(numbers) - failed} of {len(numbers)} claims hold here, after {time.monotonic() - began:.0f} s")
    if given.folder is None and not failed:
        shutil.rmtree(folder)
    else:
        print(f"files: {folder}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
