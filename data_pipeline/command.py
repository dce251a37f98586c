"""How every command of this project ends: 0 done, 1 failed or found damage, 2 wrong arguments or config, 75 stopped."""

import contextlib
import os
import sys

import typer

from data_pipeline.errors import UserError

STOPPED = 75  # sysexits' EX_TEMPFAIL: a scheduler may start it again
_INTERRUPTED = 130  # what typer makes of Ctrl-C


def run_command(app: typer.Typer) -> None:
    """Runs `app`; an error that is the user's to mend is printed as it is, without a traceback."""
    try:
        app()
    except UserError as error:
        with contextlib.suppress(OSError):  # a full disk refuses a log, and must not change the exit code
            print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            print("interrupted; run the same command again to go on", file=sys.stderr)
        raise
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
