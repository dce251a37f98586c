"""Which code this is: the git commit of the source tree, or the version of the installed package."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import data_pipeline

PACKAGE = "encdec-pretrain"
_SOURCE = Path(data_pipeline.__file__).parent.parent


def code_version(source: Path = _SOURCE) -> str:
    """The commit, with "-dirty" where tracked files differ from it; without a git repository the package's version."""
    # without --exclude, a tag would stand in for the commit
    described = git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*", source=source).strip()
    return described or package_version()


def package_version() -> str:
    """The version of the installed package; "unknown" where the code runs without having been installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unknown"


def git(*arguments: str, source: Path = _SOURCE) -> str:
    """What git prints about the source tree; "" where it is no git repository or git can't be run."""
    if not (source / ".git").exists():
        return ""
    command = ["git", "--no-optional-locks", "-C", str(source), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
