"""The training loop. What happens besides its steps is in callbacks, each a class that can be left out."""

from collections.abc import Sequence
from importlib import import_module

from data_pipeline.foundation.errors import UserError
from pretrain.config import RunConfig
from pretrain.config.run_config import CallbackSection
from pretrain.run import watchdog
from pretrain.trainer import distillation
from pretrain.trainer.callback import Callback, Trainer
from pretrain.trainer.callbacks.alerting import Alerting
from pretrain.trainer.callbacks.bad_steps import SkippedSteps, Spikes
from pretrain.trainer.callbacks.checkpointing import Checkpointing, CheckpointsInMemory
from pretrain.trainer.callbacks.fingerprints import WeightComparison
from pretrain.trainer.callbacks.memory_at_rest import ComparingMemory
from pretrain.trainer.callbacks.replay import Replaying
from pretrain.trainer.callbacks.reporting import EvaluationHooks, Reporting
from pretrain.trainer.callbacks.speed import Profiling, Speed
from pretrain.trainer.callbacks.stops import Stops
from pretrain.trainer.callbacks.stragglers import Straggling
from pretrain.trainer.run_report import RunReport
from pretrain.trainer.validate import ValidatedRun
from pretrain.zero.construction import construct
from pretrain.zero.engine import Engine
from pretrain.zero.ranks import communication_device

# The order in which they are called: first those that may send the run back. The run file's come before those that
# report and save, which have their metrics and states.
FIRST = (Replaying, ComparingMemory, SkippedSteps, Spikes, Speed, Straggling)
LAST = (Reporting, CheckpointsInMemory, EvaluationHooks, WeightComparison, Checkpointing)


def train(run: ValidatedRun, report: RunReport, callbacks: dict[str, Callback]) -> int:
    """Trains from where the run stands; returns 0 if it has finished, 75 if it stops on request. All ranks call it."""
    model = construct(run.config, run.model, drawn=not (run.resume or run.initial_weights))
    if run.config.wrapper:
        distillation.wrap(model, run.config.wrapper, run.config.precision, communication_device())
    trainer = Trainer(run, report, Engine(model, run.config), callbacks)
    for callback in callbacks.values():
        callback.before_training(trainer)
    for micro_batches in trainer.steps():
        trainer.take_step(micro_batches)
        trainer.after_step()
    for callback in callbacks.values():
        callback.after_training(trainer)
    watchdog.alive()
    trainer.engine.close()
    return report.finish(trainer.state.step)


def build_callbacks(config: RunConfig, stop_at_step: int | None = None) -> dict[str, Callback]:
    """The callbacks of a run by name, in the order in which they are called. Raises UserError for one of the user's."""
    profiling = (Profiling,) if config.trainer.profile else ()
    callbacks: dict[str, Callback] = {callback.__name__: callback() for callback in (*FIRST, *profiling)}
    callbacks |= users_callbacks(config.callbacks)
    if alerts := config.tracking.alerts:
        callbacks["Alerting"] = Alerting(alerts, config.run.name)
    callbacks |= {callback.__name__: callback() for callback in LAST}
    return {**callbacks, "Stops": Stops(stop_at_step)}


def users_callbacks(settings: Sequence[CallbackSection]) -> dict[str, Callback]:
    """The callbacks of a run file, by name, in its order. Raises UserError if one can't be made."""
    found: dict[str, Callback] = {}
    for number, one in enumerate(settings):
        module, _, name = one.name.partition(":")
        try:
            made = getattr(import_module(module), name)(**(one.model_extra or {}))
        except Exception as error:
            raise UserError(f"callbacks.{number}: {one.name} can't be made: {type(error).__name__}: {error}") from None
        if not isinstance(made, Callback):
            raise UserError(f"callbacks.{number}: {one.name} is no subclass of pretrain.trainer.callback.Callback")
        found[one.name if one.name not in found else f"{one.name} {number}"] = made
    return found
