"""The version of this code: the git commit of the source tree, or the version of the installed package."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import data_pipeline

PACKAGE = "encdec-pretrain"
_SOURCE = Path(data_pipeline.__file__).parent.parent


def code_version(source: Path = _SOURCE) -> str:
    """The git commit, with "-dirty" if tracked files differ from it; the package's version outside a git repository."""
    # without --exclude, git would print a tag instead of the commit
    described = git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*", source=source).strip()
    return described or package_version()


def package_version() -> str:
    """The version of the installed package, or "unknown" if the package isn't installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unknown"


def git(*arguments: str, source: Path = _SOURCE) -> str:
    """The output of a git command in the source tree; "" if that is no git repository or the command fails."""
    if not (source / ".git").exists():
        return ""
    command = ["git", "--no-optional-locks", "-C", str(source), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
