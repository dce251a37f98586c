"""Each row is one document or a part of one: fairseq's `complete_doc` break mode, with which BART was trained."""

import numpy as np

from data_pipeline.objectives.text_to_text import TextToText
from data_pipeline.packing.rows import Documents, Rows, Rules


def complete_documents(documents: Documents, rules: Rules) -> Rows:
    """A document longer than a row is cut at the last sentence end that fits, or inside a sentence longer than a row.

    Pairs are truncated on each side instead; their rows have the column "target_start".
    """
    if isinstance(rules.objective, TextToText):
        return _pairs(documents, rules.objective)
    longest = rules.objective.raw_length
    ends_sentence = rules.vocabulary.sentence_ends[documents.tokens]
    starts: list[int] = []
    ends: list[int] = []
    for start, end in zip(documents.starts[:-1].tolist(), documents.starts[1:].tolist(), strict=True):
        while end - start > longest:
            sentence_ends = np.flatnonzero(ends_sentence[start : start + longest])
            cut = start + (int(sentence_ends[-1]) + 1 if len(sentence_ends) else longest)
            starts.append(start)
            ends.append(cut)
            start = cut
        starts.append(start)
        ends.append(end)
    lengths = np.array(ends, dtype=np.int64) - np.array(starts, dtype=np.int64)
    kept = np.array([rules.objective.accepts(length) for length in lengths.tolist()], dtype=bool)
    tokens = documents.tokens[np.repeat(kept, lengths)]
    offsets = np.append(0, np.cumsum(lengths[kept]))
    first = np.isin(np.array(starts, dtype=np.int64)[kept], documents.starts[:-1])
    return Rows(tokens, offsets, offsets[:-1][first], len(documents.tokens) - len(tokens))


def _pairs(documents: Documents, objective: TextToText) -> Rows:
    assert documents.targets is not None, "pairs are tokenized with their targets"
    lengths = np.diff(documents.starts)
    whole_inputs, whole_targets = documents.targets, lengths - documents.targets
    inputs = np.minimum(whole_inputs, objective.inputs_length - 1)
    targets = np.minimum(whole_targets, objective.targets_length - 1)
    position = np.arange(len(documents.tokens)) - np.repeat(documents.starts[:-1], lengths)
    in_target = position - np.repeat(documents.targets, lengths)
    kept = np.where(in_target < 0, position < np.repeat(inputs, lengths), in_target < np.repeat(targets, lengths))
    offsets = np.append(0, np.cumsum(inputs + targets))
    dropped = int(np.count_nonzero(~kept))
    return Rows(
        documents.tokens[kept],
        offsets,
        offsets[:-1],
        dropped,
        {"target_start": inputs.astype(np.int32)},
        cut_inputs=int(np.count_nonzero(inputs < whole_inputs)),
        cut_targets=int(np.count_nonzero(targets < whole_targets)),
    )
