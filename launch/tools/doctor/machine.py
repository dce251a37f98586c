"""Checks one machine: installed packages, GPUs, memory, the run directory, the run file with its corpora, MLflow."""

import contextlib
import fcntl
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pynvml
from packaging.requirements import Requirement

from data_pipeline.base.atomic import lock
from data_pipeline.base.errors import UserError, one_line
from data_pipeline.base.formatting import counted, human_size, masked
from data_pipeline.base.packages import PACKAGE, version_of
from data_pipeline.base.processes import available_memory, until
from launch.tools.doctor.checks import Finding, Level, Settings
from pretrain.hardware import ACCELERATOR, VISIBLE, count_gpus

_INSTALL = "install the versions of constraints.txt: pip install -c constraints.txt"
_BUSY = 2**30  # bytes
_SHARED = Path("/dev/shm")
_RANK, _WORKER = 1.0e9, 0.4e9  # bytes of a rank of a small model, and of one of its loader processes
_SHARED_BY_RANK, _SHARED_BY_WORKER = 16 * 2**20, 8 * 2**20  # NCCL's buffers; batches on their way to the rank
_BYTES = 64 * 2**20
_LEAST_ROOM, _LEAST_SPEED = 5e9, 50e6
_SECONDS_TO_LOCK = 60.0
_SECONDS_TO_SEE = 20.0  # a network file system shows a new file late
_REFUSED = "choose another run.directory, or make room there"
_LATER = (
    "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD if the server asks for a login; the run also trains "
    "without MLflow, and pretrain sync sends its metrics afterwards"
)
_NOTHING_PREVENTS = "nothing prevents a second run in this directory; make sure that only one trains there"


def versions(settings: Settings) -> list[Finding]:
    """Compares the installed packages with the versions that this project declares."""
    try:
        declared = metadata(PACKAGE).get_all("Requires-Dist") or []
    except PackageNotFoundError:
        found = f"{PACKAGE} isn't installed, so nothing says what it needs"
        return [Finding("versions", "warning", found, "", _INSTALL)]
    wrong = []
    for needed in map(Requirement, declared):
        number = version_of(needed.name)
        if needed.marker and not needed.marker.evaluate({"extra": ""}):
            continue
        if not (number and needed.specifier.contains(number, prereleases=True)):
            found = f"{needed.name} {number or 'is missing'}"
            expected = f"{needed.name} {needed.specifier}".strip()
            wrong.append(Finding("versions", "error", found, expected, _INSTALL))
    numbers = (f"{name} {version_of(name)}" for name in (PACKAGE, "torch", "deepspeed", "mlflow"))
    return wrong or [Finding("versions", "ok", ", ".join([f"python {platform.python_version()}", *numbers]))]


def gpus(settings: Settings) -> list[Finding]:
    """Whether each rank has a GPU, and the GPUs are free."""
    number, ranks = count_gpus(), settings.ranks_here
    if number == 0:
        chosen = " and ".join(f"{name}={os.environ[name]}" for name in (ACCELERATOR, VISIBLE) if name in os.environ)
        return [Finding("GPUs", "ok", f"none{f' with {chosen}' if chosen else ''}; ranks run on the CPU")]
    if ranks > number:
        return [Finding("GPUs", "error", f"{number}", f"{ranks}, one for each rank", "ask for fewer ranks")]
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(place) for place in range(pynvml.nvmlDeviceGetCount())]
    kinds = sorted({str(pynvml.nvmlDeviceGetName(handle)) for handle in handles})
    findings = [Finding("GPUs", "ok", f"{len(handles)} × {' and '.join(kinds)}")]
    used = [pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles]
    if busy := [str(place) for place, amount in enumerate(used) if amount > _BUSY]:
        found = f"GPUs {', '.join(busy)}: up to {max(used) / 1e9:,.1f} GB in use"
        remedy = "nvidia-smi shows the processes that use them; end these processes"
        findings.append(Finding("GPU memory", "warning", found, "free GPUs", remedy))
    return findings


def memory(settings: Settings) -> list[Finding]:
    """The memory for ranks and their loaders. `pretrain plan` shows the model's memory."""
    ranks, workers = settings.ranks_here, settings.workers
    free, needed = available_memory(), ranks * (_RANK + workers * _WORKER)
    found = Finding("memory", "ok", f"{free / 1e9:.1f} GB free")
    if free < needed:
        expected = f"{needed / 1e9:.1f} GB for {ranks} × (1 rank + {workers} loaders), and the model"
        level: Level = "error" if free < needed / 2 else "warning"
        found = replace(found, level=level, expected=expected, remedy="start fewer ranks or data.workers, or free some")
    free, needed = shutil.disk_usage(_SHARED).free, ranks * (_SHARED_BY_RANK + workers * _SHARED_BY_WORKER)
    shared = Finding("shared memory", "ok", f"{human_size(free)} free in {_SHARED}")
    if free < needed:
        expected = f"{human_size(needed)} or more for NCCL and loaders"
        remedy = "enlarge it: docker run --shm-size=8g or --ipc=host, mount -o remount,size=8g /dev/shm"
        shared = replace(shared, level="error", expected=expected, remedy=remedy)
    return [found, shared]


def existing(directory: Path) -> Path:
    """The directory or, if it doesn't exist, the nearest one above it."""
    return next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())


@contextlib.contextmanager
def locked_file(directory: Path) -> Iterator[Path | None]:
    """Within the block, a new locked file in `directory`; None if it can't be created or locked soon.

    A thread creates and locks the file, since on a dead file system this never returns.
    """
    with contextlib.ExitStack() as files:
        names: list[str] = []

        def create() -> None:
            with contextlib.suppress(OSError):  # the checks report what is wrong with the directory
                file = files.enter_context(tempfile.NamedTemporaryFile(dir=existing(directory), prefix=".doctor-"))
                lock(file, None)
                names.append(file.name)

        thread = threading.Thread(target=create, daemon=True)
        thread.start()
        thread.join(_SECONDS_TO_LOCK)
        yield Path(names[0]) if names else None


def run_directory(settings: Settings) -> list[Finding]:
    """Whether the run directory's file system takes files, has room and speed, and has locks."""
    if settings.directory is None:
        return []
    place = existing(Path(settings.directory))
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".doctor-") as folder:
            return [_written(place, Path(folder)), _locks(Path(folder), settings.locked)]
    except OSError as error:
        reason = error.strerror or str(error)
        return [Finding("run directory", "error", f"{place}: {reason}", "a directory that can be written", _REFUSED)]


def _written(place: Path, folder: Path) -> Finding:
    content, begun = os.urandom(_BYTES), time.monotonic()
    with (folder / "content").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    speed, room = _BYTES / (time.monotonic() - begun), shutil.disk_usage(folder).free
    found = f"{place}: {room / 1e9:,.0f} GB free; writes {speed / 1e6:,.0f} MB/s"
    if room < _LEAST_ROOM:
        return Finding("run directory", "warning", found, "room for several checkpoints", _REFUSED)
    if speed < _LEAST_SPEED:
        slow = f"{_LEAST_SPEED / 1e6:.0f} MB/s or more"
        return Finding("run directory", "warning", found, slow, "checkpoints take long here; save less often")
    return Finding("run directory", "ok", found)


def _locks(folder: Path, locked: str | None) -> Finding:
    """Whether file locks work. `locked`: a file that another process, perhaps on another node, has locked."""
    wrong = ""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            wrong = f"no file locks here ({error.strerror})"
    if locked and not wrong:
        if not until(Path(locked).exists, _SECONDS_TO_SEE):
            found = f"{locked}, which another node has just created, isn't seen here"
            remedy = "put run.directory on a file system that every node mounts"
            return Finding("file locks", "error", found, "one file system for all nodes", remedy)
        with Path(locked).open() as file, contextlib.suppress(BlockingIOError):
            lock(file, None, shared=True)
            wrong = "a lock that another process holds isn't seen here"
    if wrong:
        return Finding("file locks", "warning", wrong, "locks that hold on every node", _NOTHING_PREVENTS)
    return Finding("file locks", "ok", f"flock works{', also against other processes' if locked else ''}")


def run_file(settings: Settings) -> list[Finding]:
    """Whether the run file is valid for these ranks, and its corpora exist."""
    from data_pipeline.base import config_file  # a check imports only what it needs
    from pretrain import config as configs
    from pretrain.training import preflight

    path, *overrides = settings.run_file
    try:
        config = config_file.load(Path(path), overrides, configs.RunConfig)
        setup = preflight.preflight(config, settings.all_ranks, here=False, folder=Path(path).parent)
    except UserError as error:
        return [Finding("run file", "error", line) for line in str(error).splitlines()]
    found = f"{path} and its corpora are valid for {counted(settings.all_ranks, 'rank')}"
    return [Finding("run file", "ok", found), *(Finding("run file", "warning", line) for line in setup.warnings)]


def tracking(settings: Settings) -> list[Finding]:
    """Whether MLflow's server, if the run has one, answers. A run trains without it, so nothing here is an error."""
    uri = settings.tracking or ""
    if not uri.startswith(("http://", "https://")):
        return []
    from mlflow import exceptions  # 4 s, for a server alone

    from pretrain.training.tracking import mlflow_store  # for the same

    shown = masked(uri)
    try:
        mlflow_store.client(uri).search_experiments(max_results=1)
    except exceptions.MlflowException as error:
        expected = "a server that answers and takes the login"
        return [Finding("tracking", "warning", f"{shown}: {masked(_reason(error))}", expected, _LATER)]
    return [Finding("tracking", "ok", f"{shown} answers")]


def _reason(error: BaseException) -> str:
    """The reason of the error that began a chain, such as the network's."""
    while origin := error.__cause__ or error.__context__:
        error = origin
    return getattr(error, "strerror", None) or one_line(error)
