"""Texts that prefix LM has cut in two are put together again as they were."""

import torch

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import as_batch
from data_pipeline.loading.texts import with_texts
from data_pipeline.objectives.prefix_lm import PrefixLM
from data_pipeline.packing.examples import balanced
from tests.data_pipeline.example_rows import EOS, PAD, VOCABULARY, ragged_rows
from tests.tables import each


def test_the_example_of_the_docstring():
    batch = {
        "encoder_input_ids": torch.tensor([[5, 6, EOS, 7, 8, EOS]]),
        "labels": torch.tensor([[10, 11, 12, EOS, 13, 14, EOS]]),
        "encoder_segment_ids": torch.tensor([[1, 1, 1, 2, 2, 2]]),
        "decoder_segment_ids": torch.tensor([[1, 1, 1, 1, 2, 2, 2]]),
        "encoder_positions": torch.tensor([[0, 1, 2, 0, 1, 2]]),
        "decoder_positions": torch.tensor([[0, 1, 2, 3, 0, 1, 2]]),
    }
    found = with_texts(batch)
    assert found["text_ids"].tolist() == [[5, 6, 10, 11], [7, 8, 13, 0]]
    assert found["text_indices"].tolist() == [1, 2, 3, 3, 5, 6, 6]
    assert found["in_text"].tolist() == [True, True, True, False, True, True, False]


@each("form", ["a row each", "packed", "balanced"])
def test_texts_are_the_rows_that_were_cut(form):
    """Rows of several lengths, one of which ends with an EOS token of its own."""
    lengths = [12, 8, 4, 10, 12]
    rows, keys = ragged_rows(lengths, 0)
    rows.values[0, 11] = EOS
    packed = form == "packed"
    examples = PrefixLM(length=8 if packed else 12, packed=packed).apply(rows, keys, VOCABULARY, {})
    batch = as_batch(balanced(examples, 2) if form == "balanced" else examples, PAD)
    found = with_texts(batch)
    texts, width = found["text_ids"].tolist(), found["text_ids"].size(1)
    labels = batch["labels"][batch["labels"] != IGNORE_INDEX].tolist()
    whole = {}
    for place, label, inside in zip(found["text_indices"].tolist(), labels, found["in_text"].tolist(), strict=True):
        text, at = divmod(place, width)
        if inside:
            assert whole.get(text, texts[text][: at + 1]) == texts[text][: at + 1]
            whole[text] = [*texts[text][: at + 1], label]
        else:  # after the last token of its text
            assert label == EOS
            assert len(whole[text]) == at + 2
    halves = 2 if packed else 1
    expected = [
        rows.values[row, part * length // halves : (part + 1) * length // halves].tolist()
        for row, length in enumerate(lengths)
        for part in range(halves)
    ]
    assert sorted(whole.values()) == sorted(expected)
    assert len(texts) == len(expected)
    assert labels.count(EOS) - (~found["in_text"]).sum() == 1  # the row's own


def test_rows_without_labels_have_no_text():
    """Those of damaged blocks; a batch of nothing else still has a row, which nothing refers to."""
    ids = torch.tensor([[5, 6, EOS], [EOS, 0, 0]])
    labels = torch.tensor([[10, EOS], [IGNORE_INDEX, IGNORE_INDEX]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    found = with_texts({"encoder_input_ids": ids, "labels": labels, "encoder_attention_mask": mask})
    assert found["text_ids"].tolist() == [[5, 6]]
    assert found["text_indices"].tolist() == [1, 1]
    none = with_texts({"encoder_input_ids": ids[1:], "labels": labels[1:], "encoder_attention_mask": mask[1:]})
    assert none["text_ids"].shape == (1, 1)
    assert len(none["text_indices"]) == len(none["in_text"]) == 0
