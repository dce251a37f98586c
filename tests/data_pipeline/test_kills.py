"""A killed build ends with the same bytes. `python -m checks.soak.build` kills at random, for longer."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from data_pipeline import report
from data_pipeline.execution import merging
from tests.conftest import TOP, write_c4, write_corpus_file
from tests.data_pipeline.build_processes import MERGING, checksums, family, raylets
from tests.in_process import done_here


def at_work_on(stage: str, config: Path, *overrides: str) -> subprocess.Popen[str]:
    """A build that has begun the first unit of `stage`, which stays undone for a minute.

    It has one worker, and merges files. A file "acted" beside `config` ends the wait.
    """
    marker = config.with_name(stage)
    planted = {"fault": "the driver killed", "stage": stage, "when": "before the work", "marker": str(marker)}
    search = os.pathsep.join([str(TOP / "checks/faults"), str(TOP), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": search, "BUILD_FAULT": json.dumps(planted)}
    program = [sys.executable, "-c", MERGING, "build", str(config), "ray.num_cpus=1", *overrides]
    build = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables)
    while not marker.exists():
        assert build.poll() is None
        time.sleep(0.02)
    return build


@pytest.mark.slow
def test_bytes_depend_neither_on_workers_nor_on_kills(tmp_path, monkeypatch):
    """Compares an undisturbed build of all stages with one that is killed three times.

    Only the second merges files, and it is killed while it does. The first two kills hit it on Ray: one the raylet,
    whose workers end with it, the other the driver alone, whose workers go on a while. The third hits it in a process
    of its own without Ray, which is also how the undisturbed build runs.
    """
    for part in range(3):
        write_c4(tmp_path / f"c4-{part}.json.gz", records=25, skip=25 * part)
    item = "This question of a test stands on a page and must not be learnt from it"
    passage = " ".join(f"word{number}" for number in range(60))
    for part, text in enumerate((f"First page. {passage}.", f"Second page. {passage}!", f"Third page. {item}.")):
        with gzip.open(tmp_path / f"c4-{part}.json.gz", "at") as more:
            more.write(json.dumps({"text": text, "url": f"http://{part}.org", "timestamp": "2019"}) + "\n")
    (tmp_path / "items.txt").write_text(item)
    sets = [{"name": "test", "path": str(tmp_path / "items.txt"), "format": "text"}]
    dedup = {"spans": True, "substrings": True, "minhash": True, "keys_per_bucket": 500}
    config = write_corpus_file(tmp_path / "corpus.yaml", dedup=dedup, decontamination={"sets": sets})
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    on_ray = "ray.small_bytes=0"
    build = at_work_on("lines-keys-merged", config, f"output={killed}", on_ray)
    started = family(build.pid)
    (raylet,) = raylets(started)
    raylet.kill()
    (tmp_path / "acted").touch()
    assert build.stdout is not None
    assert "raylet" not in build.stdout.read()  # Ray's 32 lines about it
    assert build.wait() == 1
    assert not (killed / "documents").exists()  # deduplication isn't finished
    for stage, *changes in (("tokens-merged", on_ray), ("shards",)):
        (tmp_path / "acted").unlink()
        build = at_work_on(stage, config, f"output={killed}", *changes)
        started += family(build.pid)
        build.kill()
        (tmp_path / "acted").touch()
        build.wait()

    done_here("data-pipeline", "build", config, f"output={whole}")
    monkeypatch.setattr(merging, "group_sizes", lambda files, readers: [2])
    printed = done_here("data-pipeline", "build", config, f"output={killed}")
    for stage in ("documents: 3 of 3", "substrings-keys: 3 of 3", "deduplicated: 3 of 3", "tokenizer: 1 of 1"):
        assert f"{stage} unit" in printed  # up to date: what was finished stays
    assert checksums(killed) == checksums(whole)
    found = report.read(killed)
    assert found.spans.dropped["duplicate_substring"] == found.evaluation_sets["test"].found == 1
    assert not list(killed.rglob("*.tmp"))
    psutil.wait_procs(started)  # otherwise the test takes too long: no process outlives its build
