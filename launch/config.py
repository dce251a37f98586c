"""A cluster file, configs/clusters/*.yaml: what SLURM and the nodes of a cluster need for any run."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, PositiveInt

from data_pipeline.foundation.config_file import LocalPath, Section

_NAME = re.compile(r"[A-Za-z_]\w*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _one_line(text: str) -> str:
    if _CONTROL.search(text):
        raise ValueError(f"expected one line, got {text!r}")
    return text


Line = Annotated[str, AfterValidator(_one_line)]


def _variables(given: dict[str, str]) -> dict[str, str]:
    for name in given:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} can't be the name of an environment variable")
    return given


class ClusterConfig(Section):
    """How to run on a cluster: settings of the site rather than of a run."""

    partition: Line | None = None
    """SLURM's partition."""
    account: Line | None = None
    """The account that the job is charged to."""
    qos: Line | None = None
    """SLURM's quality of service."""
    time: Line | None = None
    """The job's time limit, days-hours:minutes:seconds, unless --time gives another."""
    device: Literal["gpu", "cpu"] = "gpu"
    """On `cpu`, the job asks for no GPUs, and its ranks are on the CPU."""
    gpus_per_node: PositiveInt | None = None
    """The GPUs of a node."""
    interface: Line | None = None
    """The network interface that NCCL and gloo connect through. null: they choose."""
    environment: Annotated[dict[str, str], AfterValidator(_variables)] = {}
    """Environment variables of the job."""
    modules: list[Line] = []
    """What `module load` loads."""
    setup: list[str] = []
    """Further lines of the batch script, for the shell."""
    container: list[Line] = []
    """A command that runs another one in a container, such as `[apptainer, exec, --nv, image.sif]`; it is put before
    that of each node's agent."""
    stage: LocalPath | None = None
    """A directory on a disk of each node, where the corpora of a run are copied first. null: they are read in place."""
    sbatch: list[Line] = []
    """Further options of sbatch."""
    srun: list[Line] = []
    """Further options of srun."""

    @property
    def variables(self) -> dict[str, str]:
        """`environment` and the variables that `interface` sets."""
        names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if self.interface else ()
        return {**dict.fromkeys(names, self.interface or ""), **self.environment}
