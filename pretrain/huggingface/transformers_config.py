"""A directory as transformers reads it: all settings of its config.json, and today's names of its tensors."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface.conversion import Json


def config_of(saved: Json, path: Path) -> Any:
    """transformers' config object, with its defaults and the settings that it derives from others.

    Raises UserError, which names `path`, if transformers rejects the content `saved` of config.json.
    """
    from transformers import CONFIG_MAPPING  # takes seconds to import

    try:
        with _quiet():
            return CONFIG_MAPPING[saved["model_type"]].from_dict(saved)
    except Exception as error:  # wrong types and values, by exceptions of several libraries
        raise _rejected(path, error) from None


def loaded_names(names: Iterable[str], class_name: str, config: Any, path: Path) -> dict[str, str]:
    """The name under which transformers loads each tensor of a file into the class `class_name`.

    transformers renames what it and its older versions save, such as the text encoder of T5Gemma 2, the norms of BERT's
    published files, and what a model without a head lacks before each name. Raises UserError, which names `path`, if
    transformers can't build the model, or if two tensors have one name.
    """
    import transformers  # takes seconds
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    try:
        with torch.device("meta"), _quiet():
            model = getattr(transformers, class_name)(config)
    except Exception as error:  # as above
        raise _rejected(path, error) from None
    renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    state = model.state_dict()
    found: dict[str, str] = {}
    for name in names:
        loaded, _ = rename_source_key(name, renamings, [], model.base_model_prefix, state)
        if loaded in found:
            raise UserError(f"{path.parent}: {found[loaded]} and {name} are one tensor in transformers, {loaded}")
        found[loaded] = name
    return {name: loaded for loaded, name in found.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warnings: our own checks refuse what they are about."""
    from transformers.utils import logging  # takes seconds

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _rejected(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: transformers rejects it: {' '.join(str(error).split()) or type(error).__name__}")
