"""Checkpoints: complete or absent, readable on any ranks and stage, and safe against full disks and damage."""

import json
import pickle
import shutil
import threading
import time
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from data_pipeline.base.atomic import fingerprint, sha256, temporary_path
from data_pipeline.base.config_file import load
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.corpus import read_manifest
from data_pipeline.loading.stream import Skipped, Stream, flat
from launch.attempts import Run, launch_local
from pretrain.config import RunConfig
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint import save
from pretrain.engine.checkpoint.directory import checkpoint_directory
from pretrain.engine.checkpoint.index import Origin, is_valid, newest
from pretrain.engine.checkpoint.tensors import PARAMETER, StoredTensors, header, write_part
from pretrain.engine.checkpoint.trained import TrainedModel, average, save_weights
from pretrain.engine.optimizers import AVERAGE
from pretrain.engine.ranks import joined_world
from pretrain.models import build
from pretrain.run import watchdog
from pretrain.run.train_state import Health, TrainState
from pretrain.run.world import World
from pretrain.training.prepare import prepare
from tests.support.checkpoint_runs import OPTIMIZERS, STEPS, config, describe, flip, trained
from tests.support.in_process import done_here, refused_here
from tests.support.rank_processes import on_ranks
from tests.support.recorded import largest_relative_difference, recorded_rows, scheduled_rows
from tests.support.runs import losses, run_file, train, train_each, train_ranks
from tests.support.tables import each

BLOCK = Skipped("a corpus", "shards/train/shard-00000.tar", 512, "sha256 differs")


def test_a_file_is_read_by_safetensors_and_has_the_sha256_that_was_computed_on_the_way(tmp_path):
    tensors = {"b": torch.randn(1000, 1100), "a": torch.randn(7), "empty": torch.zeros(0), "scalar": torch.tensor(3.0)}
    content = header({name: list(one.shape) for name, one in tensors.items()})
    content += torch.cat([one.flatten() for one in tensors.values()]).numpy().tobytes()  # more than one block
    image, blocks = torch.frombuffer(bytearray(content), dtype=torch.uint8), []
    described = write_part(tmp_path, 0, image, {}, lambda: blocks.append(None))
    (path,) = tmp_path.glob("*.safetensors")
    file = described[path.name]
    assert len(blocks) == 2
    assert (file.bytes, file.sha256) == (path.stat().st_size, sha256(path))
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], one) for name, one in tensors.items())


@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks_and_stages(whole, small_corpus, tmp_path):
    """The same rows, and losses up to rounding, on 1 → 2 → 4 → 2 ranks at stages 1 → 3 → 2 → 1."""
    for ranks, stage, stop in ((1, 1, 3), (2, 3, 6), (4, 2, 9), (2, 1, STEPS)):
        codes = trained(ranks, tmp_path, small_corpus, stage, stop)
        assert codes == [[0 if stop == STEPS else 75] * len(OPTIMIZERS)] * ranks
    schedule = scheduled_rows(Stream([open_corpus(small_corpus)], [1.0], 0, 8), 16, STEPS)
    for optimizer in OPTIMIZERS:
        assert recorded_rows(tmp_path / optimizer) == schedule
        found, wanted = (losses(folder / optimizer / "run.yaml") for folder in (tmp_path, whole))
        assert largest_relative_difference(found, wanted) < 1e-5, optimizer
        ours, theirs = (
            StoredTensors(folder / optimizer / f"run/checkpoints/step-{STEPS:08d}") for folder in (tmp_path, whole)
        )
        for name in theirs.shapes:
            difference = (ours.whole(PARAMETER, name) - theirs.whole(PARAMETER, name)).norm()
            assert difference <= 1e-4 * theirs.whole(PARAMETER, name).norm(), (optimizer, name)


def test_the_launcher_itself_says_that_a_run_is_finished(finished, capsys):
    """It starts ranks only if the last checkpoint is damaged."""
    assert launch_local(Run(finished, []), ranks=2) == 0
    assert "is finished: 12 of 12 steps" in capsys.readouterr().out
    assert not (finished.parent / "run/logs").exists()
    last = finished.parent / "run/checkpoints/step-00000012"
    assert is_valid(last)
    flip(last / "rank-00000.safetensors")
    assert not is_valid(last)


def test_without_any_sound_checkpoint_a_run_begins_anew_on_request_alone(finished):
    """The existing run is then moved aside; on two ranks."""
    run = finished.parent / "run"
    for index in (run / "checkpoints").glob("*/index.json"):
        index.write_text("{}")
    done = train(finished, code=1)
    assert "no checkpoint is valid; --fresh starts a new run in its place" in done.stderr
    assert len(list((run / "checkpoints").glob("step-*"))) == 4
    assert train_ranks(finished, 2, "run.max_steps=1", fresh=True) == [0, 0]
    assert set(losses(finished)) == {1}
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000001"]
    assert len(list((finished.parent / "run.old-1/checkpoints").glob("step-*"))) == 4


def test_a_run_goes_on_over_junk_in_every_file_that_it_can_do_without(finished):
    """The latest checkpoint has a flipped bit, and the run resumes from the one before."""
    run = finished.parent / "run"
    for name in ("status.json", "tracking.json", "mlflow.json", "checkpoints/latest"):
        (run / name).write_bytes(b"\x80junk")
    (run / "config.yaml").write_text("- a\n- list\n")
    (run / "logs/attempt-junk").mkdir(parents=True)
    shutil.copytree(run / "checkpoints/step-00000012", run / "checkpoints/step-00000020.keep")
    tensors = run / "checkpoints/step-00000012/rank-00000.safetensors"
    flip(tensors)
    done = train(finished, "run.max_steps=13", "checkpoint.keep_last=1")
    assert "Traceback" not in done.stderr
    assert f"{run}/checkpoints/latest: names no checkpoint" in done.stderr
    assert "config.yaml: not a valid run file; kept as config.before-attempt-2.yaml" in done.stdout
    assert f"{tensors}: damaged: its checksum differs from index.json's" in done.stderr
    assert "steps 9 to 13" in done.stdout
    assert losses(finished).keys() == {*range(1, 14)}
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    # that of step 9 was resumed from, so it is known to be sound
    assert kept == ["latest", "step-00000009", "step-00000013", "step-00000020.keep"]


@pytest.mark.parametrize("moves", [True, False])
def test_waiting_for_a_save_counts_as_progress_while_the_save_gets_on(moves, monkeypatch):
    alone = Origin(Path(), World.on_this_node(), 2, {}, "", None, None, None)
    monkeypatch.setattr(save, "first_value", lambda value: value)
    monkeypatch.setattr(save.dist, "all_reduce", lambda tensor: None)
    saver = save.Saver(SimpleNamespace(device="cpu"), alone, None)
    saver._writing = writing = Mock(error=None, parts_ended=0, advanced=threading.Event())
    saver._thread = thread = Mock()
    thread.join.side_effect = lambda seconds: writing.advanced.set() if moves else None
    thread.is_alive.side_effect = [True] * 4 + [False]
    noted: list[None] = []
    monkeypatch.setattr(watchdog, "alive", lambda: noted.append(None))
    saver.wait()
    assert len(noted) == 2 + (5 if moves else 0)  # when the waiting begins and when it ends


def test_no_pickle_is_read(finished):
    """This holds for a pickle in the directory, and for one under the name of a file that is read."""

    class Planted:
        def __reduce__(self):
            return Path.touch, (finished.parent / "planted",)

    latest = newest(finished.parent / "run")
    for name in ("pytorch_model.bin", "mp_rank_00_model_states.pt"):
        (latest / name).write_bytes(pickle.dumps(Planted()))
    train(finished)
    tensors = latest / "rank-00000.safetensors"
    tensors.write_bytes(pickle.dumps(Planted()))
    describe(tensors)
    with pytest.raises(FailedError, match=r"rank-00000\.safetensors: damaged"):
        StoredTensors(latest).verify()
    assert not (finished.parent / "planted").exists()


def test_what_may_change_in_a_run_file_is_told_and_what_may_not_is_refused(finished):
    changed = (
        "run.max_steps=13",
        "schedule.warmup_steps=2",
        "optimizer.learning_rate=1e-4",
        "deepspeed.zero_optimization.stage=3",
        "checkpoint.keep_last=2",
    )
    done = train(finished, *changed)
    told = [line for line in done.stdout.splitlines() if line.startswith("changed since the last start: ")]
    keys = {line.split(": ")[1] for line in told}
    assert keys == {*(change.partition("=")[0] for change in changed), "run.directory"}  # it was moved as well
    assert "changed since the last start: run.max_steps: 12 → 13" in told
    assert "steps 12 to 13" in done.stdout
    assert "run.seed is 0 there, 1 here" in train(finished, "run.max_steps=14", "run.seed=1", code=2).stderr


WAYS_OUT = "set it back, or start a new run with --fresh or another run.directory"
# What docs/how-to/stop-and-resume.md says may change on resume, and what is refused: by its words, an override.
MAY_CHANGE = {
    "steps": "run.max_steps=20",
    "schedule": "schedule={name: constant}",
    "rates and other settings of the optimizer": "optimizer.betas=[0.8, 0.9]",
    "batch sizes": "batch={global_batch_size: 16, micro_batch_size: 2}",
    "precision": "precision=bf16",
    "ranks": None,
    "ZeRO": "deepspeed.zero_optimization.stage=2",
    "evaluation": "evaluation=[]",
    "tracking": "tracking.mlflow=null",
    "faults": "faults.max_restarts=0",
}
REFUSED = {
    "model": "model.d_ff=128",
    "teacher": None,  # examples/distillation/tests/test_distillation.py
    "tokenizer": None,  # it comes with another corpus
    "corpora and weights of the mixture": "data.train.0.weight=2.0",
    "objective": None,  # the next test
    "curriculum": None,
    "lanes": "data.lanes=4",
    "seed": "run.seed=1",
    "the optimizer itself": "optimizer={name: adafactor, learning_rate: 1e-2}",
    "`ema_decay`": "optimizer.ema_decay=0.5",
}


def test_the_page_says_what_may_change_on_resume(finished):
    """Each entry of the table is tried, on two ranks."""
    page = (Path(__file__).parents[3] / "docs/how-to/stop-and-resume.md").read_text()
    row = page[page.index("| may change | is refused") :].splitlines()[2]
    for words, overrides in zip(row.strip("|").split("|"), (MAY_CHANGE, REFUSED), strict=True):
        assert [one.strip() for one in words.split(", ")] == list(overrides)
    checkpoint = newest(finished.parent / "run")
    for override in MAY_CHANGE.values():
        changed = load(finished, ["run.max_steps=13", *([override] if override else [])], RunConfig)
        assert prepare(changed, World.on_this_node(2), checkpoint).train_state.step == 12, override
    for override in filter(None, REFUSED.values()):
        with pytest.raises(
            UserError, match=r"is of another run: .*; set it back, or start a new run with --fresh or another run\."
        ):
            prepare(load(finished, ["run.max_steps=13", override], RunConfig), World.on_this_node(2), checkpoint)


@each(
    "override, line",
    [
        ("model.d_ff=128", "model.d_ff is 64 there, 128 here"),
        ("run.seed=1", "run.seed is 0 there, 1 here"),
        ("optimizer={name: adafactor, learning_rate: 1e-2}", "optimizer.name is 'adamw' there, 'adafactor' here"),
        ("optimizer.ema_decay=0.5", "optimizer.ema_decay is null there, 0.5 here"),
        ("data.lanes=4", "data.lanes is 8 there, 4 here"),
        ("data.train.0.weight=2.0", "data.train.0.weight is 1.0 there, 2.0 here"),
        ("data.mixing={limit: 7}", "data.train.0.weight (by data.mixing) is 1.0 there, 7.0 here"),
        ("data.objective={name: prefix_lm, length: ROWS}", "data.objective.name is null there, 'prefix_lm' here"),
        (
            "data.curriculum=[{until_step: 3, objective: {name: prefix_lm, length: ROWS}}]",
            "data.curriculum.0.objective.name is null there, 'prefix_lm' here",
        ),
    ],
)
def test_a_refusal_to_resume_names_a_key_of_the_run_file_and_the_ways_out(finished, override, line):
    """A line for each key that decides; none for what differs because a section is of another kind."""
    rows = load(finished, [], RunConfig).data.train[0].corpus
    given = override.replace("ROWS", str(read_manifest(Path(rows)).rows.raw_length))
    changed = load(finished, ["run.max_steps=13", given], RunConfig)
    with pytest.raises(UserError) as refused:
        prepare(changed, World.on_this_node(2), newest(finished.parent / "run"))
    told = str(refused.value).splitlines()
    assert f"the checkpoint of step 12 is of another run: {line}; {WAYS_OUT}" in told
    keys = [one.split(": ")[1].split()[0] for one in told]
    assert set(keys) <= flat(changed.model_dump()).keys()


def test_a_setting_that_is_newer_than_a_checkpoint_has_its_default_there(finished):
    checkpoint = newest(finished.parent / "run")
    config = load(finished, ["run.max_steps=13"], RunConfig)
    own = prepare(config, World.on_this_node(2), checkpoint).identity
    saved = checkpoint_index.read(checkpoint)
    del saved.identity["model"]["relative_attention_in_every_layer"]
    assert saved.differences(own) == []
    (line,) = saved.differences({**own, "model": {**own["model"], "relative_attention_in_every_layer": True}})
    assert "model.relative_attention_in_every_layer is false there, true here" in line


def test_the_keys_of_the_train_state_stand_beside_the_others_in_an_index(finished, tmp_path):
    """Checkpoints of before lack the later ones."""
    written = json.loads((newest(finished.parent / "run") / checkpoint_index.INDEX).read_text())
    known = {one.name for one in fields(TrainState)}
    assert known <= written.keys()
    later = ("checksum", "health", "unlogged", "callbacks", "objective")
    earlier = {key: value for key, value in written.items() if key not in later}
    earlier |= {"step": 7, "position": 5, "consumed": [5], "skipped": [asdict(BLOCK)]}
    (tmp_path / checkpoint_index.INDEX).write_text(json.dumps({**earlier, "checksum": fingerprint(earlier)}))
    found = checkpoint_index.read(tmp_path)
    assert found.train_state == TrainState(7, 5, [BLOCK], Health(), {}, {})
    found.write(tmp_path)
    assert json.loads((tmp_path / checkpoint_index.INDEX).read_text()).keys() == written.keys()


def test_a_checkpoint_says_what_its_run_trained_on_wherever_it_is_opened(finished, monkeypatch):
    """Paths of corpora in a run file may be relative: no corpus is opened."""
    monkeypatch.setattr("pretrain.engine.checkpoint.trained.open_corpus", None)
    assert TrainedModel.open(newest(finished.parent / "run")).objective == "span_corruption"


def test_a_corpus_with_other_content_is_named_by_its_key(finished):
    saved = checkpoint_index.read(newest(finished.parent / "run"))
    other = json.loads(json.dumps(saved.identity))
    other["data"]["train"][0]["corpus"] = other["tokenizer_sha256"] = "0"
    assert saved.differences(other) == [
        f"the checkpoint of step 12 is of another run: {what} differs from the checkpoint's; {WAYS_OUT}"
        for what in ("data.train.0.corpus", "data.train.0.corpus's tokenizer")
    ]


def test_old_checkpoints_go_and_those_of_an_abandoned_course_do_not_count(finished):
    """The run, with four checkpoints, is set back to step 6 and then saves after every step. A save of
    an attempt before was killed."""
    checkpoints = finished.parent / "run/checkpoints"
    shutil.copytree(checkpoints / "step-00000009", temporary_path(checkpoints / "step-00000009"))
    (checkpoints / "latest").write_text("step-00000006\n")
    settings = ("checkpoint.every_steps=1", "checkpoint.keep_last=2", "checkpoint.keep_every_steps=3")
    train(finished, *settings, "--stop-at-step", "8", code=75)
    kept = sorted(path.name for path in checkpoints.glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in (3, 6, 7, 8, 9, 12)]
    train(finished, *settings)
    # that of step 8 was resumed from
    assert sorted(path.name for path in checkpoints.glob("step-*")) == [
        f"step-{step:08d}" for step in (3, 6, 8, 9, 11, 12)
    ]
    assert not list(checkpoints.glob(".*"))


def test_checkpoints_of_an_abandoned_course_go_once_the_run_has_passed_their_steps(finished):
    """The run, with four checkpoints, is set back to step 6 and saves at other steps than before. It would keep that
    of step 9 for good if it were its own."""
    checkpoints = finished.parent / "run/checkpoints"
    (checkpoints / "latest").write_text("step-00000006\n")
    settings = ("checkpoint.every_steps=2", "checkpoint.keep_last=4", "checkpoint.keep_every_steps=9")
    train(finished, *settings, "--stop-at-step", "10", code=75)
    kept = sorted(path.name for path in checkpoints.glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in (3, 6, 8, 10, 12)]


def test_a_rank_whose_disk_is_slow_to_confirm_does_not_fail_a_save(small_corpus, tmp_path):
    """Rank 0 renames the checkpoint's directory when each rank's files are on the disk."""
    assert on_ranks(2, on_a_slow_disk, tmp_path, small_corpus) == [75, 75]
    run = tmp_path / "adamw/run"
    index = checkpoint_index.read(checkpoint_directory(run, 3))
    checkpoint_index.verify(newest(run), index)


def on_a_slow_disk(folder: Path, corpus: Path) -> int:
    """Rank 1's disk confirms what is written long after rank 0's."""
    from data_pipeline.base import atomic
    from pretrain.training.run import train_in_group

    confirm = atomic.flush

    def slowly(path: Path) -> None:
        time.sleep(0.2)
        confirm(path)

    if dist.get_rank() == 1:
        atomic.flush = checkpoint_index.flush = slowly
    return train_in_group(joined_world(), config(folder, corpus, "adamw", stage=2), stop_at_step=3)


# Averages of checkpoints, and the moving average of a run's weights


DECAY, AVERAGED = 0.75, 4
OF_AVERAGES = {  # each with a stage of ZeRO
    "adamw": ({"name": "adamw"}, 3),
    "muon": ({"name": "muon", "newton_schulz_dtype": "fp32"}, 1),
    "adafactor": ({"name": "adafactor", "min_dim_size_to_factor": 16}, 2),
}


def average_file(folder, corpus, name):
    optimizer, stage = OF_AVERAGES[name]
    return run_file(
        folder,
        corpus,
        stage,
        run={"max_steps": AVERAGED},
        batch={"global_batch_size": 8, "micro_batch_size": 2},
        optimizer={"learning_rate": 1e-2, **optimizer, "ema_decay": DECAY},
        checkpoint={"every_steps": 1, "keep_last": AVERAGED},
        evaluation=[],
    )


@pytest.fixture(scope="module")
def runs(small_corpus, tmp_path_factory) -> Path:
    """A run with AdamW; "resumed" is the same, but stops after two steps and continues."""
    folder = tmp_path_factory.mktemp("averages")
    whole, resumed = (average_file(folder / name, small_corpus, "adamw") for name in ("adamw", "resumed"))
    train_each(2, [(whole, None), (resumed, 2), (resumed, None)])
    return folder


def stored(runs, name, step):
    return StoredTensors(checkpoint_directory(runs / name / "run", step))


@pytest.mark.slow
def test_the_moving_average_is_that_of_the_parameters_after_each_step(small_corpus, tmp_path):
    train_each(2, [(average_file(tmp_path / name, small_corpus, name), None) for name in OF_AVERAGES])
    for name in OF_AVERAGES:
        saved = [stored(tmp_path, name, step) for step in range(1, AVERAGED + 1)]
        for parameter in saved[0].shapes:
            expected = saved[0].whole(PARAMETER, parameter)
            for one in saved:
                values = one.whole(PARAMETER, parameter)
                expected = DECAY * expected + (1 - DECAY) * values
                torch.testing.assert_close(one.whole(AVERAGE, parameter), expected, rtol=1e-6, atol=1e-8)
            assert not torch.equal(expected, values), (name, parameter)


def test_a_resumed_run_has_the_same_moving_average_to_the_bit(runs):
    whole, resumed = (stored(runs, name, AVERAGED) for name in ("adamw", "resumed"))
    for parameter in whole.shapes:
        assert torch.equal(whole.whole(AVERAGE, parameter), resumed.whole(AVERAGE, parameter))


def test_an_average_is_one_runs_from_its_start_and_not_on_nvme(runs, small_corpus, tmp_path):
    changed = load(runs / "adamw/run.yaml", ["optimizer.ema_decay=0.5"], RunConfig)
    with pytest.raises(UserError, match=r"optimizer\.ema_decay is 0\.75 there, 0\.5 here"):
        prepare(changed, World.on_this_node(2), newest(runs / "adamw/run"))
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    optimizer = {"learning_rate": 1e-2, "ema_decay": 0.5}
    path = run_file(tmp_path, small_corpus, optimizer=optimizer, deepspeed={"zero_optimization": zero})
    with pytest.raises(UserError, match=r"optimizer\.ema_decay: DeepSpeed can't keep the moving average on NVMe"):
        load(path, [], RunConfig)


def test_the_last_checkpoints_of_a_run_are_averaged(runs, tmp_path):
    run = runs / "adamw/run"
    done_here("pretrain", "average", run, tmp_path / "mean", "--last", "3")
    mean = StoredTensors(tmp_path / "mean")
    mean.verify()
    assert mean.index.step == AVERAGED
    for parameter in mean.shapes:
        expected = sum(stored(runs, "adamw", step).whole(PARAMETER, parameter).double() for step in (2, 3, 4)) / 3
        assert torch.equal(mean.whole(PARAMETER, parameter), expected.float())
        assert mean.states(parameter) == []
    TrainedModel.open(tmp_path / "mean")
    printed = done_here("pretrain", "evaluate", tmp_path / "mean", "--hook", "validation_loss", "--json")
    assert json.loads(printed)["validation/small/loss"] > 0
    done_here("pretrain", "export", tmp_path / "mean", tmp_path / "out")
    assert "the mean of the weights after steps 2, 3, 4" in (tmp_path / "out/README.md").read_text()
    refused = refused_here(2, "pretrain", "average", run, tmp_path / "more", "--last", "5")
    assert "the run has 4 checkpoints" in refused


def opened_together(directory: Path, damaged: Path) -> tuple[int, str]:
    """The bytes that this rank reads of a checkpoint, and what it says of one that is `damaged`."""
    for _ in range(2):  # the first time reads modules too
        before = psutil.Process().io_counters().read_chars
        TrainedModel.open(directory, together=True)
        read = psutil.Process().io_counters().read_chars - before
    with pytest.raises(FailedError) as refused:
        TrainedModel.open(damaged, together=True)
    return read, str(refused.value)


def test_of_a_checkpoint_that_ranks_open_together_each_reads_a_share_and_draws_nothing(runs, tmp_path):
    one = TrainedModel.open(checkpoint_directory(runs / "adamw/run", AVERAGED))
    larger = build(one.model.config.model_copy(update={"pad_vocab_to_multiple_of": 40_000}))
    for name in ("whole", "damaged"):
        save_weights(larger.config, larger.state_dict(), one.tokenizer, tmp_path / name)
    file = tmp_path / "damaged/rank-00000.safetensors"
    flip(file)
    found = on_ranks(2, opened_together, tmp_path / "whole", tmp_path / "damaged")
    assert file.stat().st_size > 5e6
    assert 1 <= sum(read for read, _ in found) / file.stat().st_size < 1.5
    assert {said for _, said in found} == {f"{file}: damaged: its checksum differs from index.json's"}
    before = torch.get_rng_state()
    opened = TrainedModel.open(tmp_path / "whole").model.state_dict()
    assert all(torch.equal(opened[name], tensor) for name, tensor in larger.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_moving_average_becomes_a_checkpoint(runs, tmp_path):
    done_here("pretrain", "average", runs / "adamw/run", tmp_path / "ema", "--ema")
    made, source = StoredTensors(tmp_path / "ema"), stored(runs, "adamw", AVERAGED)
    for parameter in made.shapes:
        assert torch.equal(made.whole(PARAMETER, parameter), source.whole(AVERAGE, parameter))
    refused = refused_here(2, "pretrain", "average", tmp_path / "ema", tmp_path / "again", "--ema")
    assert "has no moving average" in refused


def test_other_models_are_refused_in_one_line(runs, tmp_path):
    one = TrainedModel.open(checkpoint_directory(runs / "adamw/run", AVERAGED))
    wider = build(one.model.config.model_copy(update={"d_ff": 96}))
    save_weights(wider.config, wider.state_dict(), one.tokenizer, tmp_path / "wider")
    with pytest.raises(UserError, match=r"wider: not of the same model as .*model\.d_ff") as refused:
        average([checkpoint_directory(runs / "adamw/run", AVERAGED), tmp_path / "wider"], tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()
    line = refused_here(2, "pretrain", "average", tmp_path / "out")
    assert "give checkpoints, or a run, and then a new directory" in line
