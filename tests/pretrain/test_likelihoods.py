"""lm-evaluation-harness and minimal pairs on our models: scores are the sums of our own losses, in training's form."""

import contextlib
import io
import json
import math
from pathlib import Path

import pytest
import torch
import yaml

from data_pipeline.corpus import open_corpus
from data_pipeline.foundation.errors import UserError
from pretrain.engine.checkpoint.directory import checkpoint_in
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate import minimal_pairs
from pretrain.evaluate.generation.decoding import generate
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.lm_eval import LmEvalRequests, LmEvalSettings
from pretrain.evaluate.minimal_pairs import Pair, SentencePrompts
from pretrain.evaluate.prompt_format import PromptFormat, PromptScores
from pretrain.tools.evaluate import evaluate_on_tasks
from tests.conftest import TOP
from tests.pretrain.forked import run_forked
from tests.pretrain.rank_processes import on_ranks
from tests.pretrain.runs import run_file, train_ranks
from tests.pretrain.small_evaluations import BERT, CAUSAL, T5, evaluation_of, log_p, log_p_after
from tests.tables import each

PAIRS = [("The sky is", " blue"), ("The sky is", " blue and wide"), ("Is it day? ", "no"), ("", "Once upon a time")]
ROWS = [
    {"question": "The sky is", "choices": ["blue", "green", "a fish"], "answer": 0},
    {"question": "Two and two are", "choices": ["five", "four"], "answer": 1},
    {"question": "A cat is an", "choices": ["animal", "idea"], "answer": 0},
]


@pytest.fixture(scope="module")
def tokenizer(small_corpus):
    return open_corpus(small_corpus).tokenizer


@pytest.fixture(scope="module")
def run(small_corpus, tmp_path_factory):
    """A run of one step."""
    folder = tmp_path_factory.mktemp("run")
    assert train_ranks(run_file(folder, small_corpus, run={"max_steps": 1}, evaluation=[]), 1) == [0]
    return folder / "run"


def requests_to(settings, tokenizer, form=None, objective=None):
    model, evaluation = evaluation_of(settings, tokenizer, batch_size=2)
    prompt_format = PromptFormat.choose(model.config, tokenizer.vocabulary, form, objective)
    return model, LmEvalRequests(model, prompt_format, evaluation, 2)


def test_a_continuation_and_its_end_mark_are_scored_after_the_context(tokenizer):
    """In both forms of a T5: answers as in text-to-text, and blanks as in span corruption."""
    eos, sentinel = tokenizer.vocabulary.eos, tokenizer.vocabulary.first_sentinel
    for objective, blank in (("text_to_text", []), ("span_corruption", [sentinel])):
        model, requests = requests_to(T5, tokenizer, objective=objective)
        for (context, continuation), (found, greedy) in zip(PAIRS, requests.loglikelihood(PAIRS), strict=True):
            before, after = tokenizer.encode([context.strip(), continuation.strip()])
            wanted, likeliest = log_p(model, [*before, *blank, eos], blank, [*after, eos])
            assert found == pytest.approx(wanted, rel=1e-5), (objective, context)
            assert greedy == likeliest


def test_what_the_model_generates_is_its_likeliest_and_stops_where_the_task_says(tokenizer):
    model, requests = requests_to(T5, tokenizer)
    ids = [*tokenizer.encode(["The sky is"])[0], tokenizer.vocabulary.eos]
    whole = tokenizer.decode(
        generate(model, torch.tensor([ids]), None, GenerationSettings(max_new_tokens=6))[0].tolist()
    )
    assert requests.generate([("The sky is", {"max_gen_toks": 6})]) == [whole]
    stop = whole[len(whole) // 2]
    assert requests.generate([("The sky is", {"until": [stop], "max_gen_toks": 6})]) == [whole.partition(stop)[0]]


def test_a_rolling_text_is_scored_once_each_after_what_stands_before_it(tokenizer):
    """The encoder never gets nothing: at first its EOS, then the ids before each piece."""
    text = " ".join(f"Word {number} of a text that is longer than one piece." for number in range(20))
    ids = tokenizer.encode([text])[0]
    assert len(ids) > 16 + 128 + 1
    model, requests = requests_to(T5, tokenizer)
    eos = tokenizer.vocabulary.eos
    starts = [0, *range(16, len(ids), 128)]
    wanted = sum(
        log_p(model, [*ids[max(0, start - 384) : start], eos], [], ids[start:end])[0]
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)
    )
    assert requests.rolling([text, ""]) == [pytest.approx(wanted, rel=1e-5), 0]


def test_a_decoder_only_model_is_scored_plainly(tokenizer):
    """No EOS; an empty context is the mark between documents; a long text loses its beginning, at 64 positions."""
    model, requests = requests_to(CAUSAL, tokenizer)
    long = ("word " * 100, "end")
    for pair, (found, _) in zip([*PAIRS, long], requests.loglikelihood([*PAIRS, long]), strict=True):
        before = tokenizer.encode([pair[0].rstrip()])[0]
        after = tokenizer.encode(["".join(pair)])[0][len(before) :]
        given = [*(before or [tokenizer.vocabulary.eos])][len(after) - 65 :]
        assert found == pytest.approx(log_p_after(model, given, after), rel=1e-5)
    text = " ".join(str(number) for number in range(60))
    assert math.isfinite(requests.rolling([text])[0])


def _tasks(folder):
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    rows = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    choosing = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    rolling = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    }
    for name, task in (("sky", choosing), ("plain", rolling)):
        (folder / f"{name}.yaml").write_text(yaml.dump({"task": name, **rows, "test_split": "test", **task}))
    return folder


def _on_tasks(run, folder):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        evaluate_on_tasks(checkpoint_in(run), LmEvalSettings(["sky", "plain"], folder), as_json=True)
    return out.getvalue()


@pytest.mark.slow
def test_tasks_from_a_folder_give_a_table_and_json(run, tokenizer, tmp_path, monkeypatch):
    """On one rank and on two; a run of span corruption is asked for blanks. Other tasks and families are refused."""
    pytest.importorskip("lm_eval", reason="the extra lm-eval isn't installed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = _tasks(tmp_path / "tasks")
    arguments = ("evaluate", run, "--lm-eval", "sky,plain", "--include-path", folder, "--out", tmp_path / "out")
    shown = run_forked(*arguments)
    assert shown.returncode == 0, shown.stderr
    assert "prompted as blank: context <extra_id_0> </s> → <extra_id_0> continuation </s>" in shown.stdout
    assert "|sky" in shown.stdout
    assert "|acc_norm|" in shown.stdout.replace(" ", "")
    first, second = on_ranks(2, _on_tasks, run, folder, joined=False)
    metrics = json.loads(first)
    assert second == ""

    trained = TrainedModel.open(run / "checkpoints/step-00000001")
    eos, sentinel = tokenizer.vocabulary.eos, tokenizer.vocabulary.first_sentinel
    right, bits, size = 0, 0.0, 0
    for row in ROWS:
        before = tokenizer.encode([row["question"]])[0]
        scores = [
            log_p(trained.model, [*before, sentinel, eos], [sentinel], [*tokenizer.encode([choice])[0], eos])[0]
            for choice in row["choices"]
        ]
        right += scores.index(max(scores)) == row["answer"]
        bits -= log_p(trained.model, [sentinel, eos], [sentinel], before)[0] / math.log(2)
        size += len(row["question"].encode())
    assert metrics["lm_eval/sky/acc"] == pytest.approx(right / len(ROWS))
    assert metrics["lm_eval/plain/bits_per_byte"] == pytest.approx(bits / size, rel=1e-4)
    kept = json.loads((tmp_path / "out/lm_eval.json").read_text())
    assert kept["results"]["sky"]["acc,none"] == pytest.approx(right / len(ROWS))

    unknown = run_forked("evaluate", run, "--lm-eval", "no_such_task", "--include-path", folder)
    assert (unknown.returncode, len(unknown.stderr.splitlines())) == (2, 1), unknown.stderr
    assert f"--lm-eval: no task 'no_such_task' in {folder} or lm_eval" in unknown.stderr
    (folder / "rows.jsonl").unlink()
    absent = run_forked(*arguments)
    assert (absent.returncode, len(absent.stderr.splitlines())) == (2, 1), absent.stderr


def test_a_model_without_likelihoods_of_texts_and_a_wrong_form_are_one_line(tokenizer):
    for model, form, message in (
        (BERT, None, "models of the family encoder_only have no likelihood of a text"),
        (CAUSAL, "blank", "--form: models of the family decoder_only continue a text; there is one form"),
        (T5, "blnk", "--form: expected one of answer, blank, copy, got 'blnk'"),
        (T5, "copy", "--form: a copy needs <s> and <mask>, but the model's tokenizer lacks one"),
    ):
        with pytest.raises(Exception, match=message.replace("(", r"\(")) as refused:
            requests_to(model, tokenizer, form)
        assert str(refused.value) == message


# Minimal pairs: a random choice is worth one half


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
    return model, minimal_pairs.model_score(name, SentencePrompts(prompt_format), tokenizer, likelihoods)(SENTENCES)


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
    found = minimal_pairs.accuracies(pairs, lambda sentences: [float(len(one)) for one in sentences])
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
    line = json.dumps({"sentence_good": "a", "sentence_bad": "b", **selection})
    (tmp_path / "blimp/pairs.jsonl").write_text(f"\ufeff{line}")  # a byte order mark is no text
    (found,) = minimal_pairs.read_pairs(tmp_path / "blimp")["animate_subject_trans"]
    assert found.group == "argument_structure"
    folder = pairs_in(tmp_path / "pairs")
    counts = {name: len(one) for name, one in minimal_pairs.read_pairs(folder, 1).items()}
    assert counts == {"agreement": 1, "anaphor": 1, "participle": 1}
    for line, message in (('{"UID": "a"}', "sentence_good: missing, or not a text"), ("{", "not JSON")):
        (folder / "wrong.jsonl").write_text(f"{line}\n")
        with pytest.raises(UserError, match=rf"wrong.jsonl:1: {message}"):
            minimal_pairs.read_pairs(folder)
    (folder / "wrong.jsonl").write_bytes(b"\x00\x05\x16\x07\xb0")
    with pytest.raises(UserError, match=r"wrong.jsonl: not UTF-8"):
        minimal_pairs.read_pairs(folder)
    (folder / "wrong.jsonl").rename(folder / "._agreement.jsonl")  # as macOS puts it beside the file in an archive
    assert len(minimal_pairs.read_pairs(folder)) == 3
    with pytest.raises(UserError, match=r"no \*\.jsonl with pairs there"):
        minimal_pairs.read_pairs(tmp_path)


def test_the_command_prints_groups_and_scores_beside_their_controls(run, tmp_path):
    done = run_forked("evaluate", run, "--minimal-pairs", pairs_in(tmp_path / "pairs"), "--out", tmp_path)
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
    ours = run_forked("evaluate", run, "--minimal-pairs", pairs, "--out", tmp_path / "out", "--json")
    assert ours.returncode == 0, ours.stderr
    found = json.loads((tmp_path / "out/minimal_pairs.json").read_text())["sentence"]["by_paradigm"]
    right = 2 * found["agreement"] + found["anaphor"] + found["participle"]
    assert json.loads(by_task.stdout)["lm_eval/minimal_pairs/acc"] == pytest.approx(right / len(MINIMAL))
