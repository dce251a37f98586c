"""Does an MLflow server that dies, or never answers, slow the steps of a run?

    python benchmarks/outage.py [--steps 300] [--corpus DIR]

Trains the quickstart's model twice at the same time, on one thread each: without MLflow, and beside a server. So both
see the same load of the machine. The server dies after a quarter of the steps and comes back after half of them; or it
accepts connections and never answers. A pair without any server shows how far two equal runs differ. Prints the median
times of a step over all steps but the first ten, and what MLflow has in the end.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from learning import command

from pretrain.run.hardware import free_port
from pretrain.run.metrics_file import read_metrics

ROOT = Path(__file__).parent.parent
WARM_UP = 10
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def start(run: Path, uri: str | None, corpus: Path, steps: int) -> "subprocess.Popen[bytes]":
    run.mkdir(parents=True)
    config = {
        "extends": [str(ROOT / "configs/runs/quickstart.yaml")],
        "run": {"directory": str(run / "run"), "max_steps": steps},
        "data": {"train": [{"corpus": str(corpus)}], "validation": [{"corpus": str(corpus)}]},
        "checkpoint": {"every_steps": steps},
        "evaluation": [{"hook": "validation_loss", "every_steps": steps}],
        "tracking": {"mlflow": {"uri": uri, "experiment": "outage"} if uri else None, "log_every_steps": 1},
    }
    (run / "run.yaml").write_text(json.dumps(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (run / "log").open("w") as log:
        arguments = [sys.executable, "-m", "pretrain", "train", str(run / "run.yaml")]
        return subprocess.Popen(arguments, stdout=log, stderr=log, env=environment)


def steps_of(run: Path) -> list[float]:
    """The seconds of each step so far."""
    rows = read_metrics(run / "run")
    return [1 / row.metrics["train/steps_per_second"] for row in rows if "train/steps_per_second" in row.metrics]


def pair(folder: Path, uri: str | None, corpus: Path, steps: int, at: Callable[[float], None]) -> tuple[float, float]:
    """The median step without MLflow and with `uri`; calls `at` with the share of the steps that is done."""
    runs = [start(folder / name, one, corpus, steps) for name, one in (("without", None), ("with", uri))]
    while any(run.poll() is None for run in runs):
        at(len(steps_of(folder / "with")) / steps)
        time.sleep(0.5)
    if any(run.returncode for run in runs):
        raise SystemExit((folder / "with/log").read_text())
    without, beside = (statistics.median(steps_of(folder / name)[WARM_UP:]) for name in ("without", "with"))
    return without, beside


@contextlib.contextmanager
def dying_server(folder: Path) -> Iterator[tuple[str, Callable[[float], None]]]:
    """A real MLflow server that is killed after a quarter of the steps and started again after half of them."""
    port = free_port()
    address = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "files")]

    def serve() -> "subprocess.Popen[bytes]":
        with (folder / "server.log").open("w") as log:
            arguments = [sys.executable, "-m", "mlflow", "server", *address, *store]
            environment = {**os.environ, **QUIET}
            return subprocess.Popen(arguments, stdout=log, stderr=log, env=environment, start_new_session=True)

    def kill() -> None:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()

    server, phase = serve(), 0
    uri = f"http://127.0.0.1:{port}"
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=5):
            break
        time.sleep(0.5)

    def at(done: float) -> None:
        nonlocal server, phase
        if phase == 0 and done > 1 / 4:
            kill()
            phase = 1
        elif phase == 1 and done > 1 / 2:
            server, phase = serve(), 2

    try:
        yield uri, at
    finally:
        kill()


def in_mlflow(folder: Path) -> list[int]:
    """The steps whose loss MLflow has."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    run_id = json.loads((folder / "with/run/mlflow.json").read_text())["run_id"]
    return [point.step for point in client.get_metric_history(run_id, "train/loss")]


def show(name: str, times: tuple[float, float], rest: str = "") -> None:
    without, beside = times
    print(f"{name:<28} {1e3 * without:9.2f} {1e3 * beside:9.2f} {beside / without - 1:+9.2%}  {rest}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--corpus", type=Path, help="a finished corpus; default: the quickstart's is built")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root, corpus, steps = Path(name), arguments.corpus, arguments.steps
        if corpus is None:
            corpus = root / "corpus"
            command("data-pipeline", "build", ROOT / "configs/corpora/quickstart.yaml", f"output={corpus}")
        folders = {kind: root / kind for kind in ("none", "dies", "silent")}
        for folder in folders.values():
            folder.mkdir()
        load = os.getloadavg()[0]
        print(f"{'the server':<28} {'ms':>9} {'ms beside':>9} {'more':>9}  medians of {steps} steps, load {load:.0f}")
        show("none: two equal runs", pair(folders["none"], None, corpus, steps, lambda done: None))
        with dying_server(folders["dies"]) as (uri, at):
            times = pair(folders["dies"], uri, corpus, steps, at)
        logged = in_mlflow(folders["dies"])
        whole = "each step once" if logged == list(range(1, steps + 1)) else f"{len(logged)} points of {steps} steps"
        show("dies and comes back", times, f"in MLflow: {whole}")
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
            show("accepts and never answers", pair(folders["silent"], uri, corpus, steps, lambda done: None))


if __name__ == "__main__":
    main()
