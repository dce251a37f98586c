"""Documents concatenated and cut into rows without padding: T5's packing (Raffel et al. 2020, section 3.1.1)."""

import numpy as np

from data_pipeline.objectives.randomness import row_keys
from data_pipeline.objectives.ul2 import UL2
from data_pipeline.packing.rows import Documents, Rows, Rules


def concatenate(documents: Documents, rules: Rules) -> Rows:
    """Rows of exactly the objective's raw length. The tail that doesn't fill a row is dropped or becomes a shorter row.

    UL2's denoisers have different lengths, so each row's denoiser is drawn here and stored with the row.
    """
    offsets, columns = rows_of_tokens(len(documents.tokens), rules)
    dropped = len(documents.tokens) - int(offsets[-1])
    return Rows(documents.tokens, offsets, documents.starts[:-1], dropped, columns)


def rows_of_tokens(tokens: int, rules: Rules) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(offsets (rows + 1,), columns) of the rows that a bucket of `tokens` tokens makes."""
    objective = rules.objective
    columns: dict[str, np.ndarray] = {}
    if isinstance(objective, UL2):
        most = np.arange(tokens // int(objective.raw_lengths.min()) + 1)
        drawn = objective.draw(row_keys(rules.seed, f"denoiser/{rules.key}", 0, most))
        ends = np.cumsum(objective.raw_lengths[drawn], dtype=np.int64)
        rows = int(np.searchsorted(ends, tokens, side="right"))
        offsets = np.append(0, ends[:rows])
        left = tokens - int(offsets[-1])
        if rules.keep_tail and objective.denoisers[int(drawn[rows])].denoiser.accepts(left):
            offsets = np.append(offsets, tokens)
        columns["denoiser"] = drawn[: len(offsets) - 1]
    else:
        offsets = np.arange(0, tokens + 1, objective.raw_length, dtype=np.int64)
        if rules.keep_tail and objective.accepts(tokens - int(offsets[-1])):
            offsets = np.append(offsets, tokens)
    return offsets, columns
