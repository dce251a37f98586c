"""The arguments of each peer's script, and the sizes that all scripts share."""

import argparse
from dataclasses import dataclass
from pathlib import Path

ROWS = 16  # of a step
EVERY = 10  # steps between checkpoints
BUFFER = 128  # rows that a stream is shuffled among: small, so that the text is enough for a peer that loses the buffer
RATE = 1e-3
# a T5 v1.1 of a million parameters
T5 = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}


@dataclass(frozen=True)
class Arguments:
    """`text`: the file of lines; `folder`: of the run; `resume`: whether the run has begun before; `way`: which of the
    documented ways to resume a script takes, where there are several."""

    text: Path
    folder: Path
    seed: int
    steps: int
    resume: bool
    way: str


def parse() -> Arguments:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--way", default="")
    return Arguments(**vars(parser.parse_args()))
