"""What a context is worth: inputs exchanged and left out, and bigrams beside them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from data_pipeline.corpus import open_corpus
from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.batches import validation_batches
from data_pipeline.text.vocabulary import Vocabulary
from pretrain.config.evaluation import InputUseSettings
from pretrain.evaluate.input_use import Bigrams, InputUse, first_of_spans, with_input_of, without_input
from pretrain.evaluate.validation_loss import entropy
from tests.support.small_evaluations import evaluated_alone
from tests.support.tables import each

CPU = torch.device("cpu")


class Copier:
    """Has a loss of 1 for each target that is among its row's inputs, and of 3 for every other."""

    device = CPU

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def losses(self, batch):
        labels, inputs = batch["labels"], batch["encoder_input_ids"]
        among = (labels[:, :, None] == inputs[:, None, :]).any(dim=-1)
        return {"labels": torch.where(among, 1.0, 3.0) * (labels != -100)}


class Deaf(Copier):
    """Has a loss of 2 for the first token of a span, and of 1 for every other, whatever the input."""

    def losses(self, batch):
        labels = batch["labels"]
        return {"labels": (1.0 + first_of_spans(labels, self.vocabulary).float()) * (labels != -100)}


def test_objectives_without_inputs_of_their_own_are_refused_with_the_reason():
    held_out = {"a": "causal_lm", "b": "full_lm", "c": "in_one_row of prefix_lm", "d": "prefix_lm"}
    assert InputUseSettings().problems(held_out) == [
        "hook: inputs of a are its targets (causal_lm), so none can be exchanged",
        "hook: b has no input (full_lm), so none can be exchanged",
        "hook: inputs of c are its targets (in_one_row of prefix_lm), so none can be exchanged",
    ]


@each("model, rows, of", [(Copier, 1024, "all {all}"), (Deaf, 8, "8 of {all}")])
def test_the_input_is_worth_what_the_loss_rises_by_another(small_corpus, model, rows, of):
    """Deaf to its input, a model has the same loss after another; all lines are of the rows that the first names."""
    corpus = open_corpus(small_corpus)
    evaluation = evaluated_alone(model(corpus.tokenizer.vocabulary), corpus.tokenizer, {"small": corpus}, 8)
    result = InputUse(InputUseSettings(rows=rows)).evaluate(evaluation)
    get = {name.removeprefix("input_use/small/"): value for name, value in result.metrics.items()}
    (line,) = result.lines
    assert get["worth"] == pytest.approx(get["other_input_loss"] - get["loss"])
    if model is Deaf:
        assert get["worth"] == get["first_token_worth"] == get["later_token_worth"] == 0.0
        assert (get["first_token_loss"], get["later_token_loss"]) == (2.0, 1.0)
        assert " held-out rows: 0.00 nats/token, 0.00 at the first token of a span (" in line
    else:
        assert 1.0 < get["loss"] < get["other_input_loss"] < get["no_input_loss"] == 3.0  # no text token is EOS
    assert get["bigram_entropy"] > 0.5
    assert get["unigram_entropy"] < math.log(500)
    assert line.startswith(f"input use on small, {of.format(all=corpus.rows('validation'))} held-out rows: ")
    assert f"(text loss {get['loss']:.4f}; with another row's input {get['other_input_loss']:.4f}, " in line
    assert line.endswith(f", bigrams of training rows {get['bigram_entropy']:.4f})")


def test_a_single_row_has_no_other_input(small_corpus):
    """The row would be exchanged with itself, and its input would be worth 0."""
    corpus = open_corpus(small_corpus)
    splits = {**corpus.manifest.splits, "validation": replace(corpus.manifest.splits["validation"], rows=1)}
    single = replace(corpus, manifest=replace(corpus.manifest, splits=splits))
    evaluation = evaluated_alone(Copier(corpus.tokenizer.vocabulary), corpus.tokenizer, {"small": single}, 8)
    found = InputUse(InputUseSettings()).evaluate(evaluation)
    assert found.metrics == {}
    assert found.lines == ["input use on small: left out, since one held-out row has no other row's input"]


def test_rows_exchange_inputs_over_the_whole_split_however_it_is_batched(small_corpus):
    corpus = open_corpus(small_corpus)
    total = corpus.rows("validation")
    one = BatchLayout(0, 1, 1, 1)
    rows = [batch["encoder_input_ids"][0].tolist() for batch in validation_batches(corpus, one)]
    others = [batch["encoder_input_ids"][0].tolist() for batch in validation_batches(corpus, one, shift=total // 2)]
    assert others == rows[total // 2 :] + rows[: total // 2]


def test_the_parts_of_a_batch_that_are_exchanged():
    inputs, labels = torch.tensor([[5, 6]]), torch.tensor([[7]])
    batch = {"encoder_input_ids": inputs, "encoder_attention_mask": torch.tensor([[1, 0]]), "labels": labels}
    other = {"encoder_input_ids": torch.tensor([[8, 9, 1]]), "labels": torch.tensor([[4]])}
    mixed = {name: tensor.tolist() for name, tensor in with_input_of(batch, other).items()}
    assert mixed == {"encoder_input_ids": [[8, 9, 1]], "labels": [[7]]}
    assert without_input(batch, eos=1)["encoder_input_ids"].tolist() == [[1]]


def test_first_tokens_of_spans_follow_sentinels():
    vocabulary = Vocabulary(size=14, text=(3, 10), pad=0, eos=1, unk=2, first_sentinel=13, sentinels=4)
    first = vocabulary.sentinel_ids.start
    labels = torch.tensor([[first, 5, 6, first + 1, 7, 1, -100]])
    assert first_of_spans(labels, vocabulary).tolist() == [[False, True, False, False, True, False, False]]


def test_bigrams_of_training_rows_may_be_above_the_entropy_of_held_out_rows():
    """Trained on "0 1", judged on "1 0": each pair is new. The entropy of the held-out tokens themselves is ln 2."""
    held_out = np.array([[1, 0]])
    losses = Bigrams(iter([np.array([[0, 1]])]), 2).losses(held_out)
    first = 0.75 * 0.5  # of a row's first token: discounted from 0, spread over the unigrams ½ and ½
    assert losses == pytest.approx(-np.log([[first, 0.5]]))
    assert losses.mean() > math.log(2) == entropy(torch.tensor([1, 1]))


def test_a_bigram_model_by_hand():
    """Rows "0 1", "0 1" and "0 2" of three ids. After 0: 1 twice and 2 once, of which ¾ each are left to unigrams."""
    rows = np.array([[0, 1], [0, 1], [0, 2]])
    model = Bigrams(iter([rows[:2], rows[2:]]), 3)
    unigram = np.array([4, 3, 2]) / 9  # each id once more than it occurs
    left = 0.75 * 2 / 3
    expected = [(2 - 0.75) / 3 + left * unigram[1], (1 - 0.75) / 3 + left * unigram[2], left * unigram[0]]
    assert sum(expected) == pytest.approx(1.0)
    losses = model.losses(np.array([[0, 1], [0, 2], [0, 0]]))
    assert losses[:, 1] == pytest.approx(-np.log(expected))
    start = (3 - 0.75) / 3 + 0.75 / 3 * unigram[0]  # three rows begin with 0
    assert losses[:, 0] == pytest.approx([-math.log(start)] * 3)
    never_first = model.losses(np.array([[0, 1, 0, -100]]))[0]
    assert never_first[2] == pytest.approx(-math.log(unigram[0]))  # nothing came after 1
    assert never_first[3] == 0.0
