"""`pretrain generate`: where its texts come from, and how answers are shown."""

import io
import json
import sys

import pytest
from typer.testing import CliRunner

from data_pipeline.base.errors import UserError
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from pretrain import cli
from pretrain.cli.generate import show, texts_of
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.blanks import likeliest_fillings
from pretrain.evaluate.generation.texts import Answer, answer_texts
from tests.pretrain.evaluate.test_generation import LINES, random_model, settings
from tests.support.tables import each


@pytest.fixture
def trained(spiece):
    tokenizer = Tokenizer(SentencePiece.read(spiece), (), 20)
    return TrainedModel(random_model("t5, learned", vocab_size=320), tokenizer)


def invoke(monkeypatch, trained, *arguments, piped=None):
    monkeypatch.setattr("pretrain.loaded.open_model", lambda path: trained)
    return CliRunner().invoke(cli.app, ["generate", "somewhere", *map(str, arguments)], input=piped)


def test_the_likeliest_fillings_of_each_blank_are_shown(trained, monkeypatch):
    first = likeliest_fillings(trained, LINES[2], 3)[0][0]
    shown = invoke(monkeypatch, trained, LINES[2], "--likeliest", 2, "--max-new-tokens", 9).stdout.splitlines()
    assert shown[0].startswith("span k: its likeliest fillings, ")
    assert shown[5].startswith(f"span 0    [{first.text}] {first.probability:.1%}   [")
    assert shown[6].startswith("span 1    [")
    one = json.loads(invoke(monkeypatch, trained, LINES[2], "--likeliest", 2, "--max-new-tokens", 9, "--jsonl").stdout)
    assert one["likeliest"][0][0] == {"text": first.text, "probability": pytest.approx(first.probability)}


def test_texts_from_arguments_a_file_or_a_pipe_give_the_same(trained, tmp_path, monkeypatch):
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(LINES) + "\n")
    options = ["--max-new-tokens", 8, "--num-beams", 3, "--early-stopping", "never", "--batch-size", 2]
    by_argument = invoke(monkeypatch, trained, *LINES, *options)
    assert by_argument.exit_code == 0, by_argument.output
    answers = list(answer_texts(trained, LINES, settings(max_new_tokens=8, num_beams=3, early_stopping="never")))
    assert by_argument.stdout == (
        f"{answers[0].whole}\n{answers[1].whole}\nmasked    {LINES[2]}\nmodel     {answers[2].whole}\n\n"
    )
    assert invoke(monkeypatch, trained, "--file", file, *options).stdout == by_argument.stdout
    file.write_text("\ufeff" + file.read_text())  # a byte order mark is no text
    assert invoke(monkeypatch, trained, "--file", file, *options).stdout == by_argument.stdout
    file.write_text(file.read_text().removeprefix("\ufeff"))
    assert invoke(monkeypatch, trained, *options, piped=file.read_text()).stdout == by_argument.stdout

    out = tmp_path / "answers.jsonl"
    done = invoke(monkeypatch, trained, "--file", file, *options, "--output", out)
    assert (done.exit_code, done.stdout) == (0, "")
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"text": answer.text, "generated": answer.generated, "whole": answer.whole} for answer in answers
    ]
    out.with_name("answers.jsonl.command.json").unlink()
    again = invoke(monkeypatch, trained, "--file", file, *options, "--output", out)
    assert isinstance(again.exception, UserError)
    assert "exists already" in str(again.exception)


@each(
    "arguments, message",
    [
        (["a text", "--top-p", 1.5], "generate: top_p: expected number > 0, ≤ 1, got 1.5 (sample from the fewest"),
        (["a text", "--file", "lines.txt"], "give texts as arguments or with --file, not both"),
        (["--file", "nowhere.txt"], "nowhere.txt: can't be read: "),
        ([], "stdin: has no line of text"),
        (["a text", "--output", "/nowhere/else"], "/nowhere/else: can't be written: No such file or directory"),
        (["a text", "--max-new-tokens", 65], "max_new_tokens: 65, but the model takes sequences of 64 at most"),
        (["ok", "0 " * 70], "text 2: its "),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(trained, arguments, message, monkeypatch):
    if "--max-new-tokens" not in arguments:
        arguments = [*arguments, "--max-new-tokens", 8]
    done = invoke(monkeypatch, trained, *arguments, piped="")
    assert isinstance(done.exception, UserError)
    assert done.exception.exit_code == 2
    assert message in str(done.exception)
    assert "\n" not in str(done.exception)


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    """Of a pipe, as Python reads it under LANG=C.UTF-8, and of a file."""
    file = tmp_path / "lines.txt"
    file.write_bytes(b"caf\xc3\xa9\ncaf\xe9\n")
    piped = io.TextIOWrapper(io.BytesIO(file.read_bytes()), encoding="utf-8", errors="surrogateescape")
    for source, given in (("stdin", (None, piped)), (file, (file, None))):
        with pytest.raises(UserError) as refused:
            texts_of([], *given)
        assert str(refused.value) == f"{source}: line 2 isn't UTF-8"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_an_empty_blank_is_explained_once(capsys):
    written = [Answer("A <extra_id_0> b", "", whole, True) for whole in ("A [c] b", "A [] b", "A [] b")]
    show(iter(written), [None] * 3, False, sys.stdout)
    assert capsys.readouterr().err.count("[]: the model left this span empty, ") == 1
    show(iter(written[:1]), [None], False, sys.stdout)
    show(iter(written), [None] * 3, True, sys.stdout)
    assert "wrote nothing" not in capsys.readouterr().err


def test_answers_go_to_stdout_while_a_bar_is_on_the_terminal(monkeypatch):
    """By default rich sends everything that is printed while a bar is shown to the bar's terminal."""
    out, terminal = io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", terminal)
    written = [Answer("a", "b", "b", False), Answer("A <extra_id_0>", "c", "A [c]", True)]
    show(iter(written), [None, "A c"], False, sys.stdout)
    assert out.getvalue() == "b\nmasked    A <extra_id_0>\nmodel     A [c]\noriginal  A c\n\n"
    assert "2/2" in terminal.getvalue()
    show(iter(written[:1]), [None], False, screen := Terminal())
    assert screen.getvalue() == "b\n"


def test_sentences_of_a_corpus_are_masked_as_in_the_training_of_the_model(spiece, small_corpus, monkeypatch):
    """The corpus was built for span corruption."""
    with_marks = Tokenizer(SentencePiece.read(spiece), ("<s>", "<mask>", "[R]"), 20)
    bart = random_model("bart", vocab_size=with_marks.size, max_positions=512)
    for objective, mark in (("denoising", "<mask>"), ("span_corruption", "<extra_id_0>"), (None, "<extra_id_0>")):
        trained = TrainedModel(bart, with_marks, objective)
        done = invoke(monkeypatch, trained, "--corpus", small_corpus, "-n", 1, "--max-new-tokens", 3, "--jsonl")
        assert mark in json.loads(done.stdout)["text"]
