"""The limits of `make gpu` hold on a machine that has compiled nothing: they follow from counted compilations."""

import pytest

from checks.gpu.runner import FIXED_TILES, Planned, seconds_to_compile

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

from checks.gpu.compilations import COMPILING, counted
from pretrain.kernels import tuning


@pytest.mark.parametrize("name", ["loss_curve", "exactness"])
def test_compilations_are_as_many_as_counted(name):
    """Of a check that starts a run, and of one in a process; `python -m checks.gpu.compilations` counts all."""
    assert counted(COMPILING[name]) == COMPILING[name].compilations


def test_the_environment_is_the_tuners():
    assert tuning.FIXED == FIXED_TILES


def test_a_limit_has_room_for_compilations_on_a_gpu_alone():
    check = Planned("name", "module", "function", 60.0, compilations=40)
    assert check.limit_on("cpu") == 60.0
    assert check.limit_on("cuda") > 60.0 + 40 * 1.4 / 128
    assert seconds_to_compile(17, 8) - seconds_to_compile(16, 8) == pytest.approx(1.4)
