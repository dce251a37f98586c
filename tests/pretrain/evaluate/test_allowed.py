"""Answers constrained to a list of allowed outputs, compared with the scores of all of them."""

import json
import random

import pytest
import torch

from data_pipeline.base.errors import UserError
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.allowed import AllowedOutputs, Trie
from pretrain.loaded import PretrainedModel
from tests.support.exported import randomise
from tests.support.small_evaluations import log_p
from tests.support.small_models import as_at_the_start
from tests.support.tables import each

WORDS = ["The Work", "The Work is", "The Works", "a license", "license", "any  person", "You"]


@pytest.fixture(scope="module")
def tokenizer(spiece):
    return Tokenizer(SentencePiece.read(spiece), (), 20)


@pytest.fixture
def model(tokenizer):
    """In fp64, so that rounding never decides between two outputs."""
    network = randomise(as_at_the_start("t5", vocab_size=tokenizer.size), 0.5).double()
    return PretrainedModel(TrainedModel(network, tokenizer))


def test_a_trie_allows_the_ids_that_follow():
    rows = [[5, 6, 1], [5, 7, 1], [5, 1], [4, 6, 1], [5, 6, 1]]
    trie, ends = Trie.of(rows, 9)
    for row, end in zip(rows, ends.tolist(), strict=True):
        node = torch.zeros(1, dtype=torch.long)
        for depth, id_ in enumerate(row):
            following = {other[depth] for other in rows if other[:depth] == row[:depth] and len(other) > depth}
            scores = trie.only(torch.zeros(1, 9), node)[0]
            assert {number for number, score in enumerate(scores.tolist()) if score == 0} == following
            node = trie.after(node, torch.tensor([id_]))
        assert node.item() == end
    nodes = torch.tensor([int(ends[0]), 0, 0])
    nowhere = 1 + len({(*row[:end],) for row in rows for end in range(1, len(row) + 1)})
    assert trie.after(nodes, torch.tensor([3, 8, 5])).tolist() == [nowhere, nowhere, 2]  # 4 leads to node 1
    assert ends[0] == ends[4]


@each("penalty", [0.0, 1.0])
def test_beams_are_the_allowed_outputs_in_the_order_of_their_scores(model, tokenizer, penalty):
    """As many beams as outputs find all of them; fewer beams return the best of them first."""
    text = "A <extra_id_0> b"
    given = tokenizer.encode_with_sentinels(text)
    scores = {}
    for word in WORDS:
        ids = [*tokenizer.encode(word)[0], tokenizer.vocabulary.eos]
        scores[word] = log_p(model.model, given, [], ids)[0] / len(ids) ** penalty
    best = sorted(scores, key=scores.__getitem__, reverse=True)
    settings = {"num_beams": 20, "num_return_sequences": 20, "length_penalty": penalty}
    found = model.generate([text, "x"], allowed=WORDS, **settings)
    assert [one.generated for one in found[: len(WORDS)]] == best
    assert [one.score for one in found[: len(WORDS)]] == pytest.approx([scores[word] for word in best], rel=1e-5)
    assert sorted(one.generated for one in found[len(WORDS) :]) == sorted(WORDS)
    few = model.generate(text, allowed=WORDS, **{**settings, "num_beams": 4, "num_return_sequences": 2})
    assert [one.score for one in few] == pytest.approx([scores[one.generated] for one in few], rel=1e-5)


def test_greedy_decoding_and_samples_are_allowed_outputs(model, tokenizer):
    """Each sample is drawn with the probability of its ids among those that may follow."""
    assert model.generate("x", allowed=WORDS)[0].generated in WORDS
    for options in ({}, {"top_k": 2}, {"top_p": 0.5}):
        found = model.generate("x", allowed=WORDS, samples=50, **options)
        assert {one.generated for one in found} <= {*WORDS}
    two = ["a license", "You"]  # which begin with different ids
    firsts = [ids[0] for ids in tokenizer.encode(two)]
    given = tokenizer.encode_with_sentinels("x")
    chances = torch.tensor([log_p(model.model, given, [], [id_])[0] for id_ in firsts]).softmax(dim=0)
    found = model.generate("x", allowed=two, samples=2000)
    share = sum(one.generated == two[0] for one in found) / len(found)
    assert share == pytest.approx(float(chances[0]), abs=0.05)


def test_outputs_are_read_from_lines_of_texts_or_ids(model, tokenizer, tmp_path):
    texts, ids = tmp_path / "lines.txt", tmp_path / "ids.jsonl"
    texts.write_text("".join(f"{word}\n" for word in WORDS))
    ids.write_text("".join(f"{json.dumps(one)}\n" for one in [*tokenizer.encode(WORDS[:5]), WORDS[5], WORDS[6]]))
    settings = {"num_beams": 7, "num_return_sequences": 7}
    found, by_ids = (model.generate("x", allowed=path, **settings) for path in (texts, ids))
    assert sorted(one.generated for one in found) == sorted(WORDS)
    assert [one.score for one in by_ids] == [one.score for one in found]
    assert [" ".join(one.generated.split()) for one in by_ids] == [" ".join(one.generated.split()) for one in found]


@each(
    "name, content, said",
    [
        ("lines.txt", "a\n\nb\n", "line 2: expected a text, got ''"),
        ("ids.jsonl", '"a"\n[1.5]\n', "line 2: expected a JSON string or a list of ids, got '[1.5]'"),
        ("ids.jsonl", '"a\n', "line 1: expected a JSON string or a list of ids, got"),
        ("ids.jsonl", "[5, 999]\n", "output 1: expected token ids from 0 to 319, got 999"),
        ("ids.jsonl", "[5, 1]\n", "output 1: EOS, 1, is added; leave it out"),
        ("lines.txt", "", "has no line of text"),
    ],
)
def test_a_file_with_something_else_is_refused(tokenizer, tmp_path, name, content, said):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError) as refused:
        AllowedOutputs.read(path, tokenizer)
    assert str(refused.value).startswith(f"{path}: ")
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_settings_that_forbid_outputs_are_refused(model):
    with pytest.raises(UserError, match=r"longest output has \d+ tokens with EOS, more than max_new_tokens, 2"):
        model.generate("x", allowed=WORDS, max_new_tokens=2)
    with pytest.raises(UserError, match="would forbid outputs"):
        model.generate("x", allowed=WORDS, min_new_tokens=2)
    with pytest.raises(UserError, match="allowed: has no output"):
        model.generate("x", allowed=[])
    with pytest.raises(UserError, match="allowed: output 2: expected token ids, got 7"):
        model.generate("x", allowed=["a", 7])


def test_many_outputs_make_a_trie_of_as_many_edges_as_they_have_beginnings():
    rng = random.Random(0)
    rows = [[*(rng.randrange(2, 50) for _ in range(rng.randint(1, 6))), 1] for _ in range(3000)]
    trie, ends = Trie.of(rows, 50)
    beginnings = {(*row[:end],) for row in rows for end in range(1, len(row) + 1)}
    nowhere = trie.after(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))  # no row has id 0
    assert nowhere.item() == len(beginnings) + 1
    assert len({*ends.tolist()}) == len({(*row,) for row in rows})
