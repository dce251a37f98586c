"""The packages in examples/ as `pip install -e` installs them, for tests and checks and the processes they start."""

import os
import sys
import tomllib
from pathlib import Path

TOP = Path(__file__).parent.parent


def install_examples() -> None:
    """Those of this checkout come first, whatever the environment has installed."""
    places = [TOP / "build/tests/installed"]
    for file in sorted(TOP.glob("examples/*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        name, version = project["name"].replace("-", "_"), project["version"]
        groups = project["entry-points"].items()
        offers = [f"[{group}]\n" + "".join(f"{one} = {value}\n" for one, value in of.items()) for group, of in groups]
        metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n"
        _write(places[0] / f"{name}-{version}.dist-info", METADATA=metadata, **{"entry_points.txt": "\n".join(offers)})
        places.append(file.parent)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    found = [str(place) for place in places]
    sys.path[:] = [*found, *(one for one in sys.path if one not in found)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*found, *(one for one in before if one and one not in found)])


def _write(folder: Path, **files: str) -> None:
    """Whole files at once: test workers start at the same time, and read what another writes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        own = folder / f"{name}.{os.getpid()}"
        own.write_text(content)
        own.replace(folder / name)
