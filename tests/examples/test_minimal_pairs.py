"""Minimal pairs: scores are sums of the model's own losses, in training's form; a random choice is worth one half."""

import json
from pathlib import Path

import pytest
import yaml

from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.corpus import open_corpus
from examples.minimal_pairs.pairs import Pair, SentencePrompts, accuracies, model_score, read_pairs
from pretrain.evaluate.prompt_format import PromptFormat, PromptScores
from tests.conftest import TOP
from tests.support.forked import run_forked
from tests.support.runs import run_file, train_ranks
from tests.support.small_evaluations import CAUSAL, T5, evaluation_of, log_p, log_p_after
from tests.support.tables import each


@pytest.fixture(scope="module")
def tokenizer(small_corpus):
    return open_corpus(small_corpus).tokenizer


@pytest.fixture(scope="module")
def run(small_corpus, tmp_path_factory):
    """A run of one step."""
    folder = tmp_path_factory.mktemp("run")
    assert train_ranks(run_file(folder, small_corpus, run={"max_steps": 1}, evaluation=[]), 1) == [0]
    return folder / "run"


SENTENCES = ["The cats were asleep.", "No one has seen it", "Rain"]
MINIMAL = [
    ("The cats sleep.", "The cats sleeps.", "agreement", "morphology"),
    ("He saw himself.", "He saw herself.", "anaphor", "binding"),
    ("She has seen it.", "She has saw it.", "participle", "morphology"),
    ("They run.", "They runs.", "agreement", "morphology"),
]


def scored_by(settings, tokenizer, objective, name):
    """The model, and the scores of SENTENCES."""
    model, evaluation = evaluation_of(settings, tokenizer)
    prompt_format = PromptFormat.choose(model.config, tokenizer.vocabulary, None, objective)
    likelihoods = PromptScores(prompt_format, evaluation, 4)
    return model, model_score(name, SentencePrompts(prompt_format), tokenizer, likelihoods)(SENTENCES)


@each("name", ["word", "span", "sentence", "official", "no_input"])
def test_the_scores_of_a_denoiser_are_sums_of_its_log_probabilities(tokenizer, name):
    model, found = scored_by(T5, tokenizer, "span_corruption", name)
    vocabulary = tokenizer.vocabulary
    eos, blank = vocabulary.eos, vocabulary.first_sentinel
    for score, ids in zip(found, tokenizer.encode(SENTENCES), strict=True):
        if name == "sentence":
            expected, _ = log_p(model, [blank, eos], [blank], [*ids, eos])
        elif name == "official":
            expected = sum(
                log_p(model, [*ids[:place], blank, *ids[place + 1 :], eos], [blank], [id_], starts=False)[0]
                for place, id_ in enumerate(ids)
            )
        else:
            starts = [place for place in range(len(ids)) if place == 0 or vocabulary.word_starts[ids[place]]]
            ends, width = [*starts[1:], len(ids)], 3 if name == "span" else 1
            expected = 0.0
            for first in range(1 - width, len(starts)):
                begin, end = starts[max(first, 0)], ends[min(first + width, len(starts)) - 1]
                shown = [blank, eos] if name == "no_input" else [*ids[:begin], blank, *ids[end:], eos]
                expected += log_p(model, shown, [blank], [*ids[begin:end], eos])[0] / width
        assert score == pytest.approx(expected, rel=1e-5)


def test_a_decoder_has_the_likelihood_of_the_sentence_alone(tokenizer):
    model, found = scored_by(CAUSAL, tokenizer, "causal_lm", "sentence")
    for score, ids in zip(found, tokenizer.encode(SENTENCES), strict=True):
        assert score == pytest.approx(log_p_after(model, [tokenizer.vocabulary.eos], ids), rel=1e-5)
    assert SentencePrompts(PromptFormat("continuation", tokenizer.vocabulary, model.config)).scores == ["sentence"]


def test_ties_count_half_and_groups_weigh_the_same():
    pairs = {"a": [Pair("x", "y", "a", "g"), Pair("yy", "x", "a", "g")], "b": [Pair("xx", "yy", "b", "g")]}
    pairs["c"] = [Pair("xyz", "x", "c", "h")]
    found = accuracies(pairs, lambda sentences: [float(len(one)) for one in sentences])
    assert found.by_paradigm == {"a": 0.75, "b": 0.5, "c": 1.0}
    assert found.by_group == {"g": 0.625, "h": 1.0}
    assert found.of_paradigms == 0.75
    assert found.of_groups == 0.8125


def pairs_in(folder: Path) -> Path:
    folder.mkdir()
    keys = ("sentence_good", "sentence_bad", "UID", "linguistics_term")
    lines = [json.dumps(dict(zip(keys, row, strict=True))) for row in MINIMAL]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_pairs_are_read_as_in_blimps_paper_and_wrong_ones_are_one_line(tmp_path):
    selection = {"UID": "animate_subject_trans", "linguistics_term": "s-selection"}
    (tmp_path / "blimp").mkdir()
    good = "a\u2028b"  # which splits lines of text, not of JSON
    line = json.dumps({"sentence_good": good, "sentence_bad": "b", **selection}, ensure_ascii=False)
    (tmp_path / "blimp/pairs.jsonl").write_text(f"\ufeff{line}")  # a byte order mark is no text
    (found,) = read_pairs(tmp_path / "blimp")["animate_subject_trans"]
    assert (found.good, found.group) == (good, "argument_structure")
    folder = pairs_in(tmp_path / "pairs")
    counts = {name: len(one) for name, one in read_pairs(folder, 1).items()}
    assert counts == {"agreement": 1, "anaphor": 1, "participle": 1}
    for line, message in (
        (b'{"UID": "a"}', "sentence_good: Field required"),
        (b"{", "Invalid JSON"),
        (b"\x00\x05\x16\xb0", "Invalid JSON"),
    ):
        (folder / "wrong.jsonl").write_bytes(line)
        with pytest.raises(FailedError, match=rf"wrong.jsonl:1: damaged: {message}"):
            read_pairs(folder)
    (folder / "wrong.jsonl").rename(folder / "._agreement.jsonl")  # as macOS puts it beside the file in an archive
    assert len(read_pairs(folder)) == 3
    with pytest.raises(UserError, match=r"no \*\.jsonl with pairs there"):
        read_pairs(tmp_path)


def test_the_command_prints_groups_and_scores_beside_their_controls(run, tmp_path):
    done = run_forked(run, pairs_in(tmp_path / "pairs"), "--out", tmp_path, command="examples.minimal_pairs")
    assert done.returncode == 0, done.stderr
    first, _, *rows = done.stdout.splitlines()
    scores = ["word", "span", "official", "no_input", "sentence", "random", "unigram"]
    assert [cell.strip() for cell in first.strip("| ").split("|")] == scores
    names = ["binding", "morphology", "mean of groups", "mean of paradigms"]
    assert [row.split("|")[1].strip() for row in rows] == names
    found = json.loads((tmp_path / "minimal_pairs.json").read_text())
    assert list(found) == scores
    assert set(found["word"]["by_paradigm"]) == {"agreement", "anaphor", "participle"}


@pytest.mark.slow
def test_the_harness_task_chooses_by_the_score_of_the_sentence(run, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="the extra lm-eval isn't installed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    tasks, pairs = tmp_path / "tasks", pairs_in(tmp_path / "pairs")
    tasks.mkdir()
    task = yaml.safe_load((TOP / "configs/lm_eval/minimal_pairs.yaml").read_text())
    task["dataset_kwargs"]["data_files"]["test"] = str(pairs / "*.jsonl")
    (tasks / "minimal_pairs.yaml").write_text(yaml.dump(task))
    by_task = run_forked("evaluate", run, "--lm-eval", "minimal_pairs", "--include-path", tasks, "--json")
    assert by_task.returncode == 0, by_task.stderr
    ours = run_forked(run, pairs, "--out", tmp_path / "out", "--json", command="examples.minimal_pairs")
    assert ours.returncode == 0, ours.stderr
    found = json.loads((tmp_path / "out/minimal_pairs.json").read_text())["sentence"]["by_paradigm"]
    right = 2 * found["agreement"] + found["anaphor"] + found["participle"]
    assert json.loads(by_task.stdout)["lm_eval/minimal_pairs/acc"] == pytest.approx(right / len(MINIMAL))
