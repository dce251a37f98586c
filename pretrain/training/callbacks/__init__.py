"""The callbacks of a run, in the order of their priorities.

- 50 SkippedSteps, 40 Spikes: detect wrong steps, and may rewind the run.
- 30 Speed, 20 Profiling: measure steps.
- 0, unless they set `priority`: the callbacks of the run file, then the callbacks of a Python call.
- -10 Reporting: logs metrics.
- -30 EvaluationHooks: runs evaluations during training.
- -40 Checkpointing: saves the run.
- -50 Stops: ends the run on request.
"""

from collections.abc import Sequence
from importlib import import_module

from data_pipeline.base.errors import UserError
from pretrain.config import RunConfig
from pretrain.config.run_config import CallbackSection
from pretrain.training.callback import Callback
from pretrain.training.callbacks.bad_steps import SkippedSteps, Spikes
from pretrain.training.callbacks.checkpointing import Checkpointing
from pretrain.training.callbacks.profiling import Profiling
from pretrain.training.callbacks.reporting import EvaluationHooks, Reporting, Speed
from pretrain.training.callbacks.stops import Stops


def build_callbacks(
    config: RunConfig, stop_at_step: int | None = None, objects: Sequence[Callback] = ()
) -> dict[str, Callback]:
    """The callbacks of a run by name, in the order in which they are called, without those whose setting is off.

    `objects`: callbacks of the caller, besides the callbacks of the run file. Raises UserError for a callback of the
    run file that can't be made, and for an object that is no callback.
    """
    faults = config.faults

    def built_in(kind: type[Callback], is_on: bool = True) -> dict[str, Callback]:
        return {kind.__name__: kind()} if is_on else {}

    found = {
        **built_in(SkippedSteps),
        **built_in(Spikes, faults.spikes is not None),
        **built_in(Speed),
        **built_in(Profiling, config.trainer.profile),
        **built_in(Reporting),
        **built_in(EvaluationHooks, bool(config.evaluation)),
        **built_in(Checkpointing),
        "Stops": Stops(stop_at_step),
        **users_callbacks(config.callbacks, objects),
    }
    return dict(sorted(found.items(), key=lambda item: -item[1].priority))


def users_callbacks(settings: Sequence[CallbackSection], objects: Sequence[object] = ()) -> dict[str, Callback]:
    """The callbacks of a run file by name, in the file's order, then `objects`.

    Raises UserError if one can't be made or is no callback.
    """
    made: list[tuple[str, object]] = []
    for number, one in enumerate(settings):
        module, _, name = one.name.partition(":")
        try:
            made.append((one.name, getattr(import_module(module), name)(**(one.model_extra or {}))))
        except Exception as error:
            raise UserError(f"callbacks.{number}: {one.name} can't be made: {type(error).__name__}: {error}") from None
    made += [(f"{type(one).__module__}:{type(one).__qualname__}", one) for one in objects]
    found: dict[str, Callback] = {}
    for number, (name, callback) in enumerate(made):
        if not isinstance(callback, Callback):
            if isinstance(callback, type):
                raise UserError(f"callbacks.{number}: expected an object, got the class {callback.__qualname__}")
            raise UserError(f"callbacks.{number}: {name} is no subclass of pretrain.training.callback.Callback")
        found[name if name not in found else f"{name} {number}"] = callback
    return found
