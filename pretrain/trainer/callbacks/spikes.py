"""Reports spikes of the loss, and goes back to the checkpoint before one, past the rows that made it."""

from collections.abc import Mapping
from dataclasses import replace

from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.choose import newest_verified
from pretrain.config.run_config import SpikeSection
from pretrain.run.train_state import Rewind, add_rewind, rewinds
from pretrain.trainer.callback import Callback, Trainer
from pretrain.zero.ranks import on_rank_0


class Spikes(Callback):
    """`faults.spikes`."""

    def metrics(self, trainer: Trainer) -> Mapping[str, float]:
        return {"train/spikes": trainer.state.health.spikes}

    def after_step(self, trainer: Trainer) -> None:
        before, settings = trainer.before.health, trainer.config.faults.spikes
        if settings is None or trainer.state.health.spikes == before.spikes:
            return
        mean, loss = sum(before.recent) / len(before.recent), trainer.outcome.loss
        trainer.report.warn(f"step {trainer.step}: loss {loss:.4f} is a spike; the average before was {mean:.4f}")
        if settings.action != "warn":
            self._rewind(trainer, settings)

    def _rewind(self, trainer: Trainer, settings: SpikeSection) -> None:
        run, report = trainer.run, trainer.report
        trainer.finish_saving()
        checkpoint = newest_verified(run.directory, run.rank, run.ranks, trainer.engine.device)
        if checkpoint is None:
            report.warn("not rewound: there is no checkpoint yet")
            return
        if len(on_rank_0(lambda: rewinds(run.directory))) >= settings.max_rewinds:
            report.warn(f"not rewound: {settings.max_rewinds} rewinds are the limit (faults.spikes.max_rewinds)")
            return
        then, now = checkpoint_index.read(checkpoint).train_state, trainer.state
        trainer.drop_unsaved()
        # training goes on with the rows after the spike
        trainer.go_back(checkpoint, replace(then, position=now.position, skipped=now.skipped))
        if run.rank == 0:
            add_rewind(run.directory, Rewind(then.step, then.position, now.position, now.step, trainer.outcome.loss))
        rows = now.position - then.position
        report.warn(f"rewound to step {then.step}; skipping {rows} rows, up to row {now.position}")
