"""safetensors files whose failures are the operating system's: a full disk is an OSError, as for any other file."""

import contextlib
import os
import re
from collections.abc import Iterator

from safetensors import SafetensorError


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """Turns the library's own error into the OSError behind it, where there is one."""
    try:
        yield
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from None
