"""Runs of the command, on real text: started, stopped, resumed, broken on purpose, and compared with the CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from checks.gpu.corpus import make
from checks.gpu.report import Json, Report
from checks.gpu.runner import ROOT, Place
from checks.gpu.workload import Workload
from data_pipeline.foundation.atomic import write_json
from pretrain.checkpoint.directory import all_steps
from pretrain.run.metrics_file import read_metrics

HOOKS = ROOT / "checks/gpu/hooks"
STOPPED = 75  # the exit code of a run that saved and stopped
FAULTS = ("exception", "memory", "kill")
SECONDS_TO_END = 15.0
SMALL: Json = {
    "family": "t5",
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_heads": 4,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
}


def launch(report: Report) -> None:
    """`launch local` with one rank: bf16, loader processes, SIGUSR1 on the way, then on to the end."""
    corpus = make(report.folder / "corpus")
    steps = 20 if report.small else 100
    path = _run_file(report, "launch", corpus, steps, data={"workers": 2})
    run = report.folder / "launch"
    started = time.monotonic()
    process = _start("launch", "local", path, "--ranks", "1")
    _wait_for_step(run, 5, process)
    report.fact("seconds_to_step_5", time.monotonic() - started)
    process.send_signal(signal.SIGUSR1)
    asked = time.monotonic()
    code = process.wait()
    report.fact("seconds_to_stop", time.monotonic() - asked)
    stopped = max((row.step for row in read_metrics(run)), default=0)
    report.expect("SIGUSR1 saves and stops", code == STOPPED and all_steps(run) == [stopped], [code, stopped])
    started = time.monotonic()
    code = _start("launch", "local", path, "--ranks", "1").wait()
    report.fact("seconds_to_finish", time.monotonic() - started)
    rows = read_metrics(run)
    report.expect("it resumes and finishes", code == 0 and all_steps(run)[-1:] == [steps], [code, all_steps(run)])
    report.expect("every step is taken once", [row.step for row in rows] == list(range(1, steps + 1)))
    losses = [row.metrics["train/loss"] for row in rows]
    report.expect("the loss falls", losses[-1] < losses[0] - 0.1, [losses[0], losses[-1]])
    report.fact("last_metrics", rows[-1].metrics)


def deaths(report: Report) -> None:
    """A rank that breaks inside a step: `launch local` ends soon, with an error."""
    corpus = make(report.folder / "corpus")
    for fault in FAULTS:
        with report.part(fault):
            path = _run_file(report, fault, corpus, 50)
            note = report.folder / f"{fault}.time"
            hooks = {"PYTHONPATH": f"{HOOKS}{os.pathsep}{os.environ['PYTHONPATH']}"}
            planted = {"FAULT": fault, "FAULT_STEP": "3", "FAULT_NOTE": str(note)}
            code = _start("launch", "local", path, "--ranks", "1", environment=hooks | planted).wait()
            ended = time.time()
            seconds = ended - float(note.read_text())
            report.fact(f"{fault}: seconds to the exit code", seconds)
            report.expect(f"{fault}: it ends as failed", code not in (0, STOPPED), code)
            report.expect(f"{fault}: soon", seconds < SECONDS_TO_END, seconds)


def auto_micro_batch(report: Report) -> None:
    """The largest micro-batch that fits, chosen by the run, which then trains with it."""
    work = Workload(report)
    # a row has as many tokens as inputs and targets together, or fewer
    corpus = make(report.folder / "corpus", inputs=work.inputs, random_tokens=700 * (work.inputs + work.targets))
    model = {name: value for name, value in work.model.items() if name != "vocab_size"}
    model["pad_vocab_to_multiple_of"] = work.model["vocab_size"]
    batch = {"global_batch_size": work.rows, "micro_batch_size": "auto"}
    path = _run_file(report, "auto", corpus, 4, model=model, batch=batch)
    process = _start("pretrain", "train", path)
    run = report.folder / "auto"
    report.expect("it trains", process.wait() == 0, process.returncode)
    chosen = json.loads((run / "micro_batch.json").read_text())
    report.fact("micro_batch_size", chosen["micro_batch_size"])
    report.expect("it divides the batch", work.rows % chosen["micro_batch_size"] == 0)
    report.fact("metrics", read_metrics(run)[-1].metrics)


def loss_curve(report: Report) -> None:
    """The same run in bf16 on the device and on the CPU: the losses agree."""
    steps = 15 if report.small else 50
    corpus = make(report.folder / "corpus")
    here = _run_file(report, "here", corpus, steps)
    there = _run_file(report, "there", corpus, steps, precision="bf16" if report.cuda else "fp32")
    if not report.cuda:
        report.skip("CUDA against CPU", "no GPU: bf16 is compared with fp32 on the CPU")
    processes = [
        _start("pretrain", "train", here),
        _start("pretrain", "train", there, environment=Place("cpu", small=True).environment),
    ]
    codes = [process.wait() for process in processes]
    report.expect("both finish", codes == [0, 0], codes)
    found, wanted = (
        [row.metrics["train/loss"] for row in read_metrics(report.folder / name)] for name in ("here", "there")
    )
    differences = [abs(one - other) / other for one, other in zip(found, wanted, strict=True)]
    report.fact("losses", found[:: max(1, steps // 10)])
    report.fact("largest_relative_difference", max(differences))
    # bf16 rounds by up to 2⁻⁹; a mean over hundreds of targets is nearer
    report.expect("the losses agree", max(differences) < 1e-2, max(differences))


def _run_file(report: Report, name: str, corpus: Path, steps: int, **changes: Any) -> Path:
    """A run file without MLflow; sections in `changes` add to the sections here."""
    sections: dict[str, Any] = {
        "run": {"name": name, "directory": str(report.folder / name), "max_steps": steps, "cpu_threads": 1},
        "model": SMALL,
        "data": {"train": [{"corpus": str(corpus)}], "lanes": 8, "workers": 0},
        "batch": {"global_batch_size": 16, "micro_batch_size": 8},
        "optimizer": {"learning_rate": 3e-3, "gradient_clipping": 1.0},
        "schedule": {"name": "constant"},
        "precision": "bf16",
        "compute": {"compile": False},  # which `throughput` does: it takes a small model 20 s at each start
        "checkpoint": {"every_steps": 1000},
        "tracking": {"mlflow": None, "log_every_steps": 1},
    }
    for section, values in changes.items():
        new = section == "model" or not isinstance(values, dict)
        sections[section] = values if new else {**sections[section], **values}
    path = report.folder / f"{name}.yaml"
    write_json(path, sections)  # JSON is YAML
    return path


def _start(module: str, *arguments: object, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """`python -m module arguments` in the background; its output goes to this check's."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)], env={**os.environ, **(environment or {})}
    )


def _wait_for_step(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    while not any(row.step >= step for row in (read_metrics(run) if run.exists() else [])):
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with {process.returncode} before step {step}")
        time.sleep(0.05)
