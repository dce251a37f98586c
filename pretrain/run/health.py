"""The health of training: skipped steps and spikes of the loss."""

import math
import statistics
from dataclasses import dataclass, replace

from pretrain.config.run_config import SpikeSection

_LEAST_DEVIATION = 0.005  # relative to the mean; on a plateau the losses of large batches hardly differ


@dataclass(frozen=True)
class Health:
    """Counts of skipped steps and spikes, saved in every checkpoint.

    `skipped` counts the steps of the whole run without a finite gradient, `in_a_row` the latest consecutive ones.
    `spikes` counts the spikes, and `recent` holds the losses of the last steps without them.
    """

    skipped: int = 0
    in_a_row: int = 0
    spikes: int = 0
    recent: tuple[float, ...] = ()

    def after(self, loss: float, applied: bool, settings: SpikeSection | None) -> "Health":
        """The health after one more step, which had this `loss` and was or wasn't `applied`."""
        if not applied:
            return replace(self, skipped=self.skipped + 1, in_a_row=self.in_a_row + 1)
        if self.is_spike(loss, settings):
            return replace(self, in_a_row=0, spikes=self.spikes + 1)
        window = settings.window if settings else 0
        return replace(self, in_a_row=0, recent=(*self.recent, loss)[-window:] if window else ())

    def is_spike(self, loss: float, settings: SpikeSection | None) -> bool:
        """True if `loss` is too far above the losses of the window before it, if that is full."""
        if settings is None or len(self.recent) < settings.window:
            return False
        mean = math.fsum(self.recent) / len(self.recent)
        deviation = max(statistics.pstdev(self.recent, mean), _LEAST_DEVIATION * abs(mean))
        return loss > mean + settings.threshold * deviation
