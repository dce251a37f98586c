"""lm-evaluation-harness on our models: scores are the sums of our own losses, in training's form."""

import contextlib
import io
import json
import math
from dataclasses import replace

import pytest
import torch
import yaml

from data_pipeline.base.errors import UserError
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.byt5 import Bytes
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from pretrain.engine.checkpoint.index import checkpoint_in
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.decoding import generate
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.hook import EvalResult
from pretrain.evaluate.lm_eval import LmEvalRequests, LmEvalSettings
from pretrain.evaluate.prompt_format import PromptFormat
from pretrain.tools.evaluate import evaluate_on_tasks
from tests.support.exported import randomise
from tests.support.forked import run_forked
from tests.support.in_process import refused_here
from tests.support.rank_processes import on_ranks
from tests.support.runs import run_file, train_ranks
from tests.support.small_evaluations import BERT, CAUSAL, SIZES, T5, evaluation_of, log_p, log_p_after

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


def test_a_decoder_reads_bos_before_every_context_where_its_training_had_it(tokenizer, monkeypatch):
    """A context that is too long loses its beginning, but not BOS, and leaves the answer its 10 tokens."""
    model, evaluation = evaluation_of(CAUSAL, tokenizer)
    prompt_format = replace(PromptFormat.choose(model.config, tokenizer.vocabulary, None, None), begin=[7])
    requests = LmEvalRequests(model, prompt_format, evaluation, 2)
    for context, continuation in (("The sky is", " blue"), ("", "Once upon a time")):
        before, whole = tokenizer.encode([context, context + continuation])
        wanted = log_p_after(model, [7, *before], whole[len(before) :])
        assert requests.loglikelihood([(context, continuation)])[0][0] == pytest.approx(wanted, rel=1e-5)
    asked, context = [], " ".join(["The sky is"] * 40)

    def write(model, inputs, *_, **__):
        asked.extend(inputs)
        return [[]]

    monkeypatch.setattr("pretrain.evaluate.lm_eval.written", write)
    (ids,) = tokenizer.encode([context])
    requests.generate([(context, {"max_gen_toks": 10})])
    assert asked == [[7, *ids[-54:]]]


BART = {"family": "bart", **SIZES, "num_encoder_layers": 1, "num_decoder_layers": 1, "max_positions": 64}


@pytest.fixture(scope="module")
def with_mask(spiece):
    return Tokenizer(SentencePiece.read(spiece), ("<s>", "<mask>"), 20)


def test_equal_requests_have_different_samples(tokenizer):
    """As self-consistency and pass@k need; the same again in another call."""
    _, requests = requests_to(T5, tokenizer)
    asked = [("The sky is", {"max_gen_toks": 8, "do_sample": True, "temperature": 1.0})] * 4
    found = requests.generate(asked)
    assert len(set(found)) > 1
    assert requests.generate(asked) == found


def test_a_bart_is_asked_as_it_was_trained(with_mask, monkeypatch):
    """Pairs of text-to-text have no BOS; a model of unknown training gets it, and writes it."""
    (ids,), vocabulary = with_mask.encode(["The sky is"]), with_mask.vocabulary
    for objective, begin in (("text_to_text", []), (None, [vocabulary.bos])):
        model, requests = requests_to(BART, with_mask, "answer", objective)
        randomise(model, std=0.3)  # for weights that tell inputs apart
        wanted, _ = log_p(model, [*begin, *ids, vocabulary.eos], begin, [*ids, vocabulary.eos])
        assert requests.loglikelihood([("The sky is", "The sky is")])[0][0] == pytest.approx(wanted, rel=1e-5)

        def write(model, inputs, vocabulary, settings, causal, numbers, begin=begin):
            assert inputs == [[*begin, *ids, vocabulary.eos]]
            return [[*begin, *ids, vocabulary.eos][: settings.max_new_tokens]]

        monkeypatch.setattr("pretrain.evaluate.lm_eval.written", write)
        assert requests.generate([("The sky is", {"max_gen_toks": len(ids)})]) == ["The sky is"]


def test_a_decoder_that_was_trained_on_pairs_scores_an_answer_by_itself():
    """Behind EOS, and with one, but without the space before it, which is a token of its own among bytes."""
    tokenizer = Tokenizer(Bytes(), (), 20)
    model, requests = requests_to(CAUSAL, tokenizer, objective="in_one_row")
    before, after = tokenizer.encode(["The sky is", "blue"])
    wanted = log_p_after(model, [*before, tokenizer.vocabulary.eos], [*after, tokenizer.vocabulary.eos])
    assert requests.loglikelihood([("The sky is", " blue")])[0][0] == pytest.approx(wanted, rel=1e-5)


def test_a_copied_context_leaves_the_answer_its_length(with_mask, monkeypatch):
    """A BART writes <s> and the context first. Neither exceeds the 64 positions of the model."""
    asked = []

    def copy(model, inputs, vocabulary, settings, causal, numbers):
        asked.append(settings.max_new_tokens)
        ids = [id_ for id_ in inputs[0] if id_ not in (vocabulary.mask, vocabulary.eos)]
        return [[*ids, *with_mask.encode(["blue and wide"])[0], vocabulary.eos][: settings.max_new_tokens]]

    monkeypatch.setattr("pretrain.evaluate.lm_eval.written", copy)
    _, requests = requests_to(BART, with_mask, objective="denoising")
    size = len(with_mask.encode(["The sky is"])[0])
    length = len(with_mask.encode(["blue and wide"])[0])
    assert requests.generate([("The sky is", {"max_gen_toks": length})]) == ["blue and wide"]
    assert asked == [1 + size + length]
    assert requests.generate([("The sky is " * 40, {"max_gen_toks": length})]) == ["blue and wide"]
    assert asked[1] == 64


def test_an_answer_and_a_continuation_are_as_long_as_the_model_takes(tokenizer, with_mask):
    """By default a task has 256 tokens for an answer; a model of 64 positions has fewer, and no longer continuation."""
    for settings, form, one, message in (
        (CAUSAL, None, tokenizer, "tokens after 1 of the prompt, but the model takes 64"),
        (BART, "answer", with_mask, "tokens after 1 of the prompt, but the model takes 64"),
        (BART, "copy", with_mask, "tokens after 1 of the prompt, but the model takes 64"),
    ):
        _, requests = requests_to(settings, one, form)
        assert len(requests.generate([("The sky is " * 40, {})])) == 1
        with pytest.raises(UserError, match=message):
            requests.loglikelihood([("The", " sky is" * 80)])


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

    # in this process, which imports lm_eval once
    unknown = refused_here(2, "pretrain", "evaluate", run, "--lm-eval", "no_such_task", "--include-path", folder)
    assert f"--lm-eval: no task 'no_such_task' in {folder} or lm_eval" in unknown
    task = (folder / "sky.yaml").read_text()
    (folder / "sky.yaml").write_text(task.replace("{{question}}", "{{query}}"))
    lacking = refused_here(2, "pretrain", *arguments)
    assert "--lm-eval: sky,plain: UndefinedError: 'query' is undefined" in lacking
    (folder / "sky.yaml").write_text(task)
    with (folder / "rows.jsonl").open("a") as rows:
        rows.write("no JSON\n")
    damaged = refused_here(2, "pretrain", *arguments)
    assert "--lm-eval: sky,plain: ArrowInvalid: JSON parse error" in damaged
    (folder / "rows.jsonl").unlink()
    absent = refused_here(2, "pretrain", *arguments)
    assert "rows.jsonl" in absent


def test_the_table_is_printed_before_a_place_for_it_fails(run, tmp_path, monkeypatch, capsys):
    found = EvalResult(lines=["|the table|"])
    monkeypatch.setattr("pretrain.tools.evaluate.run_tasks", lambda requests, settings: (found, {}))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        evaluate_on_tasks(checkpoint_in(run), LmEvalSettings(["sky"]), out=tmp_path / "file/out")
    assert capsys.readouterr().out.endswith("|the table|\n")


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
