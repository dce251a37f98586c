"""Commands that write models and pictures, where the disk refuses: one line, exit code 1, and nothing half-written."""

import contextlib
import errno
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from pretrain.engine.checkpoint.trained import save_weights
from pretrain.training import picture
from tests.pretrain.evaluate.test_generation import random_model
from tests.support.in_process import refused_here
from tests.support.tables import each

SAID = "File too large; free some space there, or choose another folder, and run the same command again"


@contextlib.contextmanager
def a_full_disk() -> Iterator[None]:
    """No file can have more than 4 kB, as if a disk were full: the system refuses what is more."""
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))


@each("special", [0, 200])
def test_an_export_on_a_full_disk_is_one_line_and_leaves_no_file(special, spiece, tmp_path, monkeypatch):
    """The weights are refused or, with many special tokens, tokenizer.json, whose library has no class for it."""
    monkeypatch.chdir(tmp_path)
    names = tuple(chr(letter) for letter in range(0x4E00, 0x4E00 + special))
    model = random_model("t5", vocab_size=320 + special)
    save_weights(model.config, model.state_dict(), Tokenizer(SentencePiece.read(spiece), names, 20), Path("c"))
    with a_full_disk():
        line = refused_here(1, "pretrain", "export", "c", "out")
    assert line.startswith("error: out")
    assert line.endswith(f": {SAID}")
    assert [path.name for path in Path().iterdir()] == ["c"]


def test_a_picture_on_a_full_disk_leaves_the_last_one(tmp_path):
    metrics = {"validation/c/text_loss": 5.0, "validation/c/unigram_entropy": 6.0}
    (tmp_path / "picture.png").write_text("the last one")
    row = {"step": 1, "attempt": 1, "time": 0.0, "metrics": metrics}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with a_full_disk(), pytest.raises(OSError, match="File too large") as refused:
        picture.draw(tmp_path, tmp_path / "picture.png")
    assert (refused.value.errno, refused.value.filename) == (errno.EFBIG, str(tmp_path / "picture.png"))
    assert {path.name for path in tmp_path.iterdir()} == {"picture.png", "metrics.jsonl"}
    assert (tmp_path / "picture.png").read_text() == "the last one"
