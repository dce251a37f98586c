"""Signals that a process catches."""

import signal
import threading

from data_pipeline.base.processes import caught


def test_the_main_thread_alone_catches_signals():
    """Python refuses a handler elsewhere."""
    before, found = signal.getsignal(signal.SIGUSR1), []

    def look() -> None:
        with caught() as received:
            found.append((signal.getsignal(signal.SIGUSR1), received))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [(before, [])]
    with caught() as received:
        signal.raise_signal(signal.SIGUSR1)
    assert received == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) == before
