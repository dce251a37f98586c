"""Does each package in examples work away from the checkout?

    python -m checks.packages

Installs each package with the project's wheel into a folder of its own. What they depend on is the environment's. A run
of three steps trains in an empty folder, with a run file that names the package (`pii`: with a corpus file). Printed
for each package: what names it, the exit code, the seconds, and warnings. Without MOSES' wheels the hook `moses` warns.
Exit code 1: a package failed. Takes three minutes of two cores.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("data_pipeline", "pretrain", "launch", "configs", "examples", "pyproject.toml", "README.md", "LICENSE")
RUN = """
run: {name: run, directory: run, max_steps: 3, cpu_threads: 1}
model: {family: t5, d_model: 32, d_kv: 8, d_ff: 64, num_heads: 4, num_encoder_layers: 1, num_decoder_layers: 1}
data: {train: [{corpus: corpora/quickstart}], validation: [{corpus: corpora/quickstart}], workers: 0}
batch: {global_batch_size: 8}
optimizer: {learning_rate: 1.0e-3}
tracking: {mlflow: null}
"""
NAMED = {  # by package: the lines of a run file that name it, of a corpus file for `pii`
    "alerts": "callbacks: [{name: 'alerts:Alerts', command: 'true'}]",
    "diagnostics": "evaluation: [{hook: attention}, {hook: positions}, {hook: embedding}, {hook: norms}]",
    "distillation": "wrapper: {name: distillation, teacher: teacher}",
    "double_decoder": "model: {family: double_decoder, d_model: 32, d_ff: 64, num_heads: 4, num_encoder_layers: 1, "
    "num_decoder_layers: 1}\ndata: {objective: {name: causal_lm, length: 43}}",
    "fault_hunting": "callbacks: [{name: 'fault_hunting:Replay'}, {name: 'fault_hunting:Stragglers'}]",
    "lion": "optimizer: {name: lion, learning_rate: 1.0e-4}",
    "molecules": "evaluation: [{hook: moses, samples: 2, max_new_tokens: 4}]",
    "pii": "cleaning: {rules: [{step: pii}]}",
}
HERE = "import importlib.util as i, sys; assert all(i.find_spec(name).origin.startswith('{}') for name in sys.argv[1:])"


def works(package: str, installed: Path, folder: Path) -> bool:
    """Trains in `folder`, where Python imports what is `installed`, and prints what happened."""
    of_corpus, of_run = (NAMED[package], "") if package == "pii" else ("", NAMED[package])
    (folder / "corpus.yaml").write_text(f"extends: configs:corpora/quickstart.yaml\n{of_corpus}")
    (folder / "base.yaml").write_text(RUN)
    (folder / "run.yaml").write_text(f"extends: base.yaml\n{of_run}")
    commands = [["-c", HERE.format(installed), "data_pipeline", "pretrain", package]]
    commands += [["-m", "data_pipeline", "build", "corpus.yaml"], ["-m", "pretrain", "train", "run.yaml"]]
    if package == "distillation":
        commands.insert(-1, [*commands[-1], "wrapper=null", "run.directory=teacher"])
    environment = {**os.environ, "PYTHONPATH": str(installed), "DS_ACCELERATOR": "cpu"}
    began = time.monotonic()
    for command in commands:
        python = [sys.executable, "-P", *command]
        done = subprocess.run(python, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            break
    lines = [line for line in (done.stdout + done.stderr).splitlines() if done.returncode or "warning:" in line]
    result = f"exit code {done.returncode}, {time.monotonic() - began:.0f} s"
    print(f"{package}: {NAMED[package]}: {result}", *lines, sep="\n  ", flush=True)
    return done.returncode == 0


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run(command, check=True)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder, failed = Path(name), 0
        sources = folder / "sources"  # setuptools builds beside them
        sources.mkdir()
        subprocess.run(["cp", "-R", *SOURCES, sources], cwd=ROOT, check=True)
        pip("wheel", "--wheel-dir", folder, sources)
        for package in sorted(file.parent.name for file in sources.glob("examples/*/pyproject.toml")):
            installed, empty = folder / package / "installed", folder / package / "run"
            empty.mkdir(parents=True)
            pip("install", "--target", installed, *folder.glob("*.whl"), sources / "examples" / package)
            failed += not works(package, installed, empty)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
