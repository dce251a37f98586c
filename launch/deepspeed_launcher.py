"""DeepSpeed's launcher of the ranks of one machine, as a program: `python -m launch.deepspeed_launcher …`.

An ordinary import of the launcher takes 2.2 s of a core, for PyTorch and all of DeepSpeed. The launcher uses four small
parts of them, which this module replaces.
"""

import base64
import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def command(ranks: Mapping[str, int], number: int, address: str, port: int) -> list[str]:
    """DeepSpeed's launcher on the node `number` of those in `ranks`, which has their ranks, before a rank's command.

    The ranks meet at `address` and `port`. The program `deepspeed --no_ssh` would start the same launcher, but import
    PyTorch and DeepSpeed twice before.
    """
    world = json.dumps({name: list(range(count)) for name, count in ranks.items()})
    encoded = base64.urlsafe_b64encode(world.encode()).decode()
    program = [sys.executable, "-u", "-m", "launch.deepspeed_launcher", f"--world_info={encoded}"]
    program += [f"--node_rank={number}", f"--master_addr={address}", f"--master_port={port}"]
    return [*program, "--no_local_rank", "--quiet", "--no_python"]


class _VisibleDevices:
    """DeepSpeed's accelerator as far as its launcher uses it. The devices that the user chose stay visible."""

    def set_visible_devices_envs(self, environment: dict[str, str], devices: list[int]) -> None:
        pass

    def visible_devices_envs(self) -> list[str]:
        return []


def launcher() -> Callable[[], None]:
    """DeepSpeed's launcher, which reads sys.argv. This process can't import DeepSpeed afterwards."""
    spec = importlib.util.find_spec("deepspeed")
    package, accelerator, utils = _module("deepspeed"), _module("deepspeed.accelerator"), _module("deepspeed.utils")
    package.__path__ = spec.submodule_search_locations if spec else []
    accelerator.get_accelerator = _VisibleDevices
    utils.logger = logging.getLogger("DeepSpeed")
    utils.set_log_level_from_string = lambda level: utils.logger.setLevel(level.upper())
    utils.get_numactl_cmd = None  # for an option that isn't used
    from deepspeed.launcher.launch import main  # 6 s and 380 MB without these stand-ins

    return main


def _module(name: str) -> Any:
    sys.modules[name] = module = ModuleType(name)
    return module


if __name__ == "__main__":
    launcher()()
