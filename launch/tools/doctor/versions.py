"""The installed packages against what this project declares."""

import platform
from importlib.metadata import PackageNotFoundError, metadata, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from data_pipeline.foundation.code_version import PACKAGE
from launch.tools.doctor.findings import Finding, Settings

_SHOWN = ("torch", "deepspeed", "mlflow")
_INSTALL = "install the versions of constraints.txt: pip install -c constraints.txt"


def check(settings: Settings) -> list[Finding]:
    try:
        declared = metadata(PACKAGE)
    except PackageNotFoundError:
        return [
            Finding("versions", "warning", f"{PACKAGE} isn't installed, so nothing says what it needs", "", _INSTALL)
        ]
    requirements = [Requirement(text) for text in declared.get_all("Requires-Dist") or ()]
    found = [_wrong(one) for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    python = platform.python_version()
    if not SpecifierSet(needs := declared["Requires-Python"]).contains(python):
        found.append(Finding("versions", "fault", f"python {python}", f"python {needs}", "use another Python"))
    wrong = [finding for finding in found if finding]
    return wrong or [
        Finding("versions", "ok", ", ".join(f"{name} {number}" for name, number in installed_versions().items()))
    ]


def installed_versions() -> dict[str, str]:
    """The versions that must be the same on all nodes."""
    return {
        "python": platform.python_version(),
        PACKAGE: _version(PACKAGE),
        **{name: _version(name) for name in _SHOWN},
    }


def _wrong(requirement: Requirement) -> Finding | None:
    name, number = requirement.name, _version(requirement.name)
    if number and requirement.specifier.contains(number, prereleases=True):
        return None
    found = f"{name} {number}" if number else f"{name} is missing"
    return Finding("versions", "fault", found, f"{name} {requirement.specifier}".strip(), _INSTALL)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
