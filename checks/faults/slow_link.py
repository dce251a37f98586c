"""A slow link between two hosts of this machine, which loses some of what it carries."""

import contextlib
import fcntl
import os
import random
import select
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator

from tests.support.two_hosts import PREFIX, Hosts, run


@contextlib.contextmanager
def slow(hosts: Hosts, index: int, seconds: float, loss: float) -> Iterator[None]:
    """Within the block, what passes between a host and the others takes `seconds`, and a share of it is lost."""
    link = SlowLink(seconds, loss)
    name, address = hosts.names[index], hosts.addresses[index]
    run("ip", "link", "set", hosts.link(index), "nomaster")
    run("ip", "-n", name, "address", "delete", f"{address}/{PREFIX}", "dev", "eth0")
    run("ip", "link", "set", link.names[0], "master", hosts.bridge, "up")
    run("ip", "link", "set", link.names[1], "netns", name)
    for command in (f"address add {address}/{PREFIX} dev {link.names[1]}", f"link set {link.names[1]} up"):
        run("ip", "-n", name, *command.split())
    _forget_devices(hosts)
    link.start()
    try:
        yield
    finally:
        link.end()
        run("ip", "-n", name, "address", "add", f"{address}/{PREFIX}", "dev", "eth0")
        hosts.connect(index)
        _forget_devices(hosts)


def _forget_devices(hosts: Hosts) -> None:
    """Everyone looks up anew which device has an address: for up to a minute, frames would go to the one before."""
    run("ip", "neighbour", "flush", "dev", hosts.bridge)
    for name in hosts.names:
        run("ip", "-n", name, "neighbour", "flush", "all")


class SlowLink(threading.Thread):
    """A cable between two TAP devices, `names`, that holds back every frame and loses some: what netem does."""

    def __init__(self, seconds: float, loss: float):
        super().__init__(daemon=True)
        name = uuid.uuid4().hex[:8]
        self.names = [f"tap{name}-{end}" for end in range(2)]
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
                    if luck.random() >= self._loss:
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
