"""Operating system errors from safetensors: a full disk raises OSError, as for any other file."""

import contextlib
import os
import re
from collections.abc import Iterator

from safetensors import SafetensorError


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """Turns a SafetensorError that an operating system error caused into that OSError."""
    try:
        yield
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from None
