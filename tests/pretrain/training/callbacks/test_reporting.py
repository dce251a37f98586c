"""Speed, MFU and forecasts in the lines of metrics."""

import itertools
import shutil
import time
from datetime import datetime
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from data_pipeline.loading.prefetch import example_sizes
from pretrain.device_speed import GPUS
from pretrain.models.flops import Sizes, count_flops
from pretrain.run.world import World
from pretrain.training.callbacks import reporting
from pretrain.training.callbacks.reporting import Speed, measured_peak, peak_flops
from tests.support.runs import losses, run_file, train_each
from tests.support.small_models import as_at_the_start, padded_rows
from tests.support.small_runs import run_config
from tests.support.tables import each


@each("name, tokens", [("t5", 20 + 9 + 12 + 5), ("decoder_only", 20 + 9)])
def test_the_meter_counts_real_tokens_once(one_rank, name, tokens):
    """Targets count too if a decoder reads them, and so do the steps before a pause. Ratios of metrics don't depend on
    the clock."""
    model = as_at_the_start(name)
    batch = padded_rows(model, (20, 12), (9, 5))
    speed, trainer = Speed(), SimpleNamespace(meta_model=model)
    trainer.config, trainer.run = run_config(), SimpleNamespace(world=World.on_this_node())
    trainer.engine = SimpleNamespace(device=torch.device("cpu"))

    def metrics_with(peak: float) -> dict[str, float]:
        speed._peak = peak
        speed.before_steps(trainer)
        for _ in range(3):
            speed.after_step(trainer, SimpleNamespace(waited=0.0, micro_batches=[batch, batch]))
            speed.after_pause(trainer)
        return speed.metrics(trainer)

    metrics = metrics_with(1e18)
    assert metrics["train/tokens_per_second"] / metrics["train/steps_per_second"] == pytest.approx(2 * tokens)
    flops = count_flops(model, Sizes(*example_sizes(batch).tolist()))
    assert metrics["train/mfu"] * 1e18 / metrics["train/steps_per_second"] == pytest.approx(2 * flops)
    assert 0 < metrics_with(1.0)["train/mfu"] <= 1  # a peak that was measured beside other programs is measured again


@each("dtype", [torch.float32, torch.bfloat16])
def test_the_measured_peak_is_work_over_time(monkeypatch, dtype):
    """By a clock that advances a second at each reading, twice a product, of all products that torch counts."""
    clock = itertools.count()
    monkeypatch.setattr(reporting, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    before = torch.random.get_rng_state()
    with FlopCounterMode(display=False) as counter:
        peak = measured_peak(dtype, torch.device("cpu"))
    assert peak == pytest.approx(counter.get_total_flops() / (next(clock) / 2))
    assert torch.equal(torch.random.get_rng_state(), before)


@each("precision, tf32, arithmetic", [("bf16", True, "bf16"), ("fp32", True, "tf32"), ("fp32", False, "fp32")])
def test_the_peak_is_that_of_the_runs_arithmetic(monkeypatch, precision, tf32, arithmetic):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    config = run_config(precision=precision, compute={"tf32": tf32})
    assert peak_flops(config, torch.device("cuda")) == GPUS["h100-pcie"].flops(arithmetic)


def test_a_long_run_says_early_when_it_will_end(capsys, monkeypatch):
    """9,997 steps of 78 s are 9.0 days; the first logged step may be an hour away."""
    now = 1767225600.0
    monkeypatch.setattr(reporting, "time", SimpleNamespace(**{**vars(time), "time": lambda: now}))
    config = SimpleNamespace(run=SimpleNamespace(max_steps=10_000))
    trainer = SimpleNamespace(config=config, report=SimpleNamespace(say=print), step=3)
    reporting.Reporting().forecast(trainer, 78.0)
    end = datetime.fromtimestamp(now + 9_997 * 78)
    assert f"a step takes 78 s: 9.0 days left, until about {end:%Y-%m-%d %H:%M}" in capsys.readouterr().out
    trainer.step = 9_990
    reporting.Reporting().forecast(trainer, 78.0)  # 13 minutes
    assert capsys.readouterr().out == ""


def test_a_run_says_when_it_is_off_what_was_expected_by_more_than_half(capsys):
    """100 steps, 0.5 a second, take 200 s: 0.0556 hours."""
    config = SimpleNamespace(run=SimpleNamespace(max_steps=100))
    trainer = SimpleNamespace(config=config, report=SimpleNamespace(say=print))
    for expected, said in ((190.0, ""), (299.0, ""), (301.0, "faster"), (134.0, ""), (133.0, "slower")):
        reporting.Reporting().compare(trainer, expected, 0.5)
        out = capsys.readouterr().out
        assert out.startswith(f"{said} than run.expected_hours: all steps take about 3 min, not " if said else "")
        assert bool(out) == bool(said)


def test_a_resumed_run_logs_the_same_means(small_corpus, tmp_path):
    """It has saved steps 3 and 6, and resumes from step 3; lines of metrics are of four steps each."""
    logging = {"checkpoint": {"every_steps": 3, "keep_last": 9}, "tracking": {"mlflow": None, "log_every_steps": 4}}
    whole, resumed = (
        run_file(tmp_path / name, small_corpus, evaluation=[], **logging) for name in ("whole", "resumed")
    )
    assert train_each(1, [(whole, None), (resumed, 6)]) == [[0, 75]]
    checkpoints = tmp_path / "resumed/run/checkpoints"
    shutil.rmtree(checkpoints / "step-00000006")
    (checkpoints / "latest").write_text("step-00000003\n")
    assert train_each(1, [(resumed, None)]) == [[0]]
    found = [{step: loss for step, loss in losses(path).items() if step in (4, 8)} for path in (whole, resumed)]
    assert len(found[0]) == 2
    assert found[0] == found[1]
