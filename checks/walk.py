"""What runs in one steady step of training: which functions of which files, and how often.

    python -m checks.walk configs:runs/quickstart.yaml [KEY=VALUE …] [--step 20]

Trains the run on one rank, until the step after `--step`. Between two calls of `before_step`, a profile hook counts the
functions of this project: the files, the functions, their calls. Printed: the files in the order in which the step
enters them, and what is imported by then. The run directory is a temporary one.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from data_pipeline.loading.batches import Batch
from pretrain.training.callback import Callback
from pretrain.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
PACKAGES = ("pretrain", "data_pipeline", "launch")
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Walk(Callback):
    """Writes the calls of step `step` to the file `to`: rows of file, function and calls, in the order of first calls.

    Calls in other threads, like those of the autograd engine on a GPU, aren't counted. Nor are comprehensions, which
    Python calls like functions, up to 3.11 all of them.
    """

    def __init__(self, step: int, to: str):
        self._step = step
        self._to = Path(to)
        self._calls: Counter[tuple[str, str]] = Counter()

    def before_step(self, trainer: Trainer, micro_batches: list[Batch]) -> None:
        if trainer.step == self._step:
            sys.setprofile(self._count)
        elif trainer.step == self._step + 1:
            sys.setprofile(None)
            rows = [[file, function, calls] for (file, function), calls in self._calls.items()]
            found = {"calls": rows, "loaded": sorted(sys.modules), "frozen": gc.get_freeze_count()}
            self._to.write_text(json.dumps(found))
            trainer.stop()

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name in _COMPREHENSIONS:
            return
        if code.co_filename.startswith(str(ROOT)) and not code.co_filename.startswith(str(ROOT / "checks")):
            file = Path(code.co_filename).relative_to(ROOT)
            if file.parts[0] in PACKAGES:
                self._calls[file.as_posix(), code.co_qualname] += 1


def walk(run: str, settings: list[str], step: int) -> dict[str, Any]:
    """The calls of a step of a run; the modules that are loaded by then, and how many objects Python never searches."""
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "walk.json"
        callback = f"{{name: 'checks.walk:Walk', step: {step}, to: '{to}'}}"
        command = [sys.executable, "-m", "pretrain", "train", run, f"callbacks=[{callback}]"]
        command += [f"run.directory={folder}/run", "tracking.mlflow=null", *settings]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not to.exists():
            sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}")
        found: dict[str, Any] = json.loads(to.read_text())
        return found


def files(found: dict[str, Any]) -> list[str]:
    """The files of a walk, in the order in which the step enters them."""
    return list(dict.fromkeys(file for file, _, _ in found["calls"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--step", type=int, default=20)
    given = parser.parse_args()
    found = walk(given.run, given.settings, given.step)
    for file in files(found):
        functions = [(function, calls) for one, function, calls in found["calls"] if one == file]
        print(f"{file}: {', '.join(f'{function} {calls}' for function, calls in functions)}")
    calls = sum(calls for _, _, calls in found["calls"])
    counts = f"{len(files(found))} files, {len(found['calls'])} functions, {calls:,} calls"
    print(f"{counts}; {sum(name.split('.')[0] in PACKAGES for name in found['loaded'])} modules loaded")


if __name__ == "__main__":
    main()
