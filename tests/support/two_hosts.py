"""Two hosts on this machine: namespaces with names and addresses of their own on a bridge, and sshd in each."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from ipaddress import IPv4Address
from pathlib import Path

from tests.support.ports import free_port

PREFIX = 29  # bits of the addresses that both hosts have in common
_SSHD = """
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PidFile none
"""


class Hosts:
    """`names` and `addresses` are those of the hosts, `own` is this machine's address in their network."""

    def __init__(self, folder: Path):
        self.folder = folder
        name = uuid.uuid4().hex[:8]
        self.bridge = f"br{name}"
        # eight of RFC 2544's addresses, which are for tests: a port that no other process gets chooses which
        subnet = IPv4Address("198.18.0.0") + free_port() * 8 % 2**17
        self.own, *self.addresses = (str(subnet + index) for index in range(1, 4))
        self.names = [f"host{name}-{index}" for index in range(2)]
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def ssh(self) -> str:
        """Options of ssh that reach the hosts."""
        known = f"-o StrictHostKeyChecking=no -o UserKnownHostsFile={self.folder}/known -o LogLevel=ERROR"
        return f"-i {self.folder}/key {known}"

    def start(self) -> None:
        for key in ("key", "host_key"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists on it
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "address", "add", f"{self.own}/{PREFIX}", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        for index, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            run("ip", "netns", "add", name)
            run("ip", "link", "add", self.link(index), "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", self.link(index), "master", self.bridge, "up")
            for command in (f"address add {address}/{PREFIX} dev eth0", "link set eth0 up", "link set lo up"):
                run("ip", "-n", name, *command.split())
            configuration = self.folder / f"sshd-{index}"
            configuration.write_text(_SSHD.format(address=address, folder=self.folder))
            log = (self.folder / f"sshd-{index}.log").open("w")
            named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
            sshd = [shutil.which("sshd") or "", "-D", "-e", "-f", str(configuration)]
            self._daemons.append(subprocess.Popen(["ip", "netns", "exec", name, *named, *sshd], stderr=log))
        for address in self.addresses:
            patience = time.monotonic() + 120
            while subprocess.run(["ssh", *self.ssh.split(), address, "true"], stderr=subprocess.DEVNULL).returncode:
                assert time.monotonic() < patience, "sshd doesn't answer"
                time.sleep(0.2)

    def cut_off(self, index: int) -> None:
        """As pulling the cable does: what is sent is lost, and nobody is told."""
        run("ip", "link", "set", self.link(index), "nomaster")

    def connect(self, index: int) -> None:
        run("ip", "link", "set", self.link(index), "master", self.bridge)

    def processes(self, index: int) -> list[int]:
        done = subprocess.run(["ip", "netns", "pids", self.names[index]], capture_output=True, text=True)
        return [int(process) for process in done.stdout.split()]

    def busy(self, index: int) -> list[int]:
        """The processes of a host but its sshd."""
        return [process for process in self.processes(index) if process != self._daemons[index].pid]

    def kill_all(self, index: int) -> None:
        """As a host that loses its power and starts again at once: only its sshd is left."""
        _kill(self.busy(index))

    def stop(self) -> None:
        for index, name in enumerate(self.names):
            _kill(self.processes(index))
            subprocess.run(["ip", "netns", "delete", name], check=False)
        for daemon in self._daemons:
            daemon.wait()
        subprocess.run(["ip", "link", "delete", self.bridge], check=False)

    def link(self, index: int) -> str:
        """The end on the bridge of a host's cable."""
        return f"{self.bridge}-{index}"


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
