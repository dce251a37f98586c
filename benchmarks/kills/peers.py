"""The programs that are killed: what each is started with, and what its documentation resumes it with."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kills import arguments, text

FOLDER = Path(__file__).parent
OURS = "ours"


@dataclass(frozen=True)
class Peer:
    """A program. The first peer is this repository.

    Attributes:
        name: in tables.
        requirements: the file of this folder with its packages; "" for this repository.
        script: its module in this folder.
        checkpoints: a pattern for the checkpoints in a run's folder. The last number of their names is the step.
        way: which of several documented ways to resume its script takes.
    """

    name: str
    checkpoints: str
    script: str = ""
    requirements: str = ""
    way: str = ""

    def newest(self, folder: Path) -> Path | None:
        """The checkpoint that a person would take for the newest one."""
        return max(folder.glob(self.checkpoints), key=lambda path: int(re.findall(r"\d+", path.stem)[-1]), default=None)

    def command(self, python: Path, work: Path, folder: Path, seed: int, steps: int) -> list[str]:
        """The command that starts the run in `folder`, or continues the run if it has a checkpoint."""
        if self.name == OURS:
            return [str(python), "-m", "pretrain", "train", str(folder / "run.yaml")]
        given = [str(python), "-m", f"kills.{self.script}", str(work / "text.jsonl"), str(folder)]
        given += ["--seed", str(seed), "--steps", str(steps)]
        given += ["--way", self.way] if self.way else []
        return given + (["--resume"] if self.newest(folder) else [])


PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, "run/checkpoints/step-*"),
        Peer("transformers", "checkpoints/checkpoint-*", "transformers_trainer", "requirements-transformers.txt"),
        Peer("accelerate-skip", "checkpoint-pt-*", "accelerate_loop", "requirements-accelerate.txt", "skip"),
        Peer(
            "accelerate-skip-no-dropout",
            "checkpoint-pt-*",
            "accelerate_loop",
            "requirements-accelerate.txt",
            "skip-no-dropout",
        ),
        Peer("accelerate-stateful", "checkpoint-pt-*", "accelerate_loop", "requirements-accelerate.txt", "stateful"),
        Peer("lightning", "checkpoints/epoch=*.ckpt", "lightning_trainer", "requirements-lightning.txt"),
        Peer("torchtitan", "checkpoints/step-*", "torchtitan_loop", "requirements-torchtitan.txt"),
    )
}


def python_of(peer: Peer, venvs: Path) -> Path:
    """The Python of a peer, in a virtual environment below `venvs` that is made once.

    The peer's packages are installed there at the versions of its file, without what they require: PyTorch and all else
    are those of this environment, so that all peers compute with the same build of PyTorch.
    """
    if not peer.requirements:
        return Path(sys.executable)
    wanted, folder = FOLDER / peer.requirements, venvs / Path(peer.requirements).stem.removeprefix("requirements-")
    python, made = folder / "bin/python", folder / "installed.txt"
    if not made.exists() or made.read_text() != wanted.read_text():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "shared.pth").write_text(
            "".join(f"{path}\n" for path in sys.path if path.endswith("site-packages"))
        )
        options = ["--quiet", "--no-deps", "--ignore-installed", "--requirement", str(wanted)]
        subprocess.run([str(python), "-m", "pip", "install", *options], check=True)
        made.write_text(wanted.read_text())
    return python


def prepare(peer: Peer, work: Path, folder: Path, seed: int, steps: int) -> None:
    """Makes the folder of a run, and for this repository the corpus, once, and the run file."""
    folder.mkdir(parents=True)
    if peer.name != OURS:
        return
    if not (work / "corpus").exists():
        (work / "corpus.yaml").write_text(json.dumps(_corpus(work)))
        subprocess.run([sys.executable, "-m", "data_pipeline", "build", str(work / "corpus.yaml")], check=True)
    (folder / "run.yaml").write_text(json.dumps(_run(work, folder, seed, steps)))


def _corpus(work: Path) -> dict[str, object]:
    return {
        "name": "kills",
        "output": str(work / "corpus"),
        "sources": [{"format": "jsonl", "name": "c4", "language": "en", "path": str(work / "text.jsonl")}],
        "cleaning": {"profile": "none"},
        "dedup": {"urls": None, "lines": False, "spans": False, "documents": False, "minhash": False},
        "split": {"validation_fraction": 0.01},
        "tokenizer": {"kind": "bytes", "sentinels": 100},
        "rows": {
            "packing": "concatenate",
            "objective": {"name": "span_corruption", "inputs_length": 2 * text.LENGTH},
        },
        "shards": {"rows_per_block": 1024, "blocks_per_shard": 8},
    }


def _run(work: Path, folder: Path, seed: int, steps: int) -> dict[str, object]:
    sizes = {name: arguments.T5[name] for name in ("d_model", "d_kv", "d_ff", "num_heads")}
    layers = {
        "num_encoder_layers": arguments.T5["num_layers"],
        "num_decoder_layers": arguments.T5["num_decoder_layers"],
    }
    return {
        "run": {
            "name": "kills",
            "directory": str(folder / "run"),
            "seed": seed,
            "max_steps": steps,
            "cpu_threads": 1,
        },
        "model": {"family": "t5", **sizes, **layers, "dropout_rate": 0.1},
        "data": {"train": [{"corpus": str(work / "corpus")}], "workers": 0},
        "batch": {"global_batch_size": arguments.ROWS},
        "optimizer": {"name": "adamw", "learning_rate": arguments.RATE},
        "schedule": {"name": "linear", "warmup_steps": 0},
        "precision": "fp32",
        "checkpoint": {"every_steps": arguments.EVERY, "keep_last": 2},
        "tracking": {"mlflow": None, "log_every_steps": 10},
        "callbacks": [{"name": "kills.ours:Recording", "folder": str(folder)}],
    }
