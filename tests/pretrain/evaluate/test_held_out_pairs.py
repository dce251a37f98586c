"""Hooks get inputs of pairs as in training, and answer some of them at a time."""

from types import SimpleNamespace

from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.objectives.text_to_text import TextToText
from data_pipeline.loading.batch_layout import BatchLayout
from pretrain.evaluate.held_out_pairs import Task, until_late
from pretrain.run import watchdog


def test_inputs_are_cut_between_their_first_ids_and_eos(small_corpus):
    tokenizer, text = open_corpus(small_corpus).tokenizer, "red dog green house tree river"
    task = Task("swap", TextToText(inputs_length=6), [], None, None)
    (ids,), eos = tokenizer.encode([text]), tokenizer.vocabulary.eos
    assert len(ids) >= 6
    assert task.input_ids([text], tokenizer, []) == [[*ids[:5], eos]]
    assert task.input_ids([text], tokenizer, [7]) == [[7, *ids[:4], eos]]


def test_some_items_are_answered_at_a_time_until_the_budget_is_spent(monkeypatch):
    """32 of each of two ranks."""
    collectives, parts, signs = SimpleNamespace(late=False), [], []
    layout = BatchLayout(rank=0, ranks=2, micro_batch=8, accumulation=1)
    evaluation = SimpleNamespace(held_out=SimpleNamespace(layout=layout), collectives=collectives)
    monkeypatch.setattr(watchdog, "alive", lambda: signs.append(True))

    def work(items):
        parts.append(items)
        collectives.late = len(parts) == late_after
        return [-item for item in items]

    late_after = 2
    assert until_late(evaluation, range(150), work) == [-item for item in range(128)]
    assert (parts, len(signs)) == ([range(64), range(64, 128)], 2)
    parts.clear()
    late_after = 9
    assert until_late(evaluation, range(150), work) == [-item for item in range(150)]
