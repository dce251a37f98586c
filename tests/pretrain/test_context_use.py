"""What a context is worth: inputs exchanged and left out, bigrams beside them, and continuations of a text."""

import math

import numpy as np
import pytest
import torch

from data_pipeline.base.config_file import check
from data_pipeline.corpus import open_corpus
from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.batches import validation_batches
from data_pipeline.loading.reader import Reader
from data_pipeline.text.vocabulary import Vocabulary
from pretrain.config.evaluation import ContinuationSettings, InputUseSettings
from pretrain.evaluate.continuation import Continuation
from pretrain.evaluate.input_use import Bigrams, InputUse, first_of_spans, with_input_of, without_input
from pretrain.evaluate.validation_loss import entropy
from pretrain.run.metrics_file import read_metrics
from tests.pretrain.runs import run_file, train_ranks
from tests.pretrain.small_evaluations import CAUSAL, T5, evaluated_alone, evaluation_of, log_p, log_p_after
from tests.tables import each

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


@each("subject, rows, of", [(Copier, 1024, "all {all}"), (Deaf, 8, "8 of {all}")])
def test_the_input_is_worth_what_the_loss_rises_by_another(small_corpus, subject, rows, of):
    """Deaf to its input, a model has the same loss after another; all lines are of the rows that the first names."""
    corpus = open_corpus(small_corpus)
    evaluation = evaluated_alone(subject(corpus.tokenizer.vocabulary), corpus.tokenizer, {"small": corpus}, 8)
    findings = InputUse(InputUseSettings(rows=rows)).evaluate(evaluation)
    get = {name.removeprefix("input_use/small/"): value for name, value in findings.metrics.items()}
    (line,) = findings.lines
    assert get["worth"] == pytest.approx(get["other_input_loss"] - get["loss"])
    if subject is Deaf:
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


# The likelihood of the second half of a text after its first half, in the form of each family's training


ROWS = 10


def held_out_texts(corpus, number):
    rows = Reader(corpus, "validation").tokens(np.arange(number))
    return [row[:length].tolist() for row, length in zip(rows.values, rows.lengths, strict=True)]


def scored(model, before, text, after, form, vocabulary):
    """log p of `text` between two parts, the second of which may be empty."""
    first, second, third = (vocabulary.first_sentinel - number for number in range(3))
    if form is None:
        return log_p_after(model, [first, *before, second, *after, third] if after else before, text)
    blank = [first] if form == "blank" else []
    return log_p(model, [*before, *blank, *after, vocabulary.eos], blank, text)[0]


def cut(text, start, end):
    return text[:start], text[start:end], text[end:]


@each("settings, form", [(T5, "answer"), (T5, "blank"), (CAUSAL, None)])
def test_it_is_the_sum_of_the_models_log_probabilities(small_corpus, settings, form):
    corpus = open_corpus(small_corpus)
    model, evaluation = evaluation_of(settings, corpus.tokenizer, {"small": corpus})
    texts = [text for text in held_out_texts(corpus, ROWS) if len(text) > 2]
    assert min(map(len, texts)) > 5  # of which a third holds 2 tokens
    tasks = {
        "continuation": (None, [cut(one, len(one) // 2, len(one)) for one in texts]),
        "infilling": (None, [cut(one, len(one) // 3, 2 * len(one) // 3) for one in texts]),
        "infilling of 2": (2, [cut(one, (len(one) - 2) // 2, (len(one) + 2) // 2) for one in texts]),
    }
    for task, (length, parts) in tasks.items():
        given = {"rows": ROWS, "form": form, "infilling_length": length}
        found = Continuation(check(given, ContinuationSettings, "hook")).evaluate(evaluation).metrics
        name = f"{task.split()[0]}/small"
        if form == "answer" and task != "continuation":
            assert f"{name}/loss" not in found
            continue
        others = [*parts[len(parts) // 2 :], *parts[: len(parts) // 2]]
        loss, other = (
            -sum(
                scored(model, before, text, after, form, corpus.tokenizer.vocabulary)
                for (before, _, after), (_, text, _) in zip(contexts, parts, strict=True)
            )
            for contexts in (parts, others)
        )
        tokens = sum(len(text) for _, text, _ in parts)
        size = sum(len(corpus.tokenizer.decode(text).encode()) for _, text, _ in parts)
        assert found[f"{name}/loss"] == pytest.approx(loss / tokens, rel=1e-5)
        assert found[f"{name}/other_context_loss"] == pytest.approx(other / tokens, rel=1e-5)
        assert found[f"{name}/bits_per_byte"] == pytest.approx(loss / math.log(2) / size, rel=1e-5)


@pytest.mark.slow
def test_ranks_of_zero_3_score_their_shares_in_mid_run(small_corpus, tmp_path):
    """Of three batches, rank 0 has two and rank 1 one."""
    sharded = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    hooks = [{"hook": "continuation", "every_steps": 2, "rows": 6}]
    found = []
    for ranks in (1, 2):
        path = run_file(tmp_path / str(ranks), small_corpus, deepspeed=sharded, evaluation=hooks, run={"max_steps": 5})
        assert train_ranks(path, ranks) == [0] * ranks
        rows = {row.step: row.metrics for row in read_metrics(tmp_path / str(ranks) / "run")}
        found.append([rows[step]["continuation/small/loss"] for step in (2, 4, 5)])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
