"""Processes of this machine, by the variables in their environment."""

import psutil


def processes_with(**variables: str) -> list[psutil.Process]:
    """Those that run with all these variables, but not this process."""
    found = []
    for process in psutil.process_iter():
        try:
            if variables.items() <= process.environ().items() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process != psutil.Process()]
