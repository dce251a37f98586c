"""`launch doctor` on a healthy machine and on broken ones, which are broken for real."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from xml.etree import ElementTree

import pytest

from launch.rank_processes import PROGRAM_REPORT
from launch.tools.doctor import all_reduce, checks, directory, gpu_health, gpus, numerics, run_file, tracking
from launch.tools.doctor.checks import Check
from launch.tools.doctor.doctor import doctor as examine
from launch.tools.doctor.doctor import here
from launch.tools.doctor.findings import Finding, Settings, report
from pretrain.hardware.machine import count_gpus
from pretrain.run.train_state import TrainState
from tests.in_process import run_here
from tests.ports import free_port
from tests.pretrain.runs import run_file as write_run_file
from tests.tables import each

takes_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="mounting file systems takes root and mount namespaces",
)


def mounted(options: str, where: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs `command` where a tmpfs is mounted at `where`; nobody else sees it."""
    where.mkdir(exist_ok=True)
    script = 'mount -t tmpfs -o "$0" tmpfs "$1" && shift && exec "$@"'
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", script, options, str(where), *command], capture_output=True, text=True
    )


def doctor(*arguments: str | Path) -> list[str]:
    return [str(Path(sys.executable).with_name("launch")), "doctor", *map(str, arguments)]


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


@contextlib.contextmanager
def silent_server() -> Iterator[int]:
    """The port of a server that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.slow
def test_a_healthy_machine_has_no_faults_and_is_as_it_was(small_corpus, tmp_path):
    """DeepSpeed is compared with a plain loop there."""
    path = write_run_file(tmp_path, small_corpus)
    before = sorted(tmp_path.iterdir())
    done = subprocess.run(doctor(path, "--ranks", "2", "--numerics", "--json"), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = [Finding(**one) for one in json.loads(done.stdout)]
    assert set(levels(findings)) >= {
        *("versions", "GPUs", "memory", "shared memory", "run directory", "file locks", "clock"),
        *("tracking", "run file", "all-reduce"),
    }
    if not count_gpus():
        (time,) = (finding for finding in findings if finding.check == "time")
        assert time.found.startswith("about ")
        assert "to step 8 without a GPU" in time.found
    (sum_over_ranks,) = (finding for finding in findings if finding.check == "all-reduce")
    assert sum_over_ranks.found.startswith("2 ranks, ")
    assert (findings[-1].check, findings[-1].level) == ("numerics", "ok")
    assert "stage 2, fp32, 2 micro-batches" in findings[-1].found
    assert sorted(tmp_path.iterdir()) == before


def test_one_rank_is_singular(small_corpus, tmp_path):
    path = write_run_file(tmp_path, small_corpus)
    found = [run_file.check(Settings(all_ranks=ranks, run_file=(str(path),)))[0].found for ranks in (1, 2)]
    assert [one.removeprefix(f"{path} and its corpora are valid for ") for one in found] == ["1 rank", "2 ranks"]


def test_a_run_of_days_without_a_gpu_is_a_warning(small_corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    path = write_run_file(tmp_path, small_corpus, run={"max_steps": 2_000_000_000})
    (run, time) = run_file.check(Settings(run_file=(str(path),), ranks=1))
    assert (run.level, time.check, time.level) == ("ok", "time", "warning")
    assert "days to step 2,000,000,000 without a GPU" in time.found


def test_a_run_that_has_taken_its_last_step_takes_no_time(small_corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    path = write_run_file(tmp_path, small_corpus)
    checked = run_file.preflight

    def done(config, *ranks, **options):
        return replace(checked(config, *ranks, **options), train_state=TrainState(step=config.run.max_steps))

    monkeypatch.setattr(run_file, "preflight", done)
    assert levels(run_file.check(Settings(run_file=(str(path),), ranks=1))) == {"run file": "ok"}


@takes_mounts
def test_a_broken_machine_gets_a_line_for_each_fault_within_80_columns(tmp_path, monkeypatch):
    """Another DeepSpeed, a shared memory of 1 MiB and a missing corpus."""
    planted = tmp_path / "site/deepspeed-0.1.0.dist-info"
    planted.mkdir(parents=True)
    (planted / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.1.0\n")
    monkeypatch.setenv("PYTHONPATH", f"{planted.parent}:{os.environ.get('PYTHONPATH', os.getcwd())}")  # noqa: PTH109
    path = write_run_file(tmp_path, tmp_path / "nothing")
    done = mounted("size=1m", Path("/dev/shm"), doctor(path))
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 or len(line.split()) == 1 for line in lines)  # a word is never cut
    faults = [line.removeprefix("fault    ").partition(";")[0] for line in lines if line.startswith("fault")]
    assert faults[0] == "versions: deepspeed 0.1.0"
    assert faults[1].startswith("shared memory: 1.0 MB free in /dev/shm")
    assert faults[2].startswith("run file:")
    assert lines[-1].startswith("3 faults would stop a run")


@takes_mounts
@each("options, reason", [("size=1m", "No space left on device"), ("ro", "Read-only file system")])
def test_a_run_directory_that_cannot_be_written_is_a_fault(tmp_path, options, reason):
    code = (
        "import sys; from launch.tools.doctor import directory, findings\n"
        "(finding,) = directory.check(findings.Settings(directory=f'{sys.argv[1]}/a/run'))\n"
        "print(finding.level, finding.found)"
    )
    done = mounted(options, tmp_path / "disk", [sys.executable, "-c", code, str(tmp_path / "disk")])
    assert done.stdout == f"fault {tmp_path}/disk: {reason}\n", done.stderr


def test_locks_of_other_processes_count_and_a_file_of_another_node_must_be_there(tmp_path, monkeypatch):
    with directory.locked_file(tmp_path) as locked:
        found = levels(directory.check(Settings(directory=str(tmp_path), locked=str(locked))))
        assert (found["file locks"], found["clock"]) == ("ok", "ok")
    monkeypatch.setattr(directory, "_SECONDS_TO_SEE", 0)
    found = directory.check(Settings(directory=str(tmp_path), locked=str(locked)))
    (locks,) = (one for one in found if one.check == "file locks")
    assert (locks.level, locks.expected) == ("fault", "one file system for all nodes")
    unlocked = tmp_path / "unlocked"
    unlocked.touch()
    found = directory.check(Settings(directory=str(tmp_path), locked=str(unlocked)))
    (locks,) = (one for one in found if one.check == "file locks")
    assert (locks.level, locks.expected) == ("warning", "locks that hold on every node")
    assert list(tmp_path.iterdir()) == [unlocked]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    """An interposer answers as the kernel does there."""
    source, library = tmp_path / "no_flock.c", tmp_path / "no_flock.so"
    source.write_text("#include <errno.h>\nint flock(int f, int o) { errno = ENOTSUP; return -1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    asked = checks.request("directory", checks.NODE_CHECKS["directory"], Settings(directory=str(tmp_path)))
    program = [sys.executable, "-m", "launch.tools.doctor.checks"]
    done = subprocess.run(program, env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    findings = [Finding(**one) for one in json.loads(done.stdout.partition(" ")[2])["findings"]]
    (locks,) = (one for one in findings if one.check == "file locks")
    assert (locks.level, locks.found) == ("warning", "no file locks here (Operation not supported)")
    assert locks.remedy.startswith("nothing prevents a second run in this directory")


@pytest.mark.slow
def test_a_check_that_hangs_is_ended_and_named(small_corpus, tmp_path, monkeypatch, capsys):
    """The server never answers, and the check itself would wait for 10 s."""
    monkeypatch.setattr("launch.tools.doctor.doctor.NODE_CHECKS", {"tracking": Check("tracking", 3)})
    with silent_server() as port:
        uri = f"tracking.mlflow.uri=http://127.0.0.1:{port}"
        assert examine(*here(1), write_run_file(tmp_path, small_corpus), [uri], as_json=True) == 1
    findings = [Finding(**one) for one in json.loads(capsys.readouterr().out)]
    assert [one.found for one in findings if one.level == "fault"] == ["no answer within 3 s"]
    assert findings[0].check == "tracking"
    assert findings[-1].found.startswith("one rank on ")


class Answer(BaseHTTPRequestHandler):
    """MLflow's answer to those who log in."""

    def do_GET(self) -> None:
        wanted = "Basic bWU6c2VjcmV0"  # me:secret
        self.send_response(200 if self.headers["Authorization"] == wanted else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_tracking_server_is_asked_with_the_login_and_the_password_is_not_shown(monkeypatch):
    for name in ("USERNAME", "PASSWORD", "TOKEN"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    server = HTTPServer(("127.0.0.1", free_port()), Answer)  # nobody else gets its port when it has gone
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        at = f"127.0.0.1:{server.server_port}"
        asked = {
            login: tracking.check(Settings(tracking=f"http://{login}{at}", run_file=("run.yaml",)))[0]
            for login in ("me:secret@", "me:wrong@", "")
        }
    finally:
        server.shutdown()
        server.server_close()
    assert {login: (one.level, one.found) for login, one in asked.items()} == {
        "me:secret@": ("ok", f"http://me:***@{at} answers"),
        "me:wrong@": ("warning", f"http://me:***@{at} refuses the login (401)"),
        "": ("warning", f"http://{at} refuses the login (401)"),
    }
    (gone,) = tracking.check(Settings(tracking=f"http://{at}", run_file=("run.yaml",)))
    assert (gone.level, gone.found) == ("warning", f"http://{at}: Connection refused")


@pytest.mark.slow
def test_a_rank_whose_port_leads_nowhere_is_named():
    """Rank 0 is on a machine that doesn't run, so rank 1 meets a server that says nothing."""
    with silent_server() as port:
        group = all_reduce.RankGroup([1, 1], "127.0.0.1", port, seconds=4)
        (environment,) = group.environments(1, on_gpus=False)
        program = [sys.executable, "-m", "launch.tools.doctor.all_reduce_rank"]
        done = subprocess.run(program, env={**os.environ, **environment}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGALRM, "")
    finding = all_reduce.finding(group, all_reduce.Answers())
    assert finding.level == "fault"
    assert finding.found.startswith("ranks 0, 1 of 2 didn't join within 4 s")
    assert f"127.0.0.1, port {port}, must be reachable from every rank" in finding.remedy


def test_bandwidth_is_that_of_a_ring_and_compared_with_the_data_sheet():
    """In a ring each of 4 ranks sends 2·3/4 of the bytes. A DGX A100: 300 GB/s of NVLink, 25 GB/s of network each."""
    assert all_reduce.bus_bandwidth(4, 1_000_000_000, 0.5) == pytest.approx(3.0)
    a100 = "NVIDIA A100-SXM4-80GB"
    assert all_reduce.expected_bandwidth(a100, [8]) == 300
    assert all_reduce.expected_bandwidth(a100, [8, 8]) == 200
    assert all_reduce.expected_bandwidth(a100, [1, 1]) == 25
    assert all_reduce.expected_bandwidth(None, [2]) is None
    group = all_reduce.RankGroup([8], "127.0.0.1", 1)
    fast, slow = (
        all_reduce.finding(group, all_reduce.Answers(list(range(8)), all_reduce.Measured(2**28, seconds, a100)))
        for seconds in (0.002, 0.02)
    )
    assert (fast.level, slow.level) == ("ok", "warning")
    assert slow.found == "8 ranks, 256 MiB at 23 GB/s (NVIDIA A100-SXM4-80GB)"


def test_a_slow_node_and_a_slow_link_are_named():
    group, names = all_reduce.RankGroup([4] * 4, "127.0.0.1", 1), ["n0", "n1", "n2", "n3"]

    def found(within, between):
        parts = [all_reduce.Part([node], 2**28, seconds) for node, seconds in enumerate(within)]
        parts += [all_reduce.Part([node, node + 1], 2**28, seconds) for node, seconds in enumerate(between)]
        return [(one.node, one.found, one.expected) for one in all_reduce.slow_parts(group, parts, names)]

    assert found([0.010, 0.012, 0.019, 0.011], [0.02, 0.03, 0.039]) == []
    assert found([0.010, 0.010, 0.021, 0.010], [0.02, 0.02, 0.02]) == [
        ("n2", "19 GB/s within the node", "about 40 GB/s, as elsewhere")
    ]
    ends = found([0.01] * 4, [0.02, 0.02, 0.05])
    assert [(node, text) for node, text, _ in ends] == [("", "9.4 GB/s between n2 and n3")]
    both = found([0.01] * 4, [0.05, 0.05, 0.02])
    assert [(node, text) for node, text, _ in both] == [
        ("n1", "9.4 GB/s between n0 and n1"),
        ("n1", "9.4 GB/s between n1 and n2"),
    ]


@pytest.mark.slow
def test_nodes_and_neighbours_are_measured_besides_the_whole():
    """Three nodes of one, two and one ranks, as processes of this machine."""
    group = all_reduce.RankGroup([1, 2, 1], "127.0.0.1", free_port(), seconds=800)
    program = [sys.executable, "-m", "launch.tools.doctor.all_reduce_rank"]
    ranks = [
        subprocess.Popen(program, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)
        for node in range(3)
        for environment in group.environments(node, on_gpus=False)
    ]
    answers = all_reduce.Answers()
    for said in [rank.communicate()[0] for rank in ranks]:
        for line in said.splitlines():
            answers.add_report(line.removeprefix(PROGRAM_REPORT))
    assert [rank.returncode for rank in ranks] == [0] * 4
    assert sorted(answers.joined) == [0, 1, 2, 3]
    assert sorted(part.nodes for part in answers.parts) == [[0, 1], [1], [1, 2]]
    assert all(part.seconds > 0 and part.bytes == answers.measured.bytes for part in answers.parts)


def topology(*rows: str) -> str:
    """The form of `nvidia-smi topo -m`."""
    header = "\t\x1b[4m" + "\t".join(f"GPU{number}" for number in range(len(rows))) + "\tNIC0\tCPU Affinity\x1b[0m"
    cells = ["\t".join([f"GPU{number}", *row.split(), "SYS", "0-31"]) for number, row in enumerate(rows)]
    return "\n".join([header, *cells, "NIC0\tSYS\tSYS\t X ", "", "Legend:", "", "  X    = Self", ""])


def test_gpus_that_lack_nvlink_or_cannot_read_each_others_memory_are_a_warning():
    """The card's column counts for none: only what joins GPUs does."""
    joined = gpus.links("NVIDIA A100-SXM4-80GB", topology("X NV12 NV12", "NV12 X NV12", "NV12 NV12 X"))
    assert (joined.level, joined.found) == ("ok", "NVLink (NV12)")
    apart = gpus.links("NVIDIA A100-SXM4-80GB", topology("X NV12 SYS", "NV12 X SYS", "SYS SYS X"))
    assert (apart.level, apart.expected) == ("warning", "NVLink between all of them (300 GB/s)")
    assert gpus.links("NVIDIA A100 80GB PCIe", topology("X SYS", "SYS X")).level == "ok"
    assert gpus.peer_access(topology("X OK", "OK X")).level == "ok"
    apart = gpus.peer_access(topology("X OK CNS", "OK X OK", "CNS OK X"))
    assert apart.level == "warning"
    assert apart.found == "some GPUs can't read each other's memory (the chipset doesn't support it)"


HEALTHY = """
<gpu id="00000000:07:00.0"><product_name>NVIDIA H100 80GB HBM3</product_name>
  <mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
  <clocks_event_reasons>
    <clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
    <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
    <clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
  </clocks_event_reasons>
  <fb_memory_usage><total>81559 MiB</total><reserved>637 MiB</reserved><used>4 MiB</used></fb_memory_usage>
  <ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>Enabled</pending_ecc></ecc_mode>
  <ecc_errors>
    <volatile>
      <sram_correctable>7</sram_correctable><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
      <dram_correctable>9</dram_correctable><dram_uncorrectable>0</dram_uncorrectable>
    </volatile>
    <aggregate><dram_uncorrectable>5</dram_uncorrectable></aggregate>
  </ecc_errors>
  <retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
  <remapped_rows>
    <remapped_row_corr>0</remapped_row_corr><remapped_row_unc>1</remapped_row_unc>
    <remapped_row_pending>No</remapped_row_pending><remapped_row_failure>No</remapped_row_failure>
  </remapped_rows>
  <fabric><state>Completed</state><status>Success</status></fabric>
  <processes></processes>
</gpu>"""
PROCESS = "<process_info><pid>9</pid><process_name>python</process_name><used_memory>70000 MiB</used_memory>"


TAKEN = f"<processes>{PROCESS}</process_info>"


@each(
    "old, new, level, found",
    [
        ("<dram_uncorrectable>0", "<dram_uncorrectable>2", "fault", "2 uncorrectable errors of the memory"),
        ("<sram_uncorrectable_parity>0", "<sram_uncorrectable_parity>1", "fault", "1 uncorrectable errors"),
        ("<remapped_row_pending>No", "<remapped_row_pending>Yes", "fault", "waits for a reset"),
        ("<remapped_row_failure>No", "<remapped_row_failure>Yes", "fault", "could not be remapped"),
        ("<pending_retirement>N/A", "<pending_retirement>Yes", "fault", "waits for a reset"),
        ("<current_ecc>Enabled", "<current_ecc>Disabled", "warning", "ECC is off"),
        ("<current_mig>Disabled", "<current_mig>Enabled", "warning", "divided by MIG"),
        ("hw_thermal_slowdown>Not Active", "hw_thermal_slowdown>Active", "warning", "too hot"),
        ("<used>4 MiB", "<used>70004 MiB", "warning", "70,004 MiB in use"),
        ("<state>Completed", "<state>In Progress", "fault", "NVSwitch: In Progress"),
    ],
)
def test_a_gpu_that_is_broken_slow_or_taken_is_named(old, new, level, found):
    """Corrected errors, and uncorrectable ones of earlier times, whose rows are remapped, are normal. So is a GPU that
    says nothing."""
    assert old in HEALTHY
    silent = "<gpu><remapped_rows>N/A</remapped_rows></gpu>"
    broken = HEALTHY.replace(old, new).replace("<processes>", TAKEN if "used" in old else "<processes>")
    log = ElementTree.fromstring(f"<log>{HEALTHY}{broken}{silent}</log>")
    (finding,) = gpu_health.of_gpus(log.findall("gpu"))
    assert finding.level == level
    assert finding.found.startswith("GPUs 1: ")
    assert found in finding.found
    assert finding.found.endswith(" by python") == ("used" in old)


def test_messages_of_the_driver_about_hardware_are_shown_and_those_about_programs_are_not():
    log = """[ 1.0] NVRM: Xid (PCI:0000:07:00): 31, pid=9, name=python, Ch 00000008, intr 00000000.
[ 2.0] NVRM: Xid (PCI:0000:0a:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 3.0] NVRM: Xid (PCI:0000:0a:00): 79, GPU has fallen off the bus."""
    (finding,) = gpu_health.of_kernel_log(log)
    assert finding.found == "0000:0a:00: Xid 79, the GPU has fallen off the bus"
    assert gpu_health.of_kernel_log(log.splitlines()[0]) == []


def test_the_state_of_a_machines_gpus_must_fit_into_its_memory():
    host_memory = run_file.host_memory
    assert host_memory(200 * 10**9, 36 * 10**9, 72 * 10**9).level == "ok"
    assert host_memory(100 * 10**9, 36 * 10**9, 72 * 10**9).level == "warning"
    fault = host_memory(30 * 10**9, 36 * 10**9, 0)
    assert (fault.level, fault.expected) == ("fault", "36.0 GB for the copy that checkpoints are written from")


def test_clocks_may_differ_by_two_seconds():
    found = [directory.clock_finding("this machine's", ahead) for ahead in (-1.9, 2.1, -7.04)]
    assert [one.level for one in found] == ["ok", "warning", "warning"]
    assert [one.found for one in found[1:]] == ["2.1 s ahead of this machine's", "7.0 s behind this machine's"]


def test_a_report_names_the_nodes_and_gives_the_rest_a_line():
    findings = [Finding("memory", "ok", f"{number} GB free", node=f"n{number}") for number in range(5)]
    findings += [Finding("memory", "fault", "1 GB free", "9 GB", "free some", node="n7"), Finding("sum", "ok", "fast")]
    assert report(findings).splitlines() == [
        "ok       memory on 5 nodes (n0 … n4)",
        "fault    memory on n7: 1 GB free; expected 9 GB; free some",
        "ok       sum: fast",
        "1 fault would stop a run; 0 warnings",
    ]


def test_a_host_that_cannot_be_reached_is_named(tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("127.0.0.1 slots=1\n")
    done = run_here("launch", "doctor", "--hostfile", hostfile, "--ssh", "-p 9 -o ConnectTimeout=5", "--json")
    (finding,) = json.loads(done.stdout)
    assert (done.returncode, finding["node"], finding["level"]) == (1, "127.0.0.1", "fault")
    assert finding["found"].startswith("ssh ended with exit code 255: ssh: connect to host 127.0.0.1 port 9: ")


def test_two_ranks_examine_deepspeed_or_one_on_a_single_gpu():
    assert [numerics.group(gpus, 1).ranks for gpus in (0, 1, 2, 8)] == [2, 1, 2, 2]
    settings = Settings(all_ranks=16, run_file=("run.yaml", "precision=fp32"))
    first, second = numerics.environments(numerics.group(0, 1), settings, on_gpus=False)
    assert (first["RANK"], second["RANK"], second["WORLD_SIZE"]) == ("0", "1", "2")
    asked = {"seconds": numerics.SECONDS, "run_file": ["run.yaml", "precision=fp32"], "ranks": 16}
    assert json.loads(second["LAUNCH_DOCTOR_REQUEST"]) == asked


def test_a_deepspeed_that_trains_wrong_or_fails_is_a_fault():
    said = {"trained": "DeepSpeed 0.18.2, stage 2", "wrong": "wrong from step 1 on: gain (5 elements)", "tested": "1.2"}
    right = numerics.finding([json.dumps({**said, "wrong": "", "tested": None})], {})
    assert (right.level, right.found.partition(":")[0]) == ("ok", "DeepSpeed 0.18.2, stage 2")
    wrong = numerics.finding([json.dumps(said)], {})
    assert (wrong.level, wrong.found) == ("fault", f"{said['trained']}: {said['wrong']}")
    assert wrong.remedy == "install deepspeed 1.2 (constraints.txt)"
    tested = numerics.finding([json.dumps({**said, "tested": None})], {})
    assert tested.remedy == "don't train with these settings, and report this"
    failed = numerics.finding([], {"rank 1": "KeyError: torch.bfloat16"})
    assert (failed.level, failed.found) == ("fault", "the ranks failed: KeyError: torch.bfloat16")


def test_deepspeed_is_examined_with_a_run_file():
    done = run_here("launch", "doctor", "--numerics")
    assert (done.returncode, "--numerics: missing RUN.yaml" in done.stderr) == (2, True)
