"""How many rows per second and core does each objective make?

    python benchmarks/objectives_speed.py [--batch 64] [--seconds 1.0]

Rows are random tokens, of the length that each objective needs at its default settings (512 for BERT's and BART's).
Noise keys are drawn per epoch, as in the loader. One process; the best of five measurements.
"""

import argparse
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from data_pipeline.objectives import UL2, Objective, Padded, SpanCorruption, TextToText
from data_pipeline.objectives.causal import CausalLM
from data_pipeline.objectives.denoising import Denoising
from data_pipeline.objectives.iid_denoising import IidDenoising
from data_pipeline.objectives.masked_lm import MaskedLM
from data_pipeline.objectives.prefix_lm import FullLM, PrefixLM
from data_pipeline.objectives.randomness import noise_keys
from data_pipeline.text.vocabulary import Vocabulary

SIZE = 32_300
_TOKENS = np.arange(SIZE)
VOCABULARY = Vocabulary(
    SIZE,
    (3, 32_000),
    pad=0,
    eos=1,
    unk=2,
    bos=32_000,
    mask=32_001,
    first_sentinel=SIZE - 1,
    sentinels=200,
    special={name: 32_002 + number for number, name in enumerate(("[R]", "[S]", "[X]", "[CLS]", "[SEP]"))},
    word_starts=_TOKENS % 3 != 0,
    sentence_ends=_TOKENS % 25 == 0,
)
OBJECTIVES: dict[str, Objective] = {
    "span_corruption (T5)": SpanCorruption(),
    "span_corruption, random_roll": SpanCorruption(random_roll=True),
    "iid_denoising": IidDenoising(),
    "prefix_lm": PrefixLM(),
    "prefix_lm, packed": PrefixLM(packed=True),
    "full_lm": FullLM(),
    "ul2": UL2(),
    "denoising (BART)": Denoising(),
    "denoising, masking alone": Denoising(permute_sentence_ratio=0.0),
    "causal_lm": CausalLM(length=512),
    "masked_lm (RoBERTa)": MaskedLM(),
    "masked_lm, next_sentence (BERT)": MaskedLM(next_sentence=True),
    "text_to_text": TextToText(),
}


def rows_per_second(objective: Objective, batch: int, seconds: float) -> float:
    random = np.random.default_rng(0)
    columns = {
        "denoiser": random.integers(0, 7, batch),
        "second_start": np.full(batch, objective.raw_length // 2),
        "is_next": random.integers(0, 2, batch),
        "target_start": np.full(batch, objective.raw_length * 4 // 5),
    }
    lengths = np.full(batch, objective.raw_length)
    if isinstance(objective, UL2):
        lengths = objective.raw_lengths[columns["denoiser"]]
    rows = Padded(random.integers(3, 32_000, (batch, int(lengths.max()))).astype(np.uint16), lengths)
    best, ids = 0.0, np.arange(batch)
    for _ in range(5):
        done, started = 0, time.process_time()
        while time.process_time() - started < seconds / 5:
            objective.apply(rows, noise_keys(0, "train", done, ids), VOCABULARY, columns)
            done += 1
        best = max(best, done * batch / (time.process_time() - started))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each measurement")
    arguments = parser.parse_args()
    table = Table("objective", "tokens of a row", *(f"rows/s, batches of {batch:,}" for batch in arguments.batch))
    for name, objective in OBJECTIVES.items():
        figures = [f"{rows_per_second(objective, batch, arguments.seconds):,.0f}" for batch in arguments.batch]
        table.add_row(name, f"{objective.raw_length:,}", *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
