"""A killed build ends with the same bytes. `python -m checks.soak.build` kills at random, for longer."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from checks.faults.builds import write_inputs
from data_pipeline.engine import merging
from data_pipeline.stages import report
from tests.support.builds import MERGING, checksums, family, raylets, with_fault
from tests.support.in_process import done_here

# What a killed driver leaves ends when it hasn't heard of it for so long, instead of 60 s; and a lost node is noticed
# after 5 s, not 15.
SOON = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5", "RAY_health_check_period_ms": "1000"}


def at_work_on(stage: str, config: Path, output: str) -> subprocess.Popen[str]:
    """A build on Ray that has begun the first unit of `stage`, which stays undone for a minute.

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
    monkeypatch.setattr(merging, "group_size", lambda files, readers: 2)
    printed = done_here("data-pipeline", "build", config, f"output={killed}")
    for stage in ("documents: 3 of 3", "substrings-keys: 3 of 3", "deduplicated: 3 of 3", "tokenizer: 1 of 1"):
        assert f"{stage} unit" in printed  # up to date: what was finished stays
    assert checksums(killed) == checksums(whole)
    found = report.read(killed)
    assert found.spans.dropped["duplicate_substring"] == found.evaluation_sets["test"].found == 1
    assert not list(killed.rglob("*.tmp"))
    psutil.wait_procs(started)  # otherwise the test takes too long: no process outlives its build
