"""Applies an objective to the tokens of a text, without a corpus."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from data_pipeline.base import arguments
from data_pipeline.base.config_file import Section, check
from data_pipeline.base.errors import UserError
from data_pipeline.corpus.objectives.objective import Padded, TrainingObjective
from data_pipeline.corpus.objectives.randomness import noise_keys, row_keys
from data_pipeline.corpus.objectives.ul2 import UL2
from data_pipeline.corpus.tokenizer import Tokenizer

OnTokens = Callable[..., tuple[list[int], list[int]]]


class _Given(Section):
    objective: TrainingObjective


def objective(name: str, tokenizer: Tokenizer, /, *, seed: int = 0, **settings: Any) -> OnTokens:
    """A function `apply(tokens, row=0, epoch=0)` that returns (inputs, targets), the token ids of an example.

    `name`: an objective of docs/reference/settings.md, such as "span_corruption". `tokenizer`: a corpus's or a model's.
    `settings`: the keys of `rows.objective` in a corpus file, such as `noise_density=0.3`. The noise is a function of
    `seed`, `row` and `epoch`. It is the noise of the training row with this number in a corpus with this seed; only UL2
    draws the denoiser of a row again.

    Raises UserError for unknown names and settings, for an objective that the tokenizer can't serve, and for an
    objective of pairs of texts. `apply` raises UserError for more tokens than a row has, and for anything but token ids
    and numbers from 0.
    """
    if not isinstance(tokenizer, Tokenizer):
        raise UserError(f"tokenizer: expected the tokenizer of a corpus or a model, got {tokenizer!r}")
    key = arguments.seed(seed)
    made = check({"objective": {**settings, "name": name}}, _Given, "objective()").objective
    vocabulary = tokenizer.vocabulary
    if problems := made.problems(vocabulary):
        raise UserError("\n".join(f"{name}: {problem}" for problem in problems))
    if made.columns and not isinstance(made, UL2):
        raise UserError(f"{name}: expected an objective of one text, but this one needs pairs of texts")

    def apply(tokens: Sequence[int], row: int = 0, epoch: int = 0) -> tuple[list[int], list[int]]:
        given = arguments.token_ids(tokens, tokenizer.size)
        if len(given) > made.whole_length or not made.accepts(len(given)):
            most = made.whole_length
            expected = f"at most {most:,} tokens" if len(given) > most else "tokens that the objective can split"
            raise UserError(f"{name}: expected {expected}, got {len(given):,}")
        ids, epoch = np.array([arguments.integer("row", row, 0)]), arguments.integer("epoch", epoch, 0)
        rows = Padded.full(np.array([given], dtype=np.int64))
        columns = {"denoiser": made.draw(row_keys(key, "denoiser", epoch, ids))} if isinstance(made, UL2) else {}
        example = made.apply(rows, noise_keys(key, "train", epoch, ids), vocabulary, columns)
        inputs, targets = (side.values[0, : side.lengths[0]].tolist() for side in (example.inputs, example.targets))
        return inputs, targets

    return apply
