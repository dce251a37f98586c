"""Runs the steps of docker/Dockerfile in a folder that holds a clean Ubuntu, for machines without a Docker daemon.

    debootstrap --variant=minbase --components=main,universe noble ROOT http://archive.ubuntu.com/ubuntu
    sudo python3 docker/steps.py ROOT

RUN, COPY, ENV, USER and WORKDIR do what docker does, as far as a chroot can: the base image's own files (the variables
for the NVIDIA container toolkit) are not there, and nothing is isolated but the file system. The first step that
fails ends it, with exit code 1.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).parents[1]


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """(instruction, arguments), with continued lines joined and comments dropped."""
    lines = "\n".join(line for line in dockerfile.splitlines() if line and not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def main(root: Path) -> int:
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    user, folder = "root", "/"
    for name, rest in instructions((TOP / "docker/Dockerfile").read_text()):
        print(f"== {name} {rest}", flush=True)
        if name == "RUN":
            command = ["chroot", f"--userspec={user}", root, "/bin/sh", "-c", f"cd {shlex.quote(folder)} && {rest}"]
            if code := subprocess.run(command, env=environment).returncode:
                print(f"== failed with exit code {code}")
                return 1
        elif name == "COPY":
            *sources, target = rest.split()
            copy(sources, root / target.lstrip("/"), target.endswith("/"))
        elif name == "ENV":
            key, _, value = rest.partition("=")
            environment[key] = re.sub(r"\$(\w+)", lambda match: environment.get(match[1], ""), value)
        elif name == "USER":
            user = rest
        elif name == "WORKDIR":
            folder = rest
        elif name != "FROM":
            raise SystemExit(f"{name}: this script doesn't know the instruction")
    return 0


def copy(sources: list[str], target: Path, into: bool) -> None:
    for source in sources:
        if (TOP / source).is_dir():
            shutil.copytree(
                TOP / source, target, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            place = target / Path(source).name if into else target
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TOP / source, place)


if __name__ == "__main__":
    if len(sys.argv) != 2 or os.geteuid():
        raise SystemExit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
