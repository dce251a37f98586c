"""Builds on a Ray cluster of two nodes, and the protection of a corpus against two builds at once."""

import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from data_pipeline.base import local_store, progress
from data_pipeline.base.command import print_error
from data_pipeline.base.errors import FailedError
from data_pipeline.base.local_store import LocalStore
from data_pipeline.base.processes import until
from data_pipeline.config import RayConfig
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.verify import verify
from data_pipeline.engine import checking, dispatch, nodes, workers
from data_pipeline.engine.context import Attempt, Context, Needs
from data_pipeline.engine.dispatch import rooms_of_nodes
from data_pipeline.engine.work_units import Result, Stage, Unit, run
from tests.conftest import TOP, write_c4, write_corpus_file
from tests.conftest import run as run_command
from tests.support.builds import at_work, checksums, family, flip, with_fault
from tests.support.in_process import done_here, refused_here
from tests.support.ports import free_port
from tests.support.tables import each

# If the home directory has a token of Ray, nodes would ask for it and the driver wouldn't send it.
# Ray asks a node for life every 3 s, and counts it as dead when it hasn't answered five times.
OF_RAY = {"RAY_AUTH_MODE": "disabled", "RAY_health_check_period_ms": "1000"}


@contextlib.contextmanager
def processes() -> Iterator[list[subprocess.Popen]]:
    """A list of processes, which are killed at the end of the test with all their descendants."""
    started: list[subprocess.Popen] = []
    try:
        yield started
    finally:
        for process in reversed(started):
            kill_tree(process)


def kill_tree(process: subprocess.Popen) -> None:
    tree = family(process.pid) if process.poll() is None else []
    for one in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    psutil.wait_procs(tree)


@dataclass
class Node:
    """A node to be: what its processes have in their environment, and which directory they see as empty."""

    variables: dict[str, str]
    hidden: Path | None = None


# Workers take ports of the kernel's choice, instead of those that tests take.
OF_A_NODE = [
    *("--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats", "--block"),
    *("--min-worker-port=0", "--max-worker-port=0"),
]


def start_node(started: list[subprocess.Popen], command: list[str], variables: dict[str, str], log: Path) -> None:
    """Adds to `started` a node of Ray, once it is up. All of them have the same log."""
    with log.open("ab") as file:
        started.append(subprocess.Popen(command, stdout=file, stderr=file, env={**variables, **OF_RAY}))
    while log.read_bytes().count(b"Ray runtime started") < len(started):
        assert started[-1].poll() is None, log.read_text()
        time.sleep(0.2)


@contextlib.contextmanager
def cluster(folder: Path, *nodes: Node, path: Path | None = TOP) -> Iterator[tuple[str, list[subprocess.Popen]]]:
    """(address, nodes) of a cluster of a head and `nodes`, with one CPU each: 127.0.0.1, 127.0.0.2, … `path`: where the
    head finds code, besides what is installed."""
    port = free_port()
    program, log = [str(Path(sys.executable).with_name("ray")), "start", *OF_A_NODE], folder / "ray.log"
    # Sockets are below Ray's directory, and their paths may have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-") as own, processes() as started:
        head = [*program, "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={own}"]
        start_node(started, head, {**os.environ, "PYTHONPATH": str(path or "")}, log)
        for number, node in enumerate(nodes, 2):
            command = [*program, f"--address=127.0.0.1:{port}", f"--node-ip-address=127.0.0.{number}"]
            command.append("--include-log-monitor=false")  # one for each machine, says Ray: the head's
            if node.hidden is not None:
                command = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', node.hidden, *command]
            start_node(started, command, {**os.environ, "PYTHONPATH": str(TOP), **node.variables}, log)
        yield f"127.0.0.1:{port}", started[1:]


def build(config: Path, errors: Path, *overrides: str) -> subprocess.Popen:
    """A build that writes its warnings and errors to a file."""
    program = [sys.executable, "-m", "data_pipeline", "build", str(config), *overrides]
    with errors.open("w") as file:
        return subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=file, env={**os.environ, **OF_RAY})


def keep_busy(all_but: list[str], log: Path, words: str) -> list[ray.ObjectRef]:
    """Takes the CPUs of all nodes but those with these addresses, until `words` are in a log. Units that are submitted
    meanwhile go to the nodes that are left. Returns when the CPUs are taken."""

    def hold(taken: Path) -> None:
        taken.touch()
        while words not in log.read_text():
            time.sleep(0.05)

    held = {node: log.with_name(f"held-{node}") for node, (name, _) in rooms_of_nodes().items() if name not in all_but}
    tasks = []
    for node, taken in held.items():
        taken.unlink(missing_ok=True)
        only_there = NodeAffinitySchedulingStrategy(node, soft=False)
        tasks.append(ray.remote(num_cpus=1)(hold).options(scheduling_strategy=only_there).remote(taken))
    while not all(taken.exists() for taken in held.values()):
        time.sleep(0.05)
    return tasks


def can_unshare() -> bool:
    unshared = ["unshare", "-m", "true"]
    return shutil.which("unshare") is not None and subprocess.run(unshared, capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_node_that_dies_costs_nothing_and_one_that_sees_another_output_is_left_out(tmp_path):
    """The third node of the cluster sees an empty directory in place of the output, and the fourth in that of the
    inputs; the second is killed at work."""
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    for part in range(6):
        write_c4(inputs / f"c4-{part}.json.gz", records=100, skip=100 * part)
    config = write_corpus_file(inputs / "corpus.yaml", cleaning={})  # C4's rules: a second of work for each file
    local, shared = tmp_path / "local", tmp_path / "shared"
    shared.mkdir()
    held = tmp_path / "held"  # the second node creates it in its first unit, and stays at work
    nodes = [Node(with_fault("a lost node", "documents", "before the work", held))]
    if can_unshare():  # a mount namespace of its own takes root
        nodes += [Node({}, hidden=shared), Node({}, hidden=inputs)]
    log = tmp_path / "build.log"
    log.touch()
    with cluster(tmp_path, *nodes) as (address, (node, *_)), processes() as started:
        if can_unshare():  # the third node gets units, however long its worker takes to start
            started.append(program(f"keep_others_busy({address!r}, Path({str(log)!r}))", tmp_path))
            assert started[0].stdout.readline() == "busy\n"
        started.append(driver := build(config, log, f"output={shared}", f"ray.address={address}"))
        while not held.exists():
            assert driver.poll() is None
            time.sleep(0.05)
        at_node = at_work(family(node.pid), shared)
        assert at_node
        kill_tree(node)
        assert not any(worker.is_running() for worker in at_node)
        assert driver.poll() is None
        driver.wait()
        errors = log.read_text()
        assert driver.returncode == 0, errors
        shards = sorted(shared.glob("shards/*/*.tar"))
        for damaged in (shards[0], shared / "documents/part-00001.parquet"):
            flip(damaged)
        checked = in_another_process(f"check_all(Path({str(shared)!r}), {address!r})", tmp_path)
        for damaged in (shards[0], shared / "documents/part-00001.parquet"):
            flip(damaged)
    assert checked.returncode == 0, checked.stderr
    names = [str(path.relative_to(shared)) for path in (shared / "documents/part-00001.parquet", shards[0])]
    wrong = "sha256 differs from the manifest's"
    assert checked.stdout.splitlines()[-4:-2] == [
        f"{shared}/{names[0]}: {wrong}",
        f"{shared}/{names[1]}: {wrong}; outside its blocks",  # the last byte of a tar is padding
    ]
    assert checked.stdout.splitlines()[-2:] == names
    left_out = [line.split(": ")[1:3] for line in checked.stderr.splitlines() if "is left out" in line]
    assert left_out == [[what, "node 127.0.0.3 is left out"] for what in ("verify", "checking")][: 2 * can_unshare()]
    assert "unreadable" not in errors
    told = [line for line in errors.splitlines() if line.startswith("warning: documents: node 127.0.0.3")]
    place = f"{shared}/.stages/workers: No such file or directory on host {socket.gethostname()}"
    assert told == [f"warning: documents: node 127.0.0.3 is left out: {place}"][: can_unshare()]
    done_here("data-pipeline", "build", config, f"output={local}")
    assert checksums(shared) == checksums(local)
    assert not list(shared.rglob("*.tmp"))


@pytest.mark.slow
def test_nodes_on_which_units_fail_are_named_and_left_out_and_all_units_are_done(tmp_path):
    """Of four nodes, the head lacks a module, one has another code, and one can't read its disk."""
    other = tmp_path / "other"
    for package in ("data_pipeline", "tests"):
        shutil.copytree(TOP / package, other / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "data_pipeline/__init__.py").open("a") as file:
        file.write(f"from pathlib import Path\nPath({str(tmp_path / 'other-code')!r}).touch()\n")
    nodes = [Node({"PYTHONPATH": str(other)}), Node({"FAULT": "disk"}), Node({})]
    with cluster(tmp_path, *nodes, path=None) as (address, _):
        done = in_another_process(f"do_where_possible(Path({str(tmp_path)!r}), {address!r})", tmp_path)
    assert done.returncode == 1, done.stderr
    told = (tmp_path / "told").read_text().splitlines() + done.stderr.splitlines()
    cause = "it can't run this code: ModuleNotFoundError: No module named 'tests'"
    (line,) = [line for line in told if line.endswith(cause)]
    assert line.startswith("warning: division: node "), told
    cause = "its code of data_pipeline isn't that of the command; install the same version there"
    assert f"warning: division: node 127.0.0.2 is left out: {cause}" in told
    cause = "/data: Input/output error; what is finished is kept"
    (first, last) = [line for line in told if line.startswith("warning: division: node 127.0.0.3")]
    assert re.fullmatch(
        rf"warning: division: node 127.0.0.3: unit by-\d+ failed: {cause}; another node tries it", first
    )
    assert last == f"warning: division: node 127.0.0.3 is left out: 3 units failed there, the last one: {cause}"
    # what fails on every node is the unit's own failure, and is told once
    assert told.count("error: /bad: Input/output error; what is finished is kept") == 1, told
    own = [line for line in told if line.startswith("division: ")]  # Ray may add lines of its workers at the end
    assert own[-1] == "division: 40 of 41 units done; the same command continues"
    assert [(tmp_path / str(by)).read_text() for by in range(1, 41)] == [str(1 / by) for by in range(1, 41)]


@pytest.mark.soak
def test_no_unit_fails_on_a_node_whose_workers_die_as_they_import(tmp_path):
    """As with a package whose instructions the node's CPU lacks. The other nodes wait until six workers have died."""
    (tmp_path / "other/data_pipeline").mkdir(parents=True)
    (tmp_path / "other/data_pipeline/__init__.py").write_text(
        "import os, signal\n"
        f"with open({str(tmp_path / 'deaths')!r}, 'a') as file:\n    file.write('x')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    nodes = [Node({"PYTHONPATH": str(tmp_path / "other")}), Node({})]
    with cluster(tmp_path, *nodes) as (address, _):
        done = in_another_process(f"do_beside_deaths(Path({str(tmp_path)!r}), {address!r})", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(by)).read_text() for by in range(1, 31)] == [str(1 / by) for by in range(1, 31)]


@pytest.mark.slow
@each("found", [False, True])
def test_a_program_keeps_its_own_cluster_and_gets_no_other(found, tmp_path):
    done = in_another_process(f"use_workers({found})", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [f"after a failure: {found}", f"at the end: {found}"], done.stdout


def test_a_cluster_that_is_not_there_is_one_line(tmp_path):
    write_c4(tmp_path / "a.json.gz", records=5)
    config = write_corpus_file(tmp_path / "corpus.yaml")
    address = f"127.0.0.1:{free_port()}"
    done = run_command("data-pipeline", "build", config, f"ray.address={address}")
    assert done.returncode == 1
    (told,) = done.stderr.strip().splitlines()
    assert told.startswith(f"error: ray.address: can't join the cluster at {address}: ")


def test_a_second_build_of_the_same_corpus_is_refused_until_the_first_ends(tmp_path):
    """The first is this process as others see it: what holds its claim is an open file, which ends with a process."""
    write_c4(tmp_path / "a.json.gz", records=5)
    config = write_corpus_file(tmp_path / "corpus.yaml")
    (tmp_path / "corpus/.stages").mkdir(parents=True)
    (tmp_path / "corpus/.stages/driver").write_text("host old, process 1, of a build that has ended")
    first = LocalStore(tmp_path / "corpus")
    first.claim()
    told = refused_here(1, "data-pipeline", "build", config)
    assert f"another build is at work on it (host {socket.gethostname()}, process {os.getpid()})" in told
    first.release()
    second = LocalStore(tmp_path / "corpus")
    second.claim()
    second.release()


def test_a_build_that_waited_in_vain_for_former_workers_leaves_no_claim(tmp_path, monkeypatch):
    monkeypatch.setattr(local_store, "_SECONDS_FOR_FORMER_WORKERS", 0.0)
    (tmp_path / ".stages").mkdir()
    (tmp_path / ".stages/workers").write_text("former")
    corpus = LocalStore(tmp_path)
    with LocalStore(tmp_path).at_work("former"), pytest.raises(FailedError, match="workers of an earlier build"):
        corpus.claim()
    corpus.claim()
    corpus.release()


def test_a_new_build_waits_for_a_worker_at_work_and_shuts_out_those_to_come(tmp_path):
    (tmp_path / ".stages").mkdir()
    (tmp_path / ".stages/workers").write_text("former")

    def work() -> None:
        with LocalStore(tmp_path).at_work("former"):
            working.set()
            time.sleep(2)
            (tmp_path / "output").write_text("old")

    working = threading.Event()
    threading.Thread(target=work).start()
    working.wait()
    corpus = LocalStore(tmp_path)
    token = corpus.begin()
    assert (tmp_path / "output").read_text() == "old"  # it ended before the new build read anything
    with pytest.raises(FailedError, match="another build has taken over"), LocalStore(tmp_path).at_work("former"):
        raise AssertionError
    with LocalStore(tmp_path).at_work(token):
        pass


@dataclass(frozen=True)
class Work:
    work: str
    by: int = 1
    output: str = ""
    times: int = 0
    without: str = ""


def divide(corpus: LocalStore, spec: Work) -> None:
    (corpus.root / spec.output).write_text(str(1 / spec.by))


def be_killed(corpus: LocalStore, spec: Work) -> None:
    """Kills the worker as the system does when memory runs out, the first `times` times."""
    tries = corpus.root / f"tries-{spec.times}"
    with tries.open("a") as file:
        file.write("x")
    if tries.stat().st_size <= spec.times:
        os.kill(os.getpid(), signal.SIGKILL)


def read_two_files(context: Context, corpus: LocalStore, spec: Work) -> None:
    """Is killed by one of its files, unless the spec says why it can't be read. The text that is shown is another."""
    context.file("bad.arrow")
    context.progress.doing = "reading"
    if not spec.without:
        os.kill(os.getpid(), signal.SIGSEGV)
    context.file("good.arrow")
    (corpus.root / spec.output).write_text(spec.without)


def divide_where_possible(corpus: LocalStore, spec: Work) -> None:
    """Fails on nodes with a FAULT, and everywhere without an output. Elsewhere it waits for what happens on others."""
    failures, told = corpus.root / "failures", corpus.root / "told"
    if "FAULT" in os.environ or not spec.output:
        with failures.open("a") as file:
            file.write("x" if spec.output else "")
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/data" if spec.output else "/bad")
    while (
        not (corpus.root / "other-code").exists()
        or not failures.exists()
        or failures.stat().st_size < 3
        or "No module named 'tests'" not in told.read_text()
    ):
        time.sleep(0.05)
    divide(corpus, spec)


def divide_beside_deaths(corpus: LocalStore, spec: Work) -> None:
    deaths = corpus.root / "deaths"
    while not deaths.exists() or deaths.stat().st_size < 6:
        time.sleep(0.05)
    divide(corpus, spec)


WORK = {"where_possible": divide_where_possible, "divide": divide, "be_killed": be_killed}
WORK["beside_deaths"] = divide_beside_deaths
WORK["allocate"] = lambda corpus, spec: np.zeros(2**50, np.uint8)  # more than a process can address


def fail_or_not(context: Context, spec: Work) -> Result:
    corpus = context.store
    assert isinstance(corpus, LocalStore)
    if spec.work == "read":
        read_two_files(context, corpus, spec)
    else:
        WORK[spec.work](corpus, spec)
    return Result()


def program(call: str, folder: Path) -> subprocess.Popen:
    """A process that calls a function of this module."""
    program = f"""
from pathlib import Path
from data_pipeline.base.command import run_command
from tests.data_pipeline.engine import test_cluster
run_command(lambda: test_cluster.{call})
"""
    # not in the working directory, which workers would search for code first
    variables = {**os.environ, "PYTHONPATH": f"{TOP}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **OF_RAY}
    command = [sys.executable, "-P", "-c", program]
    return subprocess.Popen(command, cwd=folder, stdout=-1, stderr=-1, text=True, env=variables)


def in_another_process(call: str, folder: Path) -> subprocess.CompletedProcess:
    process = program(call, folder)
    output, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@pytest.mark.slow
def test_dispatch_reports_a_killed_worker_in_one_line_and_continues_with_the_others(tmp_path):
    done = in_another_process(f"do_all(Path({str(tmp_path)!r}))", tmp_path)
    assert done.returncode == 1, done.stderr
    (kept,) = (tmp_path / ".stages/failures").iterdir()
    way_out = "lower key.of_it, or use a machine with more memory; what is finished is kept"
    expected = [
        f"division: unit by-0 failed: ZeroDivisionError: division by zero (traceback: {kept})",
        f"division: unit allocate: out of memory on {socket.gethostname()}: Unable to allocate 1.00 PiB "
        f"for an array with shape (1125899906842624,) and data type uint8; {way_out}",
        "division: unit be_killed: the worker died on every try, the last one with a node to itself: "
        f"it crashed, or the system ended it because memory ran out; {way_out}",
    ]
    told = [line.removeprefix("error: ") for line in done.stderr.splitlines()]
    assert sorted(line for line in told if line.startswith("division: unit")) == sorted(expected)
    assert "in divide\n" in kept.read_text()
    assert "Traceback" not in done.stderr
    assert "retries remaining" not in done.stdout
    (held,) = [line for line in told if line.startswith("held: unit")]
    why = r"no unit has begun for 0 minutes; Ray finds no node with [\d.]+ [GT]B free"
    assert re.fullmatch(rf"held: unit be_killed: the worker died on every try, and {why}; {re.escape(way_out)}", held)
    assert (tmp_path / "tries-8").read_text() == "xxx"
    assert (tmp_path / "tries-9").read_text() == "xxxx"  # one, two retries, one alone
    assert (tmp_path / "tries-1").read_text() == "xx"  # a unit whose worker was lost once is done by another
    assert (tmp_path / "1").read_text() == "1.0"
    assert (tmp_path / "2").read_text().startswith("bad.arrow: the worker died on every try")


def without(spec: Work, file: str, reason: str) -> Work:
    return replace(spec, without=f"{file}: {reason}") if spec.work == "read" else spec


# One unit asks for more than any machine has: Ray waits for ever for what no node has.
DIVISION = Stage("division", 1, fail_or_not, "lower key.of_it", without, cpus=1000)


def do_all(folder: Path) -> None:
    corpus = LocalStore(folder)
    units = [Unit(f"by-{by}", Work("divide", by=by, output=str(by)), "", (str(by),), memory=by << 60) for by in (0, 1)]
    units += [Unit("read", Work("read", output="2"), "", ("2",))]
    units += [Unit("allocate", Work("allocate"), ""), Unit("be_killed", Work("be_killed", times=9), "")]
    units += [Unit("be_killed_once", Work("be_killed", times=1), "", ("tries-1",))]
    try:
        run(DIVISION, units, corpus, RayConfig(num_cpus=1))
    except FailedError as error:
        print_error(error)
    # a unit can't have the whole node, of which somebody else has a part
    holder = ray.remote(num_cpus=0, memory=100_000_000)(progress.Board).remote()
    ray.get(holder.by_unit.remote())
    dispatch._SECONDS_TO_BEGIN = 3.0
    held = [Unit("be_killed", Work("be_killed", times=8), "")]
    run(replace(DIVISION, name="held"), held, corpus, RayConfig())


def check_all(corpus: Path, address: str) -> None:
    """Prints what is wrong with a corpus, and then the files that are damaged. A worker reads one file at once."""
    checking._BYTES_AT_ONCE = 1
    cluster = RayConfig(address=address, small_bytes=0)
    workers.ready(cluster)
    log = corpus.with_name("check.log")
    checks = {
        "verify": lambda: verify(open_corpus(corpus), cluster),
        "checking": lambda: checking.forget_damaged(LocalStore(corpus), cluster),
    }
    with log.open("w", buffering=1) as file, contextlib.redirect_stderr(file):
        for what, check in checks.items():
            busy = keep_busy(["127.0.0.3"], log, f"{what}: node 127.0.0.3") if can_unshare() else []
            print("\n".join(check()))
            ray.get(busy)
    print(log.read_text(), file=sys.stderr)


def keep_others_busy(address: str, log: Path) -> None:
    """Takes the CPUs of all nodes but the second, which is to be killed, and the third, until this one is left out."""
    workers.ready(RayConfig(address=address))
    busy = keep_busy(["127.0.0.2", "127.0.0.3"], log, "documents: node 127.0.0.3")
    print("busy", flush=True)
    ray.get(busy)


def do_where_possible(corpus: Path, address: str) -> None:
    """Writes what is told on the way to a file, which units read."""
    nodes.SECONDS_TO_PASS = 3.0  # the one unit that fails on every node is the last, and tried again for all of it
    units = [Unit(f"by-{by}", Work("where_possible", by=by, output=str(by)), "", (str(by),)) for by in range(1, 41)]
    units.append(Unit("bad", Work("where_possible"), ""))
    with (corpus / "told").open("w", buffering=1) as file, contextlib.redirect_stderr(file):
        run(DIVISION, units, LocalStore(corpus), RayConfig(address=address))


def do_beside_deaths(corpus: Path, address: str) -> None:
    units = [Unit(f"by-{by}", Work("beside_deaths", by=by, output=str(by)), "", (str(by),)) for by in range(1, 31)]
    run(replace(DIVISION, cpus=1), units, LocalStore(corpus), RayConfig(address=address))


def _naps(number: int, attempt: Attempt) -> int:
    """Sleeps for a tenth of a second `number` times: Ray interrupts Python code between two calls, and no call."""
    for _ in range(number):
        time.sleep(0.1)
    return number


def use_workers(found: bool) -> None:
    """Gives up a unit at work, as a build does that fails. `found`: the program has started Ray before."""
    if found:
        ray.init("local", num_cpus=2, include_dashboard=False)
    with workers.cluster_left():
        pool = workers.ready(RayConfig(num_cpus=2))
        results = pool.each(_naps, {"short": 0, "long": 36_000}, "naps", lambda number: Needs())
        assert next(results)[0] == "short"
        results.close()
        print(f"after a failure: {ray.is_initialized()}")
        assert not found or until(lambda: ray.available_resources().get("CPU") == 2, 300)
    with workers.cluster_left():  # the next build
        pool = workers.ready(RayConfig(num_cpus=2))
        assert [*pool.each(_naps, {"one": 1}, "naps", lambda given: Needs())] == [("one", 1)]
    print(f"at the end: {ray.is_initialized()}", flush=True)
