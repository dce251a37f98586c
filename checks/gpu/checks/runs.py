"""Runs of the command, on real text: started, stopped, resumed, broken on purpose, and compared with the CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from checks.gpu.corpus import make
from checks.gpu.report import Json, Report
from checks.gpu.runner import ROOT, Place
from checks.gpu.workload import BASE
from data_pipeline.base.atomic import write_json
from pretrain.engine.checkpoint.directory import all_steps
from pretrain.run.metrics_file import FILE_NAME, read_metrics, rows_from

STOPPED = 75  # the exit code of a run that saved and stopped
SECONDS_TO_END = 15.0
_COMPARED = 12  # steps: on one CPU, losses in bf16 and in fp32 are within 0.003 for as many, and 0.09 apart at the 15th
# Heads as wide as those of T5 v1.1, so that its kernels, once compiled, serve.
SMALL: Json = {"family": "t5", "d_model": 64, "d_kv": 64, "d_ff": 128, "num_heads": 2, "dropout_rate": 0.0}
SMALL |= {"num_encoder_layers": 2, "num_decoder_layers": 2}
_LOSS = "train/loss"


def runs(report: Report) -> None:
    """Small runs, all at once: none of them is timed, but how soon those end that break."""
    corpus = make(report.folder / "corpus")
    steps = 12 if report.small else 60
    kinds = ["memory", "kill"]
    if report.small:
        report.skip("exception", "on a CPU, memory that runs out is an exception like any other")
    else:
        kinds.append("exception")
    cases: dict[str, Callable[[str], None]] = {
        "stopped": lambda name: _stopped(report, name, corpus, steps),
        "two ranks over gloo": lambda name: _two_ranks(report, name, corpus, steps),
        "auto": lambda name: _auto(report, name, corpus),
        **{kind: lambda name: _broken(report, name, corpus) for kind in kinds},
    }

    def take(case: tuple[str, Callable[[str], None]]) -> None:
        with report.part(case[0]):
            case[1](case[0])

    with ThreadPoolExecutor(len(cases)) as threads:
        list(threads.map(take, cases.items()))
    with report.part("losses"):
        here, there = (
            [row.metrics[_LOSS] for row in read_metrics(report.folder / name)]
            for name in ("stopped", "two ranks over gloo")
        )
        differences = [abs(one - other) / other for one, other in zip(here, there, strict=True)]
        report.fact("losses", here[:: max(1, steps // 10)])
        # bf16 rounds by up to 2⁻⁹; a mean over hundreds of targets is nearer. Later steps multiply what rounds.
        judged = max(differences[:_COMPARED])
        report.expect("two ranks on the CPU have these losses", judged < 1e-2, [judged, max(differences)])


def _stopped(report: Report, name: str, corpus: Path, steps: int) -> None:
    """`launch local` with one rank: bf16, loader processes, SIGUSR1 on the way, then on to the end."""
    path = _run_file(report, name, corpus, steps, data={"workers": 2})
    run = report.folder / name
    started = time.monotonic()
    process = _start("launch", "local", path, "--ranks", "1")
    _wait_for_step(run, 2, process)
    report.fact("seconds_to_step_2", time.monotonic() - started)
    process.send_signal(signal.SIGUSR1)
    asked = time.monotonic()
    code = process.wait()
    report.fact("seconds_to_stop", time.monotonic() - asked)
    stopped = max((row.step for row in read_metrics(run)), default=0)
    report.expect("SIGUSR1 saves and stops", code == STOPPED and all_steps(run) == [stopped], [code, stopped])
    code = _start("launch", "local", path, "--ranks", "1").wait()
    rows = read_metrics(run)
    report.expect("it resumes and finishes", code == 0 and all_steps(run)[-1:] == [steps], [code, all_steps(run)])
    report.expect("every step is taken once", [row.step for row in rows] == list(range(1, steps + 1)))
    report.fact("last_metrics", rows[-1].metrics)


def _two_ranks(report: Report, name: str, corpus: Path, steps: int) -> None:
    path = _run_file(report, name, corpus, steps)
    code = _start("launch", "local", path, "--ranks", "2", environment=Place("cpu").environment).wait()
    report.expect(f"{name}: they finish", code == 0, code)


def _auto(report: Report, name: str, corpus: Path) -> None:
    """The largest micro-batch that fits, chosen by the run, which then trains with it."""
    path = _run_file(report, name, corpus, 4, batch={"micro_batch_size": "auto"})
    code = _start("pretrain", "train", path).wait()
    chosen = json.loads((report.folder / name / "micro_batch.json").read_text())["micro_batch_size"]
    report.expect("auto: it trains with a divisor of its rows", code == 0 and 16 % chosen == 0, [code, chosen])


def _broken(report: Report, kind: str, corpus: Path) -> None:
    """A rank that breaks inside a step: `launch local` ends soon, with an error."""
    note = report.folder / f"{kind}.time"
    path = _run_file(report, kind, corpus, 50, faults={"max_restarts": 0}, callbacks=[_fault(kind, 3, note)])
    code = _start("launch", "local", path, "--ranks", "1").wait()
    seconds = time.time() - float(note.read_text())
    report.fact(f"{kind}: seconds to the exit code", seconds)
    report.expect(f"{kind}: it ends as failed", code not in (0, STOPPED), code)
    report.expect(f"{kind}: soon", report.small or seconds < SECONDS_TO_END, seconds)


def run(report: Report) -> None:
    """T5 v1.1 base as shipped, on the text of this repository: its rank is killed half-way, `launch` starts it again
    from the latest checkpoint, and the steps that both have taken have the same losses."""
    steps, saved, killed = (12, 4, 7) if report.small else (120, 40, 70)
    corpus = make(
        report.folder / "corpus", **({} if report.small else {"inputs": 512, "documents": 1000, "pieces": 8000})
    )
    note, folder = report.folder / "killed", report.folder / "run"
    changes: Json = {
        "extends": [str(ROOT / f"configs/runs/{BASE}.yaml")],
        "model": {"vocab_size": None, "pad_vocab_to_multiple_of": 32_128},
        "data": {"workers": 2},
        "batch": {"global_batch_size": 128, "micro_batch_size": 64},
        "optimizer": {},
        "schedule": {"warmup_steps": 20},
        "compute": {"compile": report.cuda, "cuda_graphs": True},
        "checkpoint": {"every_steps": saved},
        "faults": {"max_restarts": 1},
        "evaluation": [],
        "callbacks": [_fault("kill", killed, note)],
    }
    if report.small:
        report.skip("its size", "smaller on a CPU, and nothing compiled")
        changes["model"] |= {**SMALL, "pad_vocab_to_multiple_of": 128}
        changes["batch"] = {"global_batch_size": 16, "micro_batch_size": 8}
    path = _run_file(report, "run", corpus, steps, **changes)
    began = time.time()
    process = _start("launch", "local", path, "--ranks", "1")
    _wait_for_step(folder, 1, process)
    report.fact("seconds_to_step_1", time.time() - began)
    code = process.wait()
    report.fact("seconds", time.time() - began)
    report.expect("it finishes", code == 0 and all_steps(folder)[-1:] == [steps], [code, all_steps(folder)])
    rows = [row for row, _ in rows_from(folder / FILE_NAME) if _LOSS in row.metrics]
    for row in rows:
        report.row("metrics", step=row.step, attempt=row.attempt, seconds=row.time - began, **row.metrics)
    first, second = ({row.step: row.metrics[_LOSS] for row in rows if row.attempt == one} for one in (1, 2))
    again = sorted(first.keys() & second.keys())
    ended = float(note.read_text())
    report.fact("seconds_from_kill_to_next_step", min(row.time for row in rows if row.attempt == 2) - ended)
    expected = list(range(saved + 1, killed))
    report.expect("steps after the checkpoint are taken again", again == expected, again)
    report.expect("all others once", sorted(first.keys() | second.keys()) == list(range(1, steps + 1)))
    differences = {step: abs(first[step] - second[step]) / first[step] for step in again}
    report.fact("largest_relative_difference_of_losses", max(differences.values()))
    # kernels that add in any order differ in last bits, which each further step multiplies; a CPU repeats
    judged = {again[0]: differences[again[0]]} if report.cuda else differences
    report.expect("they have the same losses", max(judged.values()) < (1e-6 if report.cuda else 1e-9), differences)
    losses = [second.get(step, first.get(step, 0.0)) for step in range(1, steps + 1)]
    report.expect("the loss falls", losses[-1] < losses[0] - 0.1, [losses[0], losses[-1]])


def _fault(kind: str, step: int, note: Path) -> Json:
    return {"name": "checks.gpu.fault:Fault", "kind": kind, "step": step, "note": str(note)}


def _run_file(report: Report, name: str, corpus: Path, steps: int, **changes: Any) -> Path:
    """A run file without MLflow; sections in `changes` add to the sections here, or replace what makes a model
    and its steps."""
    sections: dict[str, Any] = {
        "run": {"name": name, "directory": str(report.folder / name), "max_steps": steps, "cpu_threads": 1},
        "model": SMALL,
        "data": {"train": [{"corpus": str(corpus)}], "validation": [], "lanes": 8, "workers": 0},
        "batch": {"global_batch_size": 16, "micro_batch_size": 8},
        "optimizer": {"learning_rate": 3e-3, "gradient_clipping": 1.0},
        "schedule": {"name": "constant"},
        "precision": "bf16",
        "compute": {"compile": False},  # `steps` compiles; here it would take 20 s at each start
        "checkpoint": {"every_steps": 1000},
        "tracking": {"mlflow": None, "log_every_steps": 1},
    }
    for section, values in changes.items():
        whole = section in ("model", "optimizer", "schedule") or not isinstance(values, dict)
        sections[section] = values if whole else {**sections.get(section, {}), **values}
    path = report.folder / f"{name.replace(' ', '-')}.yaml"
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
