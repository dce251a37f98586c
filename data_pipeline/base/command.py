"""Shared by the commands of this project: path arguments, --version, and exit codes.

Exit codes: 0 done, 1 failed or found damage, 2 wrong arguments or config, 75 (`STOPPED`) stopped.
"""

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import typer

from data_pipeline.base import paths
from data_pipeline.base.errors import STOPPED as STOPPED
from data_pipeline.base.errors import UserError, of_command
from data_pipeline.base.formatting import is_utf8, masked, printable

_INTERRUPTED = 130  # typer's exit code after Ctrl-C
# Variables that count as unset if they are empty. CUDA_VISIBLE_DEVICES isn't one: an empty value hides all GPUs.
_EMPTY_IS_UNSET = re.compile(
    "(LOCAL_)?RANK|WORLD_SIZE|LOCAL_(WORLD_)?SIZE|MASTER_(ADDR|PORT)|(SLURM|SLURMD|PRETRAIN|G?OMP|MKL|AWS)_.*|HOME"
    "|(TRITON|TORCHINDUCTOR)_CACHE_DIR"
)


def local_path(text: str) -> Path:
    """A path on this machine; ValueError for a URL."""
    return Path(paths.local(text))


def config_path(text: str) -> Path:
    """A config file or folder: a path on this machine, or `configs:NAME` for one that ships; ValueError for others."""
    return Path(paths.config(text))


def path_argument(name: str, help: str, read: Callable[[str], Any] = local_path) -> Any:
    """A positional typer argument that is a path. `read` parses it and raises ValueError for a path it refuses."""
    return typer.Argument(metavar=name, help=help, parser=_parser(name, read))


def path_option(name: str, help: str, read: Callable[[str], Any] = local_path) -> Any:
    """A typer option that is a path; `read` as in `path_argument`."""
    return typer.Option(name, metavar="PATH", help=help, parser=_parser(name, read))


def _parser(name: str, read: Callable[[str], Any]) -> Callable[[str], Any]:
    """`read`, whose ValueErrors become UserErrors that name the argument."""

    def reading(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from None

    return reading


def refuse_options(context: typer.Context, reason: str, *names: str) -> None:
    """Raises UserError if any of the parameters `names` is on the command line. `reason`: why it would do nothing."""
    given = []
    for one in context.command.params:
        source = context.get_parameter_source(one.name or "")
        if one.name in names and source is not None and source.name == "COMMANDLINE":
            given.append(one.opts[-1])
    if given:
        raise UserError(f"{' and '.join(given)}: {reason}")


def _print_version(given: bool) -> None:
    if given:
        from data_pipeline.base import packages  # its importlib.metadata takes 12 ms, for --version alone

        release, code = packages.package_version(), packages.code_version()
        print(f"{packages.PACKAGE} {release}" + (f" (commit {code})" if code != release else ""))
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
]


def json_for(stream: TextIO, value: Any, indent: int | None = None) -> str:
    """`value` as JSON, with escapes if the encoding of `stream` lacks one of its characters."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    try:
        text.encode(stream.encoding or "utf-8")  # None: a StringIO
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent)
    return text


def run_command(app: typer.Typer) -> None:
    """Runs `app`. Prints a UserError, or a file that the system refuses, as one message without a traceback, and exits
    with its code.

    A character that the encoding of stdout lacks, such as Latin-1, is printed as a question mark. Python escapes it on
    stderr.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    for name in [name for name, value in os.environ.items() if not value and _EMPTY_IS_UNSET.fullmatch(name)]:
        del os.environ[name]
    try:
        for argument in sys.argv[1:]:  # no tokenizer takes other bytes, and no file is written with them
            if not is_utf8(argument):
                raise UserError(f"{printable(argument)}: an argument that isn't UTF-8; convert it, or rename the file")
        app()
    except UserError as error:
        _end(error)
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            print("interrupted; run the same command again", file=sys.stderr)
        if (full := _flush_output()) and not end.code:
            _end(full)
        raise
    except OSError as error:
        if (failed := of_command(error)) is None:
            raise
        _end(failed)


def _end(error: UserError) -> NoReturn:
    print_error(error)
    _flush_output()
    sys.exit(error.exit_code)


def _flush_output() -> UserError | None:
    """Writes what is left of the output. Returns the failure if the output's disk is full."""
    try:
        if sys.stdout is not None:  # None: it was closed before the start
            sys.stdout.flush()
    except OSError as error:
        _drop_output()
        return of_command(error)
    return None


def _drop_output() -> None:
    """Drops what is left of the output: a program such as `head` has closed it, or its disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_error(error: UserError) -> None:
    """Prints `error` to stderr, with passwords masked."""
    with contextlib.suppress(OSError):  # a log on a full disk can't be written; the exit code must not change
        print(f"error: {masked(str(error))}", file=sys.stderr)
