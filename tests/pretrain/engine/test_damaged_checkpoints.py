"""Damaged or edited files of a run: each costs at most one checkpoint and is named in one line."""

import contextlib
import itertools
import math
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_pipeline.base.errors import FailedError
from pretrain.engine.checkpoint.tensors import newest_verified
from pretrain.run import rank_logs
from pretrain.run.metrics_file import FILE_NAME
from pretrain.run.train_state import rewinds
from tests.support.checkpoint_runs import describe, rewrite
from tests.support.tables import each

pytestmark = pytest.mark.usefixtures("one_rank")
JUNK = [b"", b"junk", b"\x80\xff\x00", b"null", b"[]", b'"text"', b"12", b"{}", b"{", b"[" * 100_000]
HUGE = 10**30
INDEX, TABLE, TENSORS = "index.json", "rank-00000.json", "rank-00000.safetensors"


@pytest.fixture
def run(whole, tmp_path) -> Path:
    """A finished run with checkpoints of steps 3, 6, 9 and 12; second moments are factored."""
    shutil.copytree(whole / "adafactor/run", tmp_path / "run")
    return tmp_path / "run"


def last(run: Path) -> Path:
    return run / "checkpoints/step-00000012"


@contextlib.contextmanager
def restored(run: Path) -> Iterator[None]:
    """The block may damage the last checkpoint."""
    before = {path: path.read_bytes() for path in last(run).iterdir() if path.is_file()}
    yield
    for path, content in before.items():
        path.write_bytes(content)


def chosen(run: Path) -> int:
    """The step that the run would resume from."""
    found = newest_verified(run)
    assert found is not None
    return int(found.name.removeprefix("step-"))


def the_one_before(run: Path, caplog: pytest.LogCaptureFixture, *said: str) -> None:
    """Checks that the run resumes from step 9, and is warned in one line of what is `said` that step 12 is damaged."""
    assert chosen(run) == 9
    (record,) = caplog.records
    line = record.getMessage()
    for one in ("step-00000012", *said):
        assert one in line
    assert "\n" not in line
    assert line.endswith(f"resuming from {run}/checkpoints/step-00000009")


@each("file, content", itertools.product((INDEX, TABLE, TENSORS), [*JUNK, None]))
def test_a_file_of_junk_or_a_missing_one_costs_its_checkpoint(run, caplog, file, content):
    with restored(run):
        (last(run) / file).unlink()
        if content is not None:
            (last(run) / file).write_bytes(content)
        the_one_before(run, caplog, file)


def in_table(key: str, wrong: Any) -> Callable[[Any], Any]:
    return lambda values: values["fragments"]["embedding.weight"].update({key: wrong})


def in_index(key: str, wrong: Any) -> Callable[[Any], Any]:
    return lambda values: values.update({key: wrong})


def among_files(name: str) -> Callable[[Any], Any]:
    return lambda values: values["files"].update({name: {"bytes": 1, "sha256": "0" * 64}})


OF_ANOTHER_INDEX = [
    ("step", "12"), ("step", -1), ("step", 1.5), ("position", HUGE), ("consumed", {"a": 1}), ("skipped", [1]),
    ("world_size", 0), ("zero_stage", 4), ("health", {"in_a_row": "text"}), ("unlogged", []), ("callbacks", []),
    ("weights", 3), ("files", {TABLE: {"bytes": 1, "sha256": "x"}}), ("format_version", None),
]  # fmt: skip
OF_ANOTHER_TENSOR = [
    ("start", -1), ("start", 3), ("start", HUGE), ("start", "0"),
    ("size", -1), ("size", 7), ("size", HUGE), ("size", None),
    ("shape", [HUGE, HUGE]), ("shape", [3, 3]), ("shape", "32"), ("shape", None), ("shape", [-520, -32]),
    ("states", ["exp_avg"]), ("states", None), ("states", "exp_avg"),
    ("whole", ["nothing"]), ("whole", {"a": 1}),
    ("scalars", {"step": "12"}), ("scalars", {"step": math.nan}), ("scalars", []),
]  # fmt: skip
NEEDED = ("step", "position", "consumed", "skipped", "identity", "world_size", "zero_stage", "files")
OTHERS = (b"../other", b"/runs/other")
OUTSIDE = ("/etc/hostname", "../step-00000009/index.json", "tokenizer/../../latest")


@each(
    "file, change, said",
    [
        *((INDEX, lambda values, key=key: values.pop(key), key) for key in NEEDED),
        *((INDEX, in_index(*change), "") for change in OF_ANOTHER_INDEX),
        *((INDEX, among_files(name), "leads out of the directory") for name in OUTSIDE),
        *((TABLE, in_table(*change), "") for change in OF_ANOTHER_TENSOR),
        (TABLE, in_table("shape", [32, 520]), "misshapen: embedding.weight (32, 520) for (520, 32)"),
        (TABLE, lambda values: values["fragments"].pop("embedding.weight"), "missing: embedding.weight"),
        (TABLE, lambda values: values["fragments"].update(more=values["fragments"]["embedding.weight"]), "extra: more"),
    ],
)
def test_an_edit_with_the_right_checksums_is_refused(run, caplog, file, change, said):
    with restored(run):
        rewrite(last(run) / file, change)
        the_one_before(run, caplog, said)


def test_an_index_that_was_changed_is_refused(run, caplog):
    """Changes one digit without correcting the checksum."""
    index = last(run) / INDEX
    content = index.read_text()
    assert '"position": 192' in content
    index.write_text(content.replace('"position": 192', '"position": 193').replace("   192\n", "   193\n"))
    the_one_before(run, caplog, INDEX, "its checksum doesn't match its content")


PARAMETER, STATE = "parameter/embedding.weight", "exp_avg_sq_row/embedding.weight"
RETYPED = {
    "int8": lambda tensor: tensor.to(torch.int8),
    "bf16": lambda tensor: tensor.to(torch.bfloat16),
    "NaN": lambda tensor: tensor.index_fill(0, torch.tensor([0]), math.nan),
    "shorter": lambda tensor: tensor[1:].clone(),
}


@each("name, change", [*itertools.product((PARAMETER, STATE), ("int8", "bf16", "NaN")), (PARAMETER, "shorter")])
def test_a_tensor_of_another_type_or_size_or_of_no_numbers_is_refused(run, caplog, name, change):
    with restored(run):
        tensors = load_file(last(run) / TENSORS)
        tensors[name] = RETYPED[change](tensors[name])
        save_file(tensors, last(run) / TENSORS)
        describe(last(run) / TENSORS)
        the_one_before(run, caplog, TENSORS, name)


NAMES_NONE = [*JUNK, b"step-00000012.keep", b"step-12", *(b"%s/checkpoints/step-00000012" % one for one in OTHERS)]


def test_without_a_usable_latest_the_newest_whole_checkpoint_counts(run, caplog, tmp_path):
    """Nothing is read of what is no small file: opening a FIFO would wait for a writer; the content of a link's target
    is nobody's business."""
    latest, secret = run / "checkpoints/latest", tmp_path / "secret"
    secret.write_text("password")
    no_file = "names no checkpoint: expected a small regular file"
    made = {
        lambda: None: "missing",
        **{partial(latest.write_bytes, content): "names no checkpoint" for content in NAMES_NONE},
        lambda: os.mkfifo(latest): no_file,
        lambda: latest.symlink_to(secret): no_file,
        lambda: latest.write_bytes(bytes(1 << 20)): no_file,
        latest.mkdir: no_file,
    }
    for make, said in made.items():
        latest.unlink(missing_ok=True)
        make()
        caplog.clear()
        assert chosen(run) == 12
        assert f"{latest}: {said}" in caplog.text
        assert f"resuming from {last(run)}" in caplog.text
    assert "password" not in caplog.text


def test_other_names_beside_checkpoints_are_no_checkpoints(run, caplog):
    checkpoints = run / "checkpoints"
    shutil.copytree(last(run), checkpoints / "step-00000020.keep")
    shutil.copytree(last(run), checkpoints / "step-junk")
    (checkpoints / "step-00000030").write_text("a file")
    (checkpoints / "latest").unlink()
    assert chosen(run) == 12
    shutil.copytree(last(run), checkpoints / "step-00000040")
    assert chosen(run) == 12
    assert "step-00000040: damaged: its index.json names step 12, expected 40" in caplog.text


def test_without_a_status_attempts_go_on(run):
    """The log of metrics records one attempt, the logs of the ranks three."""
    (run / "status.json").write_bytes(b"junk")
    for name in ("attempt-0003", "attempt-junk", "attempt-0009.old"):
        (run / "logs" / name).mkdir(parents=True)
    assert rank_logs.next_attempt(run) == 4
    (run / FILE_NAME).write_bytes(b"junk\n")
    assert rank_logs.next_attempt(run) == 4


@each("content", [*(one for one in JUNK if one != b"[]"), b'[{"step": 1}]', b'[{"step": -1, "position": 0, "to": 0}]'])
def test_damaged_rewinds_are_refused_in_one_line(run, content):
    """The file names the rows to skip: without it, a run would train on those rows again."""
    (run / "rewinds.json").write_bytes(content)
    with pytest.raises(FailedError, match=r"rewinds\.json: damaged: ") as error:
        rewinds(run)
    assert "\n" not in str(error.value)
