"""Whether training goes well: steps that were skipped, losses that jump."""

import math
import statistics
from dataclasses import dataclass, replace

from pretrain.config import SpikeSection

_LEAST_DEVIATION = 0.005  # of the mean: on a plateau the losses of large batches hardly differ


@dataclass(frozen=True)
class Health:
    """`skipped`: steps of the whole run without a finite gradient, `in_a_row`: since the last one that had one.

    `recent`: losses of the last steps, spikes left out; `spikes`: how many there were. A checkpoint keeps all of it.
    """

    skipped: int = 0
    in_a_row: int = 0
    spikes: int = 0
    recent: tuple[float, ...] = ()

    def after(self, loss: float, applied: bool, settings: SpikeSection | None) -> "Health":
        """This, one step on: its `loss`, and whether it was `applied`."""
        if not applied:
            return replace(self, skipped=self.skipped + 1, in_a_row=self.in_a_row + 1)
        if self.is_spike(loss, settings):
            return replace(self, in_a_row=0, spikes=self.spikes + 1)
        window = settings.window if settings else 0
        return replace(self, in_a_row=0, recent=(*self.recent, loss)[-window:] if window else ())

    def is_spike(self, loss: float, settings: SpikeSection | None) -> bool:
        """Whether `loss` is too far above those of a full window before it."""
        if settings is None or len(self.recent) < settings.window:
            return False
        mean = math.fsum(self.recent) / len(self.recent)
        deviation = max(statistics.pstdev(self.recent, mean), _LEAST_DEVIATION * abs(mean))
        return loss > mean + settings.threshold * deviation
