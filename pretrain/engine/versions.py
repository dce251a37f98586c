"""Checks the installed version of DeepSpeed against the tested versions (docs/reference/deepspeed.md), and what it can
do."""

import deepspeed

from data_pipeline.foundation.errors import UserError

OLDEST, NEWEST = "0.19.8", "0.19.8"
REPORT = "please report this, with environment.json and the run file"  # if DeepSpeed does something unexpected


def check_version() -> None:
    """Raises UserError for a version of DeepSpeed outside the tested range."""
    if not is_tested():
        raise UserError(
            f"deepspeed {deepspeed.__version__} is installed; supported: {supported()}; "
            f"install it with: pip install deepspeed=={NEWEST}"
        )


def supported() -> str:
    """The tested range, for a message."""
    return NEWEST if OLDEST == NEWEST else f"{OLDEST} to {NEWEST}"


def is_tested() -> bool:
    """True if the installed version of DeepSpeed is in the tested range."""
    return _numbers(OLDEST) <= _numbers(deepspeed.__version__) <= _numbers(NEWEST)


def was_built_with(extension: str) -> bool:
    """True if DeepSpeed was installed with this extension."""
    return bool(deepspeed.git_version_info.installed_ops.get(extension))


def can_build_async_io() -> bool:
    """True if DeepSpeed's extension for NVMe is built or can be built."""
    return deepspeed.ops.op_builder.AsyncIOBuilder().is_compatible(verbose=False)


def _numbers(version: str) -> tuple[int, ...]:
    """0.19.8+cu130 → (0, 19, 8)"""
    return tuple(int(part) for part in version.partition("+")[0].split(".")[:3] if part.isdigit())
