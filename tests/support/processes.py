"""Processes of this machine."""

import psutil


def processes_with(**variables: str) -> list[psutil.Process]:
    """Those that run with all these variables in their environment, but not this process."""
    found = []
    for process in psutil.process_iter():
        try:
            if variables.items() <= process.environ().items() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process != psutil.Process()]


def runs(number: int) -> bool:
    """Whether a process exists and isn't just one that nobody has waited for."""
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
