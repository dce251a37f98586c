"""The hook `retrieval`: its metrics, and that beams find what the scores of all outputs say."""

import json
import math

import pytest
from pydantic import ValidationError

from data_pipeline.base.config_file import check
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from pretrain.config.evaluation import RetrievalSettings
from pretrain.evaluate.retrieval import Retrieval, ndcg, recall
from tests.support.exported import randomise
from tests.support.small_evaluations import BART, CAUSAL, T5, evaluation_of, held_out_after, log_p, log_p_after
from tests.support.tables import each


def test_recall_and_ndcg_of_a_case_worked_by_hand():
    """Relevant at ranks 2 and 4; the best order has them at ranks 1 and 2."""
    found, relevant = ["a", "b", "c", "d"], {"b", "d"}
    assert [recall(found, relevant, k) for k in (1, 2, 4)] == [0, 0.5, 1]
    best = 1 + 1 / math.log2(3)
    assert ndcg(found, relevant, 1) == 0
    assert ndcg(found, relevant, 2) == pytest.approx(1 / math.log2(3) / best)
    assert ndcg(found, relevant, 4) == pytest.approx((1 / math.log2(3) + 1 / math.log2(5)) / best)
    assert ndcg(["b", "d"], relevant, 9) == 1
    assert ndcg(["x", "b"], {"b"}, 2) == pytest.approx(1 / math.log2(3))


ITEMS = ["red", "red dog", "green", "a house", "tree", "river dog"]


@each("family", [T5, CAUSAL])
def test_outputs_come_in_the_order_of_their_probabilities(small_corpus, tmp_path, family):
    """Two rows with the same input are a query with two relevant outputs, and one target isn't allowed."""
    pairs = [("red dog", "tree"), ("x", "green"), ("red dog", "red"), ("y", "nothing")]
    (tmp_path / "dev.tsv").write_text("".join(f"{one}\t{other}\n" for one, other in pairs))
    (tmp_path / "items.txt").write_text("".join(f"{item}\n" for item in ITEMS))
    tokenizer = open_corpus(small_corpus).tokenizer
    model, evaluation = evaluation_of(family, tokenizer)
    randomise(model, std=0.3)
    files = {"file": str(tmp_path / "dev.tsv"), "allowed": str(tmp_path / "items.txt")}
    settings = check({**files, "at": [1, 2, 6]}, RetrievalSettings, "hook")
    result = Retrieval(settings).evaluate(evaluation)
    eos = tokenizer.vocabulary.eos
    relevant = {"red dog": {"tree", "red"}, "x": {"green"}, "y": {"nothing"}}
    expected = []
    for text in relevant:
        read, *items = ([*ids, eos] for ids in tokenizer.encode([text, *ITEMS]))
        scores = [
            log_p_after(model, read, ids) if family is CAUSAL else log_p(model, read, [], ids)[0] for ids in items
        ]
        expected.append([item for _, item in sorted(zip(scores, ITEMS, strict=True), reverse=True)])
    rows = result.tables["retrieval/dev"]
    assert [row["input"] for row in rows] == list(relevant)
    assert [row["found"] for row in rows] == [" | ".join(one[:3]) for one in expected]
    assert rows[0]["reference"] == "tree | red"
    for k in (1, 2, 6):
        for name, metric in (("recall", recall), ("ndcg", ndcg)):
            mean = sum(metric(one, rights, k) for one, rights in zip(expected, relevant.values(), strict=True)) / 3
            assert result.metrics[f"retrieval/dev/{name}_at_{k}"] == pytest.approx(mean)
    assert result.metrics["retrieval/dev/recall_at_6"] == pytest.approx(2 / 3)
    assert "of 3 queries among 6 outputs" in result.lines[0]
    assert result.lines[1] == "warning: dev: the allowed outputs lack all targets of 1 queries"


@each("objective, begins", [(None, True), ("denoising", True), ("text_to_text", False)])
@each("allowed", [True, False])
def test_a_bart_searches_the_outputs_for_a_file_as_it_was_trained(
    spiece, small_corpus, tmp_path, objective, begins, allowed
):
    """With BOS before inputs and outputs, unless it was trained on pairs, as the held-out corpora tell."""
    (tmp_path / "dev.tsv").write_text("".join(f"red {item}\t{item}\n" for item in ITEMS))
    (tmp_path / "items.txt").write_text("".join(f"{item}\n" for item in ITEMS))
    files = {"file": str(tmp_path / "dev.tsv"), **({"allowed": str(tmp_path / "items.txt")} if allowed else {})}
    tokenizer = Tokenizer(SentencePiece.read(spiece), ("<s>", "<mask>"), 20)
    model, evaluation = evaluation_of(BART, tokenizer, held_out_after(objective, open_corpus(small_corpus)))
    randomise(model, std=0.3)
    result = Retrieval(check({**files, "at": [6]}, RetrievalSettings, "hook")).evaluate(evaluation)
    assert result.metrics["retrieval/dev/recall_at_6"] == 1
    begin, eos = [tokenizer.vocabulary.bos] * begins, tokenizer.vocabulary.eos
    for row in result.tables["retrieval/dev"]:
        read, *items = ([*begin, *ids, eos] for ids in tokenizer.encode([row["input"], *ITEMS]))
        scores = [log_p(model, read, [], ids)[0] for ids in items]
        expected = [item for _, item in sorted(zip(scores, ITEMS, strict=True), reverse=True)]
        assert row["found"] == " | ".join(expected[:3])


def test_the_targets_are_the_allowed_outputs_by_default(small_corpus, tmp_path):
    path = tmp_path / "dev.jsonl"
    lines = [{"inputs": "red", "targets": ["tree", "green"]}, {"inputs": "x", "targets": ["a house"]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, evaluation = evaluation_of(T5, open_corpus(small_corpus).tokenizer)
    result = Retrieval(check({"file": str(path), "at": [3]}, RetrievalSettings, "hook")).evaluate(evaluation)
    assert result.metrics["retrieval/dev/recall_at_3"] == 1  # there are three
    assert "of 2 queries among 3 outputs" in result.lines[0]


def test_wrong_settings_are_refused():
    with pytest.raises(ValidationError, match="at: 20 exceeds num_beams, 10"):
        RetrievalSettings(at=[20])
    wrong = RetrievalSettings(allowed="no/such.txt")
    assert wrong.problems({"swap": "text_to_text"}) == ["allowed: no/such.txt: no such file"]
    assert wrong.problems({"text": "span_corruption"})[0] == "corpus: text has no text-to-text pairs"
