"""Training through DeepSpeed with real ranks on a real corpus: exactness, resume, damage, tracking."""

import contextlib
import io
import json
import math
import re
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest
from deepspeed.ops.op_builder import AsyncIOBuilder
from mlflow import MlflowClient

from data_pipeline.corpus import open_corpus
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.run import heartbeat, rank_logs, restarts, status
from pretrain.run.metrics_file import MetricLog, read_metrics
from pretrain.run.status import Status
from pretrain.training.tracking.mlflow_store import TrackedRun
from tests.support.forked import Forked, run_forked
from tests.support.object_store import copy_corpus, serving
from tests.support.rank_processes import each as runs_of_ranks
from tests.support.rank_processes import on_ranks
from tests.support.runs import MODEL, _train_each, losses, mlflow, run_file, train, train_each, train_ranks
from tests.support.slow import slow
from tests.support.tables import each


@pytest.fixture(scope="module")
def reference(small_corpus, empty_mlflow, tmp_path_factory) -> Path:
    """A finished run of one rank at ZeRO stage 2; returns its run file."""
    folder = tmp_path_factory.mktemp("reference")
    empty_mlflow(folder)
    path = run_file(folder, small_corpus, tracking=mlflow(folder))
    train(path)
    return path


def test_a_run_leaves_what_the_contract_says(reference):
    folder = reference.parent / "run"
    assert {"config.yaml", "environment.json", "metrics.jsonl", "checkpoints"} <= {p.name for p in folder.iterdir()}
    metrics = {name for row in read_metrics(folder) for name in row.metrics}
    expected = {"loss", "learning_rate", "gradient_norm", "tokens_per_second", "mfu", "data_wait_fraction"}
    assert {f"train/{name}" for name in expected} | {"validation/small/loss"} <= metrics
    assert (folder / "checkpoints" / "latest").read_text() == "step-00000008\n"
    index = json.loads((folder / "checkpoints/step-00000008/index.json").read_text())
    assert (index["step"], index["position"], index["world_size"], index["zero_stage"]) == (8, 128, 1, 2)
    suffixes = {path.suffix for path in (folder / "checkpoints/step-00000008").rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors", ".yaml", ".model", ".vocab"}  # no pickle
    # unit-normal logits: half a nat above a uniform guess
    assert abs(losses(reference)[1] - math.log(520) - 0.5) < 0.3


def test_losses_are_equal_to_the_bit_where_only_ranks_and_stage_differ(small_corpus, tmp_path):
    """Two micro-batches on one rank or two, with fixed threads and without clipping, whose norm depends on the
    shards."""
    exact = {
        "model": {**MODEL, "dropout_rate": 0.0, "num_decoder_layers": 3},
        "batch": {"global_batch_size": 16, "micro_batch_size": 8},
        "optimizer": {"learning_rate": 1e-2, "gradient_clipping": 0},
    }
    found = []
    for stage, ranks in ((1, 1), (3, 2)):
        path = run_file(tmp_path / f"{stage}-{ranks}", small_corpus, stage, **exact)
        assert train_ranks(path, ranks) == [0] * ranks
        found.append(losses(path))
    assert found[0] == found[1]


ON_CPU = [(2, "bf16", "cpu", ["optimizer"]), (3, "bf16", "cpu", ["optimizer", "param"])]
ON_NVME = [(3, "bf16", "nvme", kinds) for kinds in (["optimizer"], ["optimizer", "param"])]


def without_arithmetic_for_bf16(path: Path) -> str:
    """Trains as on a CPU without it; returns what the run prints."""
    from pretrain.training import run

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(run, "cpu_multiplies_bf16", lambda: False)
        assert _train_each([(path, None)]) == [0]
    return printed.getvalue()


def test_a_run_in_bf16_is_one_in_fp32_on_a_cpu_that_does_not_multiply_bf16(small_corpus, tmp_path):
    """To the bit, Muon's products too, and a line says so."""
    muon = {"name": "muon", "learning_rate": 1e-3}
    settings = {"bf16": muon, "fp32": muon | {"newton_schulz_dtype": "fp32"}}
    paths = [
        run_file(tmp_path / name, small_corpus, 1, {"max_steps": 2}, precision=name, optimizer=optimizer)
        for name, optimizer in settings.items()
    ]
    in_bf16, in_fp32 = on_ranks(1, runs_of_ranks, without_arithmetic_for_bf16, [(path,) for path in paths])[0]
    assert losses(paths[0]) == losses(paths[1])
    line = "precision: this CPU has no arithmetic for bf16, so the run computes in fp32\n"
    assert in_bf16.count(line) == 1
    assert line not in in_fp32


@each(
    "stage, precision, place, offloaded",
    [(2, "fp32", "", []), *slow((1, "bf16", "", []), (3, "bf16", "", []), *ON_CPU, *ON_NVME)],
)
def test_a_stopped_and_resumed_run_repeats_the_whole_runs_losses_to_the_bit(
    small_corpus, tmp_path, empty_mlflow, stage, precision, place, offloaded
):
    """Two ranks, two micro-batches each, dropout on; the second with CUDA graphs, as far as a CPU has them. MLflow
    continues under the same id. The same command, given again, leaves the run where it was to stop."""
    if place == "nvme" and not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("libaio's headers are missing")
    empty_mlflow(tmp_path)

    def file(name: str, **sections: Any) -> Path:
        given = {"device": place, **({"nvme_path": str(tmp_path / name)} if place == "nvme" else {})}
        zero = {"stage": stage, **{f"offload_{kind}": given for kind in offloaded}}
        sections |= {"precision": precision, "deepspeed": {"zero_optimization": zero}}
        return run_file(tmp_path / name, small_corpus, **sections)

    whole, parts = file("whole"), file("parts", tracking=mlflow(tmp_path), compute={"cuda_graphs": True})
    assert train_each(2, [(whole, None), (parts, 3), (parts, 3), (parts, 2)]) == [[0, 75, 75, 75]] * 2
    assert list(losses(parts)) == [1, 2, 3]
    state = parts.parent / "run/mlflow.json"
    run_id = json.loads(state.read_text())["run_id"]
    assert train_each(2, [(parts, None)]) == [[0]] * 2
    assert json.loads(state.read_text())["run_id"] == run_id
    assert losses(whole) == losses(parts)
    validation = [read_metrics(path.parent / "run")[-1].metrics for path in (whole, parts)]
    assert validation[0]["validation/small/loss"] == validation[1]["validation/small/loss"]


def test_a_damaged_block_stops_a_run_or_is_passed_over(small_corpus, tmp_path):
    """Every rank skips its own share; the checkpoint lists what all have skipped.

    All held-out blocks are damaged: their loss is NaN, and the log says why.
    """
    corpus = tmp_path / "corpus"
    shutil.copytree(small_corpus, corpus)
    for split, every in (("train", 2), ("validation", 1)):
        blocks = open_corpus(corpus).blocks(split)
        for shard in (corpus / "shards" / split).iterdir():
            content = bytearray(shard.read_bytes())
            for place in blocks.of_shard(f"shards/{split}/{shard.name}")[::every].tolist():
                content[int(blocks.offset[place]) + 700] ^= 1
            shard.write_bytes(content)
    path = run_file(tmp_path, corpus)
    assert "sha256 differs" in train(path, code=1).stderr
    assert train_ranks(path, 2, "data.on_damage=skip", stop=7) == [75, 75]
    skipping = train(path, "data.on_damage=skip")
    index = checkpoint_index.read(tmp_path / "run/checkpoints/step-00000008")
    assert index.train_state.position == 128
    assert len(index.train_state.skipped) >= 2
    assert all(one.shard.startswith("shards/train/") for one in index.train_state.skipped)
    (metrics,) = [row.metrics for row in read_metrics(tmp_path / "run") if "validation/small/loss" in row.metrics]
    assert math.isnan(metrics["validation/small/loss"])
    rows = open_corpus(corpus).rows("validation")
    assert metrics["validation/small/damaged_rows"] == rows
    assert f"{rows} of {rows} rows have no targets (damaged, or too short for the objective)" in skipping.stdout
    saved = r"step-00000008: [\d.]+ [kM]B in [\d.]+ s \([\d.]+ s of processor time\); training"
    assert re.search(saved, skipping.stdout)


def test_no_file_of_a_run_holds_a_password(small_corpus, tmp_path, monkeypatch):
    """Neither that of a URL nor those of the environment. No file of this checkout has it, whose changes are kept.

    A checkpoint is evaluated and exported without the password, which only MLflow needs."""
    password = uuid.uuid4().hex
    monkeypatch.setenv("HF_TOKEN", password)
    path = run_file(tmp_path, small_corpus)
    uri = f"tracking.mlflow.uri=http://me:{password}@127.0.0.1:9"
    train(path, uri, "--stop-at-step", "1", code=75)
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert {file.name for file in files} >= {"config.yaml", "environment.json", "tracking.json"}
    assert [file for file in files if password.encode() in file.read_bytes()] == []
    assert run_forked("evaluate", tmp_path / "run", "--hook", "validation_loss").returncode == 0
    assert run_forked("export", tmp_path / "run", tmp_path / "out").returncode == 0
    assert "## Settings" in (tmp_path / "out/README.md").read_text()
    said = "tracking.mlflow.uri: http://me:***@127.0.0.1:9: the password isn't recorded"
    assert said in train(tmp_path / "run/config.yaml", code=2).stderr


def test_mlflow_has_the_metrics_parameters_corpora_and_config(reference, small_corpus):
    """And the run, which is finished, says so when it is started again."""
    before = losses(reference)
    assert "is finished: 8 of 8 steps" in train(reference).stdout
    assert losses(reference) == before
    state = json.loads((reference.parent / "run/mlflow.json").read_text())
    client = MlflowClient(state["tracking_uri"])
    found = client.get_run(state["run_id"])
    history = client.get_metric_history(state["run_id"], "train/loss")
    assert {metric.step: metric.value for metric in history} == losses(reference)
    assert {"train/gradient_norm", "train/learning_rate", "train/tokens_per_second"} <= found.data.metrics.keys()
    parameters = int(found.data.params["parameters"])
    assert f"of {parameters:,} parameters learns `span_corruption` on small " in found.data.tags["mlflow.note.content"]
    split = json.loads((small_corpus / "manifest.json").read_text())["splits"]["train"]
    assert found.data.metrics["train/tokens"] == pytest.approx(128 * split["tokens"] / split["rows"])  # 8 × 16 rows
    assert 0.1 < found.data.metrics["train/peak_memory_gigabytes"] < 16
    assert found.info.status == "FINISHED"
    assert found.data.params["optimizer.learning_rate"] == "0.01"
    fingerprint = json.loads((small_corpus / "manifest.json").read_text())["fingerprint"]
    assert {found.data.tags[f"data.{split}.0.fingerprint"] for split in ("train", "validation")} == {fingerprint}
    artifacts = {artifact.path for artifact in client.list_artifacts(state["run_id"])}
    assert {"config.yaml", "picture.png"} <= artifacts


def test_a_variable_that_is_empty_is_one_that_is_not_set(small_corpus, tmp_path):
    """As `SLURM_NTASKS= pretrain train`; a rank needs all that a launcher gives it."""
    path = run_file(tmp_path, small_corpus, run={"max_steps": 1}, evaluation=[])
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "HOME"]
    names += ["SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TMPDIR", "MKL_CBWR"]
    names += [rank_logs.SUPERVISED, heartbeat.DIRECTORY, restarts.EARLIER]
    with Forked("train", path, **dict.fromkeys(names, "")) as trained:
        assert trained.wait() == 0, trained.stderr
    with Forked("train", path, "--fresh", RANK="0", WORLD_SIZE="") as alone:
        assert alone.wait() == 2
        lacking = "LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
        assert alone.stderr.splitlines()[-1].startswith(
            f"error: RANK is set, but not {lacking}: a launcher sets all of them"
        )


def test_a_restarted_rank_waits_until_the_run_is_unlocked(small_corpus, tmp_path):
    """As after the machine of the earlier rank 0 was lost."""
    path = run_file(tmp_path, small_corpus, run={"max_steps": 1}, evaluation=[])
    (tmp_path / "run").mkdir()
    held = status.lock(tmp_path / "run")
    with Forked("train", path, **{restarts.EARLIER: "9.0"}) as again:

        def waits() -> bool:
            return str(tmp_path / "run" / status.LOCK) in [file.path for file in psutil.Process(again.pid).open_files()]

        while again.code is None and not waits():
            time.sleep(0.02)
        held.close()
        assert again.wait() == 0, again.stderr


def test_a_run_fills_blanks_of_its_corpus(reference, small_corpus, tmp_path):
    done = run_forked("generate", reference.parent / "run", "--corpus", small_corpus, "-n", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("masked ") == done.stdout.count("model ") == done.stdout.count("original ") == 2
    copy = shutil.copytree(small_corpus, tmp_path / "copy", ignore=shutil.ignore_patterns("documents"))
    refused = run_forked("generate", reference.parent / "run", "--corpus", copy)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == f"error: {copy}: no held-out sentence to mask; give a TEXT"


def test_a_run_that_died_is_recorded_at_the_next_start(small_corpus, tmp_path, monkeypatch):
    """In a job of SLURM, whose nodes share a disk: MLflow isn't fed unless the run file names a server."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.chdir(tmp_path)
    path, run = run_file(tmp_path, small_corpus, tracking={"mlflow": {"experiment": "tests"}}), tmp_path / "run"
    MetricLog(run, attempt=3).log(7, {"train/loss": 1.0})
    status.write(run, Status("running", 3))
    TrackedRun("tests", "mine", 3).save(run)
    done = run_forked("train", path, "--fresh", "--stop-at-step", "1")
    assert done.returncode == 75, done.stderr
    assert re.search(rf"{run}: attempt 3 died on \S+ \S+ after step 7: ", done.stdout)
    assert "--fresh begins another run; to resume this one, leave it out" in done.stdout
    old = tmp_path / "run.old-1"
    died = status.read(old)
    assert (died.state, died.attempt, died.step) == ("died", 3, 7)
    assert (TrackedRun.load(old).status, TrackedRun.load(old).ended) == ("FAILED", died.ended)
    assert [(one.attempt, one.outcome, one.step, one.killed) for one in restarts.read(old)] == [(3, "failed", 7, True)]
    assert status.read(run).state == "stopped"
    assert "MLflow: off, since nodes share the disk; set tracking.mlflow.uri to a server\n" in done.stdout
    assert (TrackedRun.load(run).uri, [*tmp_path.glob("runs/*")]) == (None, [])


# Training straight from a real S3 server


@pytest.fixture
def store(monkeypatch):
    yield from serving(monkeypatch)


@pytest.mark.slow
def test_a_store_that_goes_away_stops_the_run_saved_and_it_goes_on_to_the_same_losses(small_corpus, store, tmp_path):
    url = "s3://bucket/corpus"
    copy_corpus(small_corpus, store, url)
    many_rows = {"batch": {"global_batch_size": 64, "micro_batch_size": 32}, "evaluation": []}
    data = {"train": [{"corpus": str(small_corpus)}], "lanes": 1, "workers": 0}  # a run meets new blocks until its end
    cached = {"workers": 2, "prefetch_factor": 1, "cache": {"directory": str(tmp_path / "cache"), "wait_seconds": 10.0}}
    local = run_file(tmp_path / "local", small_corpus, data=data, **many_rows)
    data |= {"train": [{"corpus": url}], **cached}
    remote = run_file(tmp_path / "remote", small_corpus, data=data, **many_rows)
    train(local)
    store.calm()
    store.blocks_left = 6  # of 8 or more, each read by one worker or by both
    done = train(remote, code=75)
    stopped = max(losses(remote))
    assert 0 < stopped < 8
    assert f"warning: {url}/shards/train/" in done.stderr
    assert f"run the same command again later; stopping after step {stopped}, which is saved" in done.stderr
    assert "Traceback" not in done.stderr
    store.calm()
    store.faults = True
    train(remote, "data.cache.wait_seconds=120")
    assert store.busy
    assert store.broken
    assert losses(remote) == losses(local)
    assert len(losses(local)) == 8
