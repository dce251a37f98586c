"""Text-to-text tasks: their metrics, their mixture with other corpora, and the hook that answers held-out inputs."""

import json
import shutil
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data_pipeline.base.config_file import check, load
from data_pipeline.base.errors import UserError
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from data_pipeline.loading.batch_layout import BatchLayout
from pretrain.config import RunConfig
from pretrain.config.evaluation import RetrievalSettings, TextToTextSettings, clashes
from pretrain.engine.checkpoint.index import checkpoint_in
from pretrain.evaluate.generation.decoding import generate
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.held_out_pairs import tasks
from pretrain.evaluate.hook import Collectives, Evaluation
from pretrain.evaluate.record import table
from pretrain.evaluate.retrieval import Retrieval
from pretrain.evaluate.text_to_text import ANSWER_METRICS, TextToTextAnswers, normalized, word_f1
from pretrain.run.metrics_file import read_metrics
from pretrain.run.world import World
from pretrain.training.prepare import prepare
from tests.conftest import made_once, write_corpus_file
from tests.support.exported import randomise
from tests.support.in_process import run_here
from tests.support.rank_processes import on_ranks
from tests.support.runs import run_file, train_ranks
from tests.support.small_evaluations import (
    BART,
    CAUSAL,
    T5,
    evaluated,
    evaluation_of,
    held_out_after,
    log_p,
    log_p_after,
)
from tests.support.tables import each

# --- metrics


def test_metrics_of_answers_are_those_of_their_papers():
    """One word of six differs: n-gram precisions are 5/6, 4/5, 3/4, 2/3, so BLEU is the fourth root of 1/3."""
    answers, references = ["the cat is on the mat"], [["the cat was on the mat"]]
    found = {name: metric(answers, references) for name, metric in ANSWER_METRICS.items()}
    assert found["rouge1"] == pytest.approx(5 / 6)
    assert found["rouge2"] == pytest.approx(3 / 5)
    assert found["rougeL"] == found["rougeLsum"] == pytest.approx(5 / 6)
    assert found["squad_f1"] == pytest.approx(3 / 4)  # without articles: cat, on and mat of four words
    assert found["exact_match"] == found["squad_exact_match"] == 0
    six = ANSWER_METRICS["bleu"](["a b c d e f"], [["a b c d e g"]])
    assert six == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)
    # chrF2 with equal precision and recall of 1- to 6-grams of "abcdef" and "abcdeg" is their mean
    letters = ANSWER_METRICS["chrf"](["abcdef"], [["abcdeg"]])
    assert letters == pytest.approx(100 * (5 / 6 + 4 / 5 + 3 / 4 + 2 / 3 + 1 / 2 + 0) / 6)

    # the best of several references counts
    answers, references = ["1999", "Yes."], [["in 1999", "1999"], ["no"]]
    assert ANSWER_METRICS["exact_match"](answers, references) == 0.5
    assert ANSWER_METRICS["squad_f1"](answers, references) == 0.5
    assert ANSWER_METRICS["rouge1"](answers, references) == 0.5
    assert ANSWER_METRICS["bleu"](["a b c d", "e f g h"], [["x", "a b c d"], ["e f g h"]]) == pytest.approx(100)


def test_squad_compares_words_without_case_punctuation_and_articles():
    assert normalized("The Eiffel-Tower, in  an \n Paris!") == "eiffeltower in paris"
    assert normalized("theatre a-b") == "theatre ab"
    assert word_f1("the black dog", "a dog") == pytest.approx(2 / 3)
    assert word_f1("dog dog", "dog cat") == pytest.approx(1 / 2)  # a word counts as often as in both
    assert word_f1("", "dog") == 0
    assert ANSWER_METRICS["squad_exact_match"](["The Dog."], [["dog"]]) == 1


# --- a task


WORDS = ["red", "green", "house", "tree", "dog", "river"]
LONG = "red " * 30


@pytest.fixture(scope="session")
def pairs_corpus(small_corpus) -> Path:
    """Pairs with a prefix in two files, one of them held out, and the tokenizer of the small corpus."""
    lines = [f"{one} {other}\t{other} {one}\n" for one in WORDS for other in WORDS]
    files = {"train": [*lines[7:], f"a\t{LONG}\n", f"{LONG}\tb\n", "no target\t\n"], "validation": lines[:7]}
    tokenizer = {"path": str(small_corpus / "tokenizer/spiece.model"), "sentinels": 20}
    objective = {"name": "text_to_text", "inputs_length": 32, "targets_length": 16}
    rows = {"packing": "examples", "objective": objective, "apply_at": "build"}

    def make(folder: Path) -> None:
        sources = []
        for split, pairs in files.items():
            path, options = folder / f"{split}.tsv", {"prefix": "swap: "}
            path.write_text("".join(pairs))
            sources.append({"format": "pairs", "name": split, "path": str(path), "split": split, "options": options})
        path = write_corpus_file(folder / "corpus.yaml", name="swap", sources=sources, tokenizer=tokenizer, rows=rows)
        done = run_here("data-pipeline", "build", path)
        assert done.returncode == 0, done.stderr
        (folder / "said").write_text(done.stdout + done.stderr)

    return made_once("pairs", make) / "corpus"


@pytest.mark.slow
def test_pairs_that_are_empty_or_too_long_are_counted_and_a_source_may_be_held_out_whole(pairs_corpus):
    said = (pairs_corpus.parent / "said").read_text()
    assert "documents: 2 files → 39 documents, 38 kept, 1 dropped: empty_target 1" in said
    warning = "warning: train: 1 inputs and 1 targets of 31 pairs are longer than rows.objective allows"
    assert warning in said
    assert warning in (pairs_corpus / "report.md").read_text()
    splits = json.loads((pairs_corpus / "report.json").read_text())["splits"]
    assert (splits["train"]["documents"], splits["validation"]["documents"]) == (31, 7)
    assert (splits["validation"]["cut_inputs"], splits["validation"]["cut_targets"]) == (0, 0)


HOOK = {"hook": "text_to_text", "metrics": ["exact_match", "bleu", "rank_accuracy"]}


def mixture(folder: Path, corpora: list[Path], held_out: list[Path], **sections: object) -> Path:
    data = {
        "train": [{"corpus": str(corpus)} for corpus in corpora],
        "validation": [{"corpus": str(corpus)} for corpus in held_out],
        "mixing": {"limit": 100, "temperature": 2.0},
        "lanes": 8,
        "workers": 0,
    }
    return run_file(folder, corpora[0], data=data, **sections)


def test_a_task_is_trained_beside_a_corpus_and_each_held_out_row_is_answered_once(small_corpus, pairs_corpus, tmp_path):
    """On two ranks in the run, and on one and two from its checkpoint."""
    corpora = [pairs_corpus, small_corpus]
    path = mixture(tmp_path, corpora, corpora, evaluation=[HOOK])
    config = load(path, [], RunConfig)
    rows = [open_corpus(corpus).rows("train") for corpus in corpora]
    parts = [min(number, 100) ** 0.5 for number in rows]
    names, shares = zip(*prepare(config, World.on_this_node()).shares, strict=True)
    assert names == ("swap", "small")
    assert shares == pytest.approx([part / sum(parts) for part in parts])
    assert train_ranks(path, 2) == [0, 0]
    logged = read_metrics(tmp_path / "run")[-1].metrics
    wanted = {name: value for name, value in logged.items() if name.startswith("text_to_text/")}
    assert wanted.keys() == {f"text_to_text/swap/{name}" for name in HOOK["metrics"]}
    checkpoint = checkpoint_in(tmp_path / "run")
    shown = table(tmp_path / "run/artifacts/evaluation/text_to_text/swap.json")
    assert [row["input"] for row in shown] == [f"swap: red {word}" for word in WORDS] + ["swap: green red"]
    assert [row["reference"] for row in shown] == [f"{word} red" for word in WORDS] + ["red green"]
    alone = json.loads(evaluated(checkpoint, names=["text_to_text"], out=tmp_path / "alone"))
    assert {name: alone[name] for name in wanted} == pytest.approx(wanted)
    again = table(tmp_path / "alone/text_to_text/swap.json")
    assert [{**row, "step": 8} for row in again] == shown
    first, second = on_ranks(2, evaluated, checkpoint, [], ["text_to_text"], joined=False)
    assert second == ""
    assert {name: json.loads(first)[name] for name in wanted} == pytest.approx(wanted)


PREFIX_LM = {**CAUSAL, "num_layers": 2, "prefix_attention": "bidirectional"}


@each("family", [T5, CAUSAL, PREFIX_LM])
def test_answers_are_the_likeliest_and_choices_those_of_the_smallest_loss(small_corpus, tmp_path, family):
    """Of a file, whose lines have several right answers and choices. A decoder reads the input, and EOS, before its
    answer."""
    lines = [
        {"inputs": "red dog", "targets": ["dog red", "a dog"], "choices": [f"{word} red" for word in WORDS]},
        {"inputs": "x", "targets": ["y"], "choices": ["y", *WORDS]},
    ] * 20
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = open_corpus(small_corpus).tokenizer
    model, evaluation = evaluation_of(family, tokenizer)
    randomise(model, std=0.3)
    metrics = ["exact_match", "rank_accuracy"]
    given = {"file": str(tmp_path / "dev.jsonl"), "prefix": "p: ", "max_new_tokens": 9, "shown": 40}
    settings = check({"metrics": metrics, **given}, TextToTextSettings, "hook")
    found = TextToTextAnswers(settings).evaluate(evaluation)
    rows = found.tables["text_to_text/dev"]
    assert [row["input"] for row in rows[:2]] == ["p: red dog", "p: x"]
    assert rows[0]["reference"] == "dog red | a dog"
    eos = tokenizer.vocabulary.eos
    for row, line in zip(rows, lines, strict=True):
        read, *choices = ([*ids, eos] for ids in tokenizer.encode([row["input"], *line["choices"]]))
        written = generate(model, torch.tensor([read]), None, GenerationSettings(max_new_tokens=9))[0].tolist()
        assert row["answer"] == tokenizer.decode([*takewhile(lambda id_: id_ != eos, written)])
        sums = [
            log_p_after(model, read, ids) if "num_layers" in family else log_p(model, read, [], ids)[0]
            for ids in choices
        ]
        assert row["choice"] == line["choices"][sums.index(max(sums))]
    for name, column in zip(metrics, ("answer", "choice"), strict=True):
        right = [row[column] in line["targets"] for row, line in zip(rows, lines, strict=True)]
        assert found.metrics[f"text_to_text/dev/{name}"] == sum(right) / len(rows)


@each("objective, begins", [(None, True), ("denoising", True), ("text_to_text", False)])
def test_a_bart_answers_the_lines_of_a_file_as_it_was_trained(
    spiece, small_corpus, tmp_path, monkeypatch, objective, begins
):
    """With BOS before inputs, answers and choices, unless it was trained on pairs, as the held-out corpora tell."""
    lines = [{"inputs": f"red {word}", "targets": ["dog red"], "choices": [*WORDS, "dog red"]} for word in WORDS]
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = Tokenizer(SentencePiece.read(spiece), ("<s>", "<mask>"), 20)
    corpora = held_out_after(objective, open_corpus(small_corpus))
    model, evaluation = evaluation_of(BART, tokenizer, corpora)
    randomise(model, std=0.3)
    begin, eos, (answer,) = [tokenizer.vocabulary.bos] * begins, tokenizer.vocabulary.eos, tokenizer.encode("dog red")
    read = [[*begin, *ids, eos] for ids in tokenizer.encode([line["inputs"] for line in lines])]
    asked = []

    def write(model, inputs, vocabulary, settings, causal):
        asked.extend(inputs)
        return [[*begin, *answer, eos] for _ in inputs]

    monkeypatch.setattr("pretrain.evaluate.text_to_text.written", write)
    given = {"metrics": ["exact_match", "rank_accuracy"], "file": str(tmp_path / "dev.jsonl"), "shown": 40}
    found = TextToTextAnswers(check(given, TextToTextSettings, "hook")).evaluate(evaluation)
    assert asked == read
    assert found.metrics["text_to_text/dev/exact_match"] == 1.0
    for row, ids, line in zip(found.tables["text_to_text/dev"], read, lines, strict=True):
        sums = [log_p(model, ids, begin, [*one, eos])[0] for one in tokenizer.encode(line["choices"])]
        assert row["choice"] == line["choices"][sums.index(max(sums))]


def test_retrieval_searches_all_targets_of_a_corpus(pairs_corpus):
    """36 pairs of words, and two others that are in the training split alone."""
    corpus = open_corpus(pairs_corpus)
    _, evaluation = evaluation_of(T5, corpus.tokenizer, {"swap": corpus})
    found = Retrieval(RetrievalSettings(at=[1, 10])).evaluate(evaluation)
    assert found.metrics.keys() == {f"retrieval/swap/{name}_at_{k}" for name in ("recall", "ndcg") for k in (1, 10)}
    assert found.lines[0].endswith(" of 7 queries among 38 outputs")
    assert len(found.tables["retrieval/swap"]) == 7


def test_the_held_out_pairs_of_a_corpus_at_a_url_are_those_of_its_directory(pairs_corpus, tmp_path):
    """A remote corpus has its documents in its store, not in the cache. A copy without documents is refused."""
    corpora = [open_corpus(pairs_corpus), open_corpus(f"file://{pairs_corpus}", tmp_path / "cache")]
    here, there = (tasks(TextToTextSettings(), {"swap": corpus})[0].questions for corpus in corpora)
    assert len(here) == 7
    assert there == here
    copy = shutil.copytree(pairs_corpus, tmp_path / "copy", ignore=shutil.ignore_patterns("documents"))
    for corpus in (open_corpus(copy), open_corpus(f"file://{copy}", tmp_path / "cache")):
        with pytest.raises(UserError, match="copy: this copy has no documents/, where the held-out pairs are"):
            tasks(TextToTextSettings(), {"swap": corpus})


def test_work_divided_among_one_rank_notices_that_the_budget_is_spent(monkeypatch):
    held_out = SimpleNamespace(layout=BatchLayout(0, 1, 8, 1))
    for seconds, late in ((59, False), (61, True)):
        clock = SimpleNamespace(monotonic=iter([0, *[seconds] * 100]).__next__)
        monkeypatch.setattr("pretrain.evaluate.hook.time", clock)
        collectives = Collectives(60.0, torch.device("cpu"), alone=True)
        evaluation = Evaluation(SimpleNamespace(), held_out, 0, collectives)
        assert evaluation.shared([1, 2, 3], list, int) == [1, 2, 3]
        assert collectives.late == late


def test_two_hooks_that_record_under_one_name_are_refused():
    held_out = {"swap": "text_to_text", "other": "in_one_row of text_to_text", "small": "span_corruption"}
    of_files = [TextToTextSettings(file=f"data/{language}/test.tsv") for language in ("de", "fr")]
    again = TextToTextSettings(file="data/de/test.tsv", every_steps=7)
    retrieved = RetrievalSettings(file="data/fr/test.tsv")
    everywhere, there = TextToTextSettings(), [TextToTextSettings(corpus=name, rows=9) for name in ("swap", "other")]
    assert clashes([of_files[0], again, retrieved, *there], held_out) == []
    of_test = "file: hook 0 records text_to_text/test already; give the file another name"
    assert clashes(of_files, held_out) == [(1, of_test)]
    of_other = "corpus: hook 0 records text_to_text/other already; name another corpus, or make one hook of the two"
    assert clashes([everywhere, there[1]], held_out) == [(1, of_other)]


@each(
    "hook, line",
    [
        ({"metrics": ["blue"]}, "metrics.0: input should be 'exact_match', "),
        ({"metrics": []}, "metrics: "),
        ({"corpus": "wmt"}, "evaluation.0.corpus: no held-out corpus is named 'wmt'; there is swap, small"),
        ({"corpus": "small"}, "evaluation.0.corpus: small has no text-to-text pairs"),
        ({"file": "no/such.jsonl"}, "evaluation.0.file: no/such.jsonl: no such file"),
        ({"prefix": "swap: "}, "prefix: is for `file`"),
    ],
)
def test_what_a_hook_cannot_answer_is_refused_at_the_start(small_corpus, pairs_corpus, tmp_path, hook, line):
    corpora = [pairs_corpus, small_corpus]
    path = mixture(tmp_path, [pairs_corpus], corpora, evaluation=[{"hook": "text_to_text", **hook}])
    with pytest.raises(UserError) as refused:
        prepare(load(path, [], RunConfig), World.on_this_node())
    assert line in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
