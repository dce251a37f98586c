"""The section `ray` of a corpus file."""

from pydantic import Field, NonNegativeInt

from data_pipeline.base.config_file import Section


class RayConfig(Section):
    """Where the build runs."""

    address: str | None = None
    """A Ray cluster that runs already, such as `10.0.0.1:6379`. null: the command starts one, if the build is large."""
    num_cpus: int | None = Field(None, gt=0, le=4096)  # Ray starts a process for each
    """Number of CPUs of the cluster that the command starts. null: all."""
    dashboard: bool = False
    """Start Ray's dashboard with the cluster that the command starts. Requires `pip install "ray[default]"`."""
    small_bytes: NonNegativeInt = 16 * 2**20
    """Maximum size of the input, in bytes as stored, for which no cluster is started. Units then run one after the
    other in the command's own process."""
