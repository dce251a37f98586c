"""Has DeepSpeed reduce gradients in another way than the device's own."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from pretrain.config import deepspeed_keys


@contextlib.contextmanager
def reducing(**keys: Any) -> Iterator[None]:
    """Within the block, engines are built and planned with these keys of DeepSpeed's, such as those of GPUs."""
    own = deepspeed_keys.reductions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed_keys, "reductions", lambda stage, device: {**own(stage, device), **keys})
        yield
