"""Callbacks that the run file names, from any package."""

from collections.abc import Sequence
from importlib import import_module

from data_pipeline.foundation.errors import UserError
from pretrain.config.run_config import CallbackSection
from pretrain.trainer.callback import Callback


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
