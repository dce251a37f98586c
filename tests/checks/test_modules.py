"""What hours of checks would find only after they have started."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import checks

TOP = Path(checks.__file__).parents[1]
NOT_IMPORTED = ("__main__", "sitecustomize")  # the latter plant what they are for


def test_every_module_of_the_checks_can_be_imported():
    paths = [path.relative_to(TOP).with_suffix("") for path in (TOP / "checks").rglob("*.py")]
    found = {".".join(path.parts) for path in paths if path.name not in NOT_IMPORTED}
    assert len(found) > 30
    for name in sorted(found):
        import_module(name.removesuffix(".__init__"))


def test_the_checks_that_make_runs_exist_and_say_what_they_take():
    makefile = (TOP / "Makefile").read_text()
    for name in ("faults", "soak.training", "soak.build", "fuzz", "gpu"):
        assert f"-m checks.{name} " in makefile
        done = subprocess.run(
            [sys.executable, "-m", f"checks.{name}", "--help"], cwd=TOP, capture_output=True, text=True
        )
        assert (done.returncode, f"usage: python -m checks.{name} " in done.stdout) == (0, True), done.stderr
