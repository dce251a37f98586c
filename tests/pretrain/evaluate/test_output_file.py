"""`pretrain generate --output`: a file of many samples, which a killed command resumes."""

import json
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from data_pipeline.base.atomic import lock
from data_pipeline.base.errors import UserError
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from pretrain import cli
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.loaded import PretrainedModel
from tests.support.exported import randomise
from tests.support.small_models import as_at_the_start
from tests.support.tables import each

OPTIONS = ["--prompt", "", "--prompt", "The Work", "--samples", "40", "--seed", "3", "--max-new-tokens", "9"]
COMMAND = """
import sys
from pathlib import Path
from pretrain import cli, loaded
from tests.pretrain.evaluate.test_output_file import trained_by
spiece = Path(sys.argv.pop())
loaded.open_model = lambda path: trained_by(spiece)
cli.app()
"""


def trained_by(spiece) -> TrainedModel:
    tokenizer = Tokenizer(SentencePiece.read(spiece), (), 20)
    return TrainedModel(randomise(as_at_the_start("t5", vocab_size=320), 0.5), tokenizer)


@pytest.fixture
def model(spiece, monkeypatch):
    trained = trained_by(spiece)
    monkeypatch.setattr("pretrain.loaded.open_model", lambda path: trained)
    return PretrainedModel(trained)


def generated(*arguments: object) -> None:
    done = CliRunner().invoke(cli.app, ["generate", "somewhere", *map(str, arguments)])
    if isinstance(done.exception, UserError):
        raise done.exception
    assert done.exit_code == 0, done.output


def test_a_file_that_was_cut_anywhere_is_continued_to_the_same_bytes(model, tmp_path):
    """Between lines, within a line, in a second text, and with another size of batches; also by Python."""
    path = tmp_path / "samples.jsonl"
    generated(*OPTIONS, "--output", path)
    whole = path.read_bytes()
    lines = [json.loads(line) for line in whole.splitlines()]
    assert [(line["text"], line["sample"]) for line in lines] == [(t, n) for t in ("", "The Work") for n in range(40)]
    assert len({line["generated"] for line in lines}) > 60
    ends = [at for at, byte in enumerate(whole, 1) if byte == 10]
    for size in (0, 5, ends[0], ends[38] + 9, ends[39], ends[70] - 1, len(whole)):
        path.write_bytes(whole[:size])
        generated(*OPTIONS, "--output", path, "--batch-size", "7")
        assert path.read_bytes() == whole
    path.write_bytes(whole[: ends[50]])
    answers = model.generate(["", "The Work"], samples=40, seed=3, max_new_tokens=9, output=path)
    assert path.read_bytes() == whole
    assert answers == model.generate(["", "The Work"], samples=40, seed=3, max_new_tokens=9)


def test_a_killed_command_resumes(spiece, tmp_path):
    path = tmp_path / "samples.jsonl"
    options = [*OPTIONS, "--samples", "400", "--batch-size", "8", "--output"]
    command = [sys.executable, "-c", COMMAND, "generate", "somewhere", *options]
    with subprocess.Popen([*command, path, spiece]) as process:
        while process.poll() is None and (not path.exists() or path.stat().st_size == 0):
            time.sleep(0.02)
        process.kill()
    subprocess.run([*command, path, spiece], check=True)
    subprocess.run([*command, tmp_path / "whole.jsonl", spiece], check=True)
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@each(
    "changed, said",
    [
        (["--seed", "4"], "seed is 3 there, 4 here"),
        (["--samples", "41"], "samples is 40 there, 41 here"),
        (["--top-k", "5"], "top_k is null there, 5 here"),
        (["--prompt", "more"], "texts is '"),
    ],
)
def test_a_file_of_another_command_is_refused(model, tmp_path, changed, said):
    path = tmp_path / "samples.jsonl"
    generated(*OPTIONS, "--output", path)
    before = path.read_bytes()
    with pytest.raises(UserError) as refused:
        generated(*OPTIONS, *changed, "--output", path)
    assert f"{path}: is of another command: {said}" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert path.read_bytes() == before


def test_a_file_of_another_model_or_of_a_running_command_is_refused(model, tmp_path):
    path = tmp_path / "samples.jsonl"
    model.generate("", samples=2, output=path)
    next(model.parameters()).data[0] += 1
    with pytest.raises(UserError, match="is of another command: model is '"):
        model.generate("", samples=2, output=path)
    with path.open() as file:
        lock(file, None)
        with pytest.raises(UserError, match="another process writes this file"):
            model.generate("", samples=2, output=path)
    with pytest.raises(UserError, match="can't be written: Is a directory"):
        model.generate("", samples=2, output=tmp_path)


def test_samples_need_sampling(model):
    assert len({one.generated for one in model.generate("", samples=9)}) > 5  # the temperature is 1
    with pytest.raises(UserError, match="samples: greedy decoding doesn't sample; temperature must exceed 0"):
        model.generate("", samples=2, temperature=0.0)
    with pytest.raises(UserError, match="samples: beam search doesn't sample; num_beams must be 1"):
        model.generate("", samples=2, num_beams=3)
    with pytest.raises(UserError, match="samples: expected 1 or more, got 0"):
        model.generate("", samples=0)
