"""A killed build ends with the same bytes. `python -m checks.soak.build` kills at random, for longer."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from checks.faults.builds import write_inputs
from data_pipeline.engine import merging
from data_pipeline.stages import report
from tests.conftest import write_c4, write_corpus_file
from tests.support.builds import MERGING, checksums, family, raylets, with_fault
from tests.support.in_process import done_here
from tests.support.tables import each

# What a killed driver leaves ends when it hasn't heard of it for so long, instead of 60 s; and a lost node is noticed
# after 5 s, not 15.
SOON = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5", "RAY_health_check_period_ms": "1000"}


def at_work_on(stage: str, config: Path, output: str) -> subprocess.Popen[str]:
    """A build on Ray that has begun the first unit of `stage`, which stays undone.

    It has one worker, and merges files. A file "acted" beside `config` ends the wait.
    """
    marker = config.with_name(stage)
    variables = with_fault("the driver killed", stage, "before the work", marker) | SOON
    settings = ["ray.num_cpus=1", "ray.small_bytes=0", output]
    program = [sys.executable, "-c", MERGING, "build", str(config), *settings]
    build = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables)
    while not marker.exists():
        assert build.poll() is None
        time.sleep(0.02)
    return build


@pytest.mark.slow
def test_bytes_depend_neither_on_workers_nor_on_kills(tmp_path, monkeypatch):
    """Compares an undisturbed build of all stages, without Ray, with one that is killed twice on Ray.

    Only the second merges files, and it is killed while it does: first the raylet, whose workers end with it, then the
    driver alone, whose workers continue a while. That a build without Ray may be killed is in test_cluster.py.
    """
    config, whole, killed = write_inputs(tmp_path), tmp_path / "whole", tmp_path / "killed"
    build = at_work_on("lines-keys-merged", config, f"output={killed}")
    started = family(build.pid)
    (raylet,) = raylets(started)
    raylet.kill()
    (tmp_path / "acted").touch()
    printed, _ = build.communicate()
    assert "raylet" not in printed  # Ray's 32 lines about it
    assert build.returncode == 1
    assert not (killed / "documents").exists()  # deduplication isn't finished
    (tmp_path / "acted").unlink()
    build = at_work_on("tokens-merged", config, f"output={killed}")
    started += family(build.pid)
    build.kill()
    (tmp_path / "acted").touch()
    build.wait()

    done_here("data-pipeline", "build", config, f"output={whole}")
    monkeypatch.setattr(merging, "group_size", lambda files, readers, opens: 2)
    printed = done_here("data-pipeline", "build", config, f"output={killed}")
    for stage in ("documents: 3 of 3", "substrings-keys: 3 of 3", "deduplicated: 3 of 3", "tokenizer: 1 of 1"):
        assert f"{stage} unit" in printed  # up to date: what was finished stays
    assert checksums(killed) == checksums(whole)
    found = report.read(killed)
    assert found.spans.dropped["duplicate_substring"] == found.evaluation_sets["test"].found == 1
    assert not list(killed.rglob("*.tmp"))
    psutil.wait_procs(started)  # otherwise the test takes too long: no process outlives its build


KINDS = {
    "sentencepiece": {"vocab_size": 400, "byte_fallback": False, "character_coverage": 1.0},
    "bytes": {"kind": "bytes"},
    "symbols": {"kind": "symbols", "pattern": r"\s|\w+|[^\w\s]", "vocab_size": 500},
    "bpe": {"kind": "bpe", "vocab_size": 400},
    "ids": {"kind": "ids", "vocab_size": 256},
}
WITHOUT_RECORD = ("tokenizer", "after the work")
MOMENTS = {
    **dict.fromkeys(KINDS, (WITHOUT_RECORD,)),
    "sentencepiece": (("tokenizer", "before the work"), WITHOUT_RECORD, ("tokens", "after the work")),
}


@pytest.mark.slow
@each("kind", KINDS)
def test_the_vocabulary_of_each_kind_is_the_same_after_kills(kind, tmp_path):
    """The process is killed when the files of a vocabulary exist without their record; that of one kind also before it
    has a tokenizer, and when tokens exist without their record."""
    write_c4(tmp_path / "c4.json.gz", records=20)
    changes: dict = {"tokenizer": KINDS[kind]}
    if kind == "ids":
        lists = [[(3 * number * place) % 256 for place in range(100)] for number in range(40)]
        (tmp_path / "items.jsonl").write_text("".join(json.dumps({"codes": one}) + "\n" for one in lists))
        source = {"format": "jsonl", "path": str(tmp_path / "items.jsonl"), "options": {"ids": "codes"}}
        changes |= {"sources": [source]}
    config = write_corpus_file(tmp_path / "corpus.yaml", **changes)
    for stage, when in MOMENTS[kind]:
        marker = tmp_path / f"{stage} {when}"
        program = [sys.executable, "-m", "data_pipeline", "build", str(config), f"output={tmp_path / 'killed'}"]
        done = subprocess.run(program, capture_output=True, env=with_fault("SIGKILL", stage, when, marker))
        assert (marker.exists(), done.returncode) == (True, -signal.SIGKILL)
    for output in ("killed", "whole"):
        done_here("data-pipeline", "build", config, f"output={tmp_path / output}")
    assert checksums(tmp_path / "killed") == checksums(tmp_path / "whole")
    assert any((tmp_path / "whole/tokenizer").iterdir())
