"""What the head of a SLURM job runs before the ranks: the doctor, and copies of corpora to the disks of the nodes."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FrameType

from data_pipeline.foundation.command import STOPPED
from launch.nodes import NOTHING_BEGUN, Ended
from pretrain.run import stop_signals

_SECONDS_TO_END, _SECONDS_BETWEEN_LOOKS = 30.0, 0.2


def run_first(commands: list[list[str]]) -> Ended | None:
    """Runs one command after the other; None once all of them have succeeded.

    A signal ends them: the batch shell itself would die of SIGUSR1, and SLURM wouldn't requeue the job.
    """
    with _noted() as received:
        for command in commands:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
            while process.poll() is None and not received:
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            if received:
                _end(process)
                print(NOTHING_BEGUN, file=sys.stderr, flush=True)
                return Ended(STOPPED, received[0] == signal.SIGUSR1)
            if process.returncode:
                return Ended(process.returncode if process.returncode > 0 else 1, False)
    return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_END)
    process.kill()
    process.wait()


@contextlib.contextmanager
def _noted() -> Iterator[list[int]]:
    """Within the block, stop signals are only noted."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        stop_signals.announce(number, "ending what comes before the run")
        received.append(number)

    previous = {number: signal.signal(number, note) for number in stop_signals.heeded()}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
