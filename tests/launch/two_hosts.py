"""Two hosts on this machine: namespaces with names and addresses of their own on a bridge, and sshd in each."""

import contextlib
import fcntl
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

from tests.ports import free_port

PROGRAMS = ("ip", "sshd", "ssh", "ssh-keygen")
_PREFIX = 29  # bits of the addresses that both hosts have in common
_SSHD = """
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PidFile none
"""


def lacking() -> str | None:
    """Why hosts can't be set up here; None where they can."""
    if os.geteuid():
        return "network namespaces and sshd take root"
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"not installed: {', '.join(absent)} (apt-get install iproute2 openssh-server)"
    return None if subprocess.run(["unshare", "--net", "true"]).returncode == 0 else "no network namespaces here"


class Hosts:
    """`names` and `addresses` are those of the hosts, `own` is this machine's address in their network."""

    def __init__(self, folder: Path):
        self.folder = folder
        name = uuid.uuid4().hex[:8]
        self._bridge = f"br{name}"
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
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists on it
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "address", "add", f"{self.own}/{_PREFIX}", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        for index, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", self._link(index), "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", self._link(index), "master", self._bridge, "up")
            for command in (f"address add {address}/{_PREFIX} dev eth0", "link set eth0 up", "link set lo up"):
                _run("ip", "-n", name, *command.split())
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
        _run("ip", "link", "set", self._link(index), "nomaster")

    def connect(self, index: int) -> None:
        _run("ip", "link", "set", self._link(index), "master", self._bridge)

    @contextlib.contextmanager
    def slow(self, index: int, seconds: float, loss: float) -> Iterator["SlowLink"]:
        """Within the block, what passes between a host and the others takes `seconds`, and a share of it is lost."""
        link = SlowLink(seconds, loss)
        name, address = self.names[index], self.addresses[index]
        _run("ip", "link", "set", self._link(index), "nomaster")
        _run("ip", "-n", name, "address", "delete", f"{address}/{_PREFIX}", "dev", "eth0")
        _run("ip", "link", "set", link.names[0], "master", self._bridge, "up")
        _run("ip", "link", "set", link.names[1], "netns", name)
        for command in (f"address add {address}/{_PREFIX} dev {link.names[1]}", f"link set {link.names[1]} up"):
            _run("ip", "-n", name, *command.split())
        self._forget_devices()
        link.start()
        try:
            yield link
        finally:
            link.end()
            _run("ip", "-n", name, "address", "add", f"{address}/{_PREFIX}", "dev", "eth0")
            self.connect(index)
            self._forget_devices()

    def _forget_devices(self) -> None:
        """Everyone looks up anew which device has an address: for up to a minute, frames would go to the one before."""
        _run("ip", "neighbour", "flush", "dev", self._bridge)
        for name in self.names:
            _run("ip", "-n", name, "neighbour", "flush", "all")

    def processes(self, index: int) -> list[int]:
        done = subprocess.run(["ip", "netns", "pids", self.names[index]], capture_output=True, text=True)
        return [int(process) for process in done.stdout.split()]

    def busy(self, index: int) -> list[int]:
        """The processes of a host but its sshd."""
        return [process for process in self.processes(index) if process != self._daemons[index].pid]

    def kill_all(self, index: int) -> None:
        """As a host that loses its power and starts again at once: only its sshd is left."""
        for process in self.busy(index):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def stop(self) -> None:
        for index, name in enumerate(self.names):
            for process in self.processes(index):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], check=False)
        for daemon in self._daemons:
            daemon.wait()
        subprocess.run(["ip", "link", "delete", self._bridge], check=False)

    def _link(self, index: int) -> str:
        return f"{self._bridge}-{index}"


class SlowLink(threading.Thread):
    """A cable between two TAP devices, `names`, that holds back every frame and loses some: what netem does."""

    def __init__(self, seconds: float, loss: float):
        super().__init__(daemon=True)
        name = uuid.uuid4().hex[:8]
        self.names = [f"tap{name}-{end}" for end in range(2)]
        self.lost = 0
        self._seconds, self._loss = seconds, loss
        self._ends = [_tap(name) for name in self.names]
        self._over = threading.Event()

    def run(self) -> None:
        luck, waiting = random.Random(0), deque[tuple[float, int, bytes]]()
        while not self._over.is_set():
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, to, frame = waiting.popleft()
                with contextlib.suppress(OSError):  # the device is down
                    os.write(self._ends[to], frame)
            timeout = min(0.1, max(waiting[0][0] - now, 0)) if waiting else 0.1
            for end in select.select(self._ends, [], [], timeout)[0]:
                with contextlib.suppress(OSError):
                    frame = os.read(end, 65536)
                    if luck.random() < self._loss:
                        self.lost += 1
                    else:
                        waiting.append((time.monotonic() + self._seconds, 1 - self._ends.index(end), frame))

    def end(self) -> None:
        self._over.set()
        self.join()
        for end in self._ends:
            os.close(end)  # and with it its device


def _tap(name: str) -> int:
    """The file descriptor of a new TAP device; see the kernel's Documentation/networking/tuntap.rst."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    tap, no_header, set_interface = 0x2, 0x1000, 0x400454CA  # IFF_TAP, IFF_NO_PI, TUNSETIFF
    fcntl.ioctl(device, set_interface, struct.pack("16sH22x", name.encode(), tap | no_header))
    return device


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
