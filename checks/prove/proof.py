"""What the claims share: commands as users give them, the corpora and the runs that several claims look at."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import yaml

STEPS, RANKS = 16, 2
ROWS, MICRO = 16, 4  # of a step; of a micro-batch
RATE, DECAY, CLIP = 2e-3, 0.1, 0.5
EPS = 1e-5  # with 1e-8, AdamW makes whole steps of gradients that are nothing but rounding
SEED_OF_RUNS = 5
_SECONDS = 3600.0  # for one command: more than any takes on a slow machine, so that one that hangs ends
MODEL = {
    "family": "t5",
    "d_model": 48,
    "d_kv": 12,
    "d_ff": 96,
    "num_heads": 4,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
}


class Wrong(Exception):
    """A claim doesn't hold. The text says what was found, and `look` where to begin to look."""

    def __init__(self, found: str, look: str = ""):
        super().__init__(found)
        self.look = look


class Proof:
    """The corpora and runs of a proof, in `folder`.

    Each is made when the first claim asks for it. `at`: the step after which runs are killed or stopped. `text`: a file
    of text in place of the one that ships; "" for that one.
    """

    def __init__(self, folder: Path, seed: int, at: int, text: str = ""):
        self.folder, self.seed, self.at, self.text = folder, seed, at, text
        self.random = random.Random(seed)
        self._environment = {**os.environ, "DS_ACCELERATOR": "cpu"}

    # commands

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Starts `data-pipeline`, `pretrain` or `launch`, given as the name of its package, in a session of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *command: str, code: int = 0) -> str:
        """The output of a command that must end with `code`. Raises Wrong if it doesn't."""
        process = self.start(*command)
        try:
            output, _ = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise Wrong(f"{' '.join(command[:2])} took more than {_SECONDS:.0f} s", " ".join(command)) from None
        if process.returncode != code:
            last = output.strip().splitlines()[-1:] or ["no output"]
            raise Wrong(f"exit code {process.returncode} in place of {code}: {last[0]}", " ".join(command))
        return output

    def file(self, name: str, content: Any) -> str:
        """Writes a config file and returns its name."""
        (self.folder / name).write_text(yaml.safe_dump(content, sort_keys=False))
        return name

    # corpora

    def corpus_file(self, name: str, **changes: Any) -> str:
        """A corpus file with this proof's text and the quickstart's settings, and two steps of deduplication."""
        source = {"format": "jsonl", "name": "text", "language": "en", "path": "${samples:}/king-james.jsonl.bz2"}
        if self.text:
            source |= {"path": str(Path(self.text).resolve()), "format": _format_of(self.text)}
        settings = {
            "name": "proof",
            "output": name,
            "seed": self.seed,
            "sources": [source],
            "cleaning": {"profile": "none"},
            "dedup": {"urls": None, "lines": True, "spans": False, "documents": True, "minhash": None},
            "split": {"validation_fraction": 0.02},
            "tokenizer": {"vocab_size": 2000, "byte_fallback": False, "sentinels": 100},
            "rows": {"objective": {"name": "span_corruption", "inputs_length": 42, "mean_span_length": 2.0}},
            "shards": {"rows_per_block": 1024, "blocks_per_shard": 8},
        }
        return self.file(f"{name}.yaml", settings | changes)

    @cached_property
    def corpus(self) -> Path:
        """The text as spans, built by one worker."""
        self.run("data_pipeline", "build", self.corpus_file("corpus"), "ray.num_cpus=1")
        return self.folder / "corpus"

    @cached_property
    def uneven(self) -> Path:
        """The same text with an objective whose rows have different numbers of targets, and the same tokenizer."""
        tokenizer = {"path": str(self.corpus / "tokenizer"), "sentinels": 100}
        rows = {"objective": {"name": "iid_denoising", "inputs_length": 42}}
        self.run("data_pipeline", "build", self.corpus_file("uneven", tokenizer=tokenizer, rows=rows))
        return self.folder / "uneven"

    # runs

    def run_file(self, name: str, **changes: Any) -> str:
        """A small T5 on the uneven corpus, from the first weights. `changes`: whole sections."""
        checkpoint = {"every_steps": 4, "init_from": str(self.first_weights)}
        return self._run_file(name, {"checkpoint": checkpoint, **changes})

    @cached_property
    def first_weights(self) -> Path:
        """A checkpoint with the weights from which all runs begin: random ones, after one step."""
        run = {"name": "first", "directory": "first", "seed": self.seed, "max_steps": 1, "cpu_threads": 1}
        self.run("pretrain", "train", self._run_file("first", {"run": run}))
        return self.folder / "first"

    def _run_file(self, name: str, changes: dict[str, Any]) -> str:
        settings = {
            "run": {"name": name, "directory": name, "seed": SEED_OF_RUNS, "max_steps": STEPS, "cpu_threads": 1},
            "model": {**MODEL, "dropout_rate": 0.0},
            "data": {"train": [{"corpus": str(self.uneven)}], "workers": 0},
            "batch": {"global_batch_size": ROWS, "micro_batch_size": MICRO},
            "optimizer": {
                "name": "adamw",
                "learning_rate": RATE,
                "eps": EPS,
                "weight_decay": DECAY,
                "gradient_clipping": CLIP,
            },
            "schedule": {"name": "constant"},
            "precision": "fp32",
            "deepspeed": {"zero_optimization": {"stage": 1}},
            "faults": {"spikes": None},
            "tracking": {"mlflow": None, "log_every_steps": 1},
        }
        return self.file(f"{name}.yaml", settings | changes)

    @cached_property
    def plain(self) -> Path:
        """The run that others are compared with: two ranks at stage 1, never interrupted."""
        self.run("launch", "local", self.run_file("plain"), "--ranks", str(RANKS))
        return self.folder / "plain"

    def exported(self, run: Path) -> Path:
        """A run's export for transformers."""
        export = run.with_name(f"{run.name}-export")
        if not export.exists():
            self.run("pretrain", "export", str(run), str(export))
        return export

    def kill_after_step(self, process: subprocess.Popen[str], run: Path, step: int) -> None:
        """Sends SIGKILL to all processes of a run once it has logged `step`."""
        self.wait_for(process, lambda: len(losses(run)) >= step, f"{run.name}: step {step}")
        kill_family(process)

    def kill_in_stage(self, process: subprocess.Popen[str], corpus: Path, stage: int) -> None:
        """Sends SIGKILL to all processes of a build once so many of its stages have begun."""
        self.wait_for(process, lambda: len([*(corpus / ".stages").glob("*/")]) >= stage, f"stage {stage}")
        kill_family(process)

    def wait_for(self, process: subprocess.Popen[str], happened: Any, what: str) -> None:
        """Waits until `happened()`. Raises Wrong if the process ends before."""
        until = time.monotonic() + _SECONDS
        while not happened():
            if process.poll() is not None or time.monotonic() > until:
                kill_family(process)
                output = process.communicate()[0].strip().splitlines()[-1:]
                raise Wrong(f"ended before {what}: {' '.join(output)}", what)
            time.sleep(0.005)


def kill_family(process: subprocess.Popen[Any]) -> None:
    """Sends SIGKILL to a process and all its descendants, and waits for the process."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return
    for one in family:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def losses(run: Path) -> dict[int, float]:
    """The logged loss of each step. Of a step that was taken again after a kill, the last one."""
    path, found = run / "metrics.jsonl", dict[int, float]()
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:  # a line that is being written
            continue
        if "train/loss" in row["metrics"]:
            found[row["step"]] = float(row["metrics"]["train/loss"])
    return found


def checksums(corpus: Path) -> dict[str, str]:
    """The sha256 of every file of a corpus but the report, which has times."""
    return {
        str(path.relative_to(corpus)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(corpus.rglob("*"))
        if path.is_file() and ".stages" not in path.parts and not path.name.startswith("report.")
    }


def _format_of(text: str) -> str:
    return "jsonl" if ".json" in Path(text).name else "text"
