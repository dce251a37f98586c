"""Checks the version of DeepSpeed against the one that the tests pass with (docs/reference/deepspeed.md), and what the
installed version can do."""

import deepspeed

from data_pipeline.base.errors import UserError

TESTED = "0.19.8"
REPORT = "please report this, with environment.json and the run file"  # if DeepSpeed does something unexpected


def check_version() -> None:
    """Raises UserError for another version of DeepSpeed than the tested one."""
    if deepspeed.__version__.partition("+")[0] != TESTED:  # 0.19.8+cu130 is 0.19.8
        raise UserError(
            f"deepspeed {deepspeed.__version__} is installed; supported: {TESTED}; "
            f"install it with: pip install deepspeed=={TESTED}"
        )


def was_built_with(extension: str) -> bool:
    """True if DeepSpeed was installed with this extension."""
    return bool(deepspeed.git_version_info.installed_ops.get(extension))


def can_build_async_io() -> bool:
    """True if DeepSpeed's extension for NVMe is built or can be built."""
    return deepspeed.ops.op_builder.AsyncIOBuilder().is_compatible(verbose=False)
