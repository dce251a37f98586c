"""The section `ray` of a corpus file."""

from pydantic import Field, NonNegativeInt

from data_pipeline.foundation.config_file import Section


class RayConfig(Section):
    """Where the build runs."""

    address: str | None = None
    """A Ray cluster that runs already, such as `10.0.0.1:6379`. null: the command starts one, if the build is large."""
    num_cpus: int | None = Field(None, gt=0, le=4096)  # Ray starts a process for each
    """CPUs of the cluster that the command starts. null: all."""
    dashboard: bool = False
    """Whether the cluster that the command starts has Ray's dashboard, which takes `pip install "ray[default]"`."""
    small_bytes: NonNegativeInt = 16 * 2**20
    """The most input, in bytes as stored, for which no cluster is started: units then run one after the other in the
    command's own process."""
