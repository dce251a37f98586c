"""Settings and tensors of a model under transformers' names, and back, as the family's `HFModel` says."""

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import printable
from pretrain.models import FAMILIES, ModelConfig, outline
from pretrain.models.state_dict_adapter import (
    OUTPUT,
    TOKEN_IDS,
    Exported,
    HFModel,
    Json,
    State,
    drop_copies,
    few,
    refuse_tensors,
    tied,
    to_ours,
    to_theirs,
)

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def to_hf(hf: HFModel, config: ModelConfig, state: Mapping[str, Tensor]) -> Exported:
    """The model in transformers' form; `state` holds whole tensors under our names.

    Raises UserError for what transformers' model doesn't have, and for tensors that it would ignore.
    """
    ids = to_theirs(config, TOKEN_IDS)
    saved = {
        "architectures": [hf.class_name],
        "model_type": hf.model_type,
        "vocab_size": config.padded_vocab_size,
        **to_theirs(config, hf.settings),
        **hf.fixed,
        **ids,
        **hf.config_to_hf(config),
    }
    theirs = hf.tensors_to_hf(config, state)
    names = _names(hf, theirs, tied(outline(config)))
    start = {"decoder_start_token_id": config.decoder_start_id} if hf.encoder_decoder else {}
    generation = None if FAMILIES[config.family].generates is None else {**ids, **start}
    tensors = {names[name]: tensor for name, tensor in theirs.items()}
    like = next(iter(state.values()))
    tensors |= {name: like.new_zeros(shape) for name, shape in hf.unused(saved).items()}
    return Exported(tensors, saved, generation)


def from_hf(hf: HFModel, settings: Json, tensors: State) -> tuple[ModelConfig, State]:
    """Our config and tensors, from config.json with transformers' defaults and the tensors of a file.

    Raises UserError for what our model doesn't support, and for tensors that are missing, unexpected or copies that
    differ.
    """
    tensors = dict(tensors)
    drop_copies(tensors, hf.copies)
    ours = {**to_ours(settings, hf.settings), **hf.config_from_hf(settings, tensors)}
    config = hf.config_class.model_validate(ours)
    model = outline(config)
    expected, matrix = hf.tensors_to_hf(config, model.state_dict()), tied(model)
    names = _names(hf, expected, matrix)
    if matrix:
        drop_copies(tensors, {names[matrix]: [(hf.names or {}).get(OUTPUT, OUTPUT)]})
    check({names[name]: tuple(tensor.shape) for name, tensor in expected.items()}, tensors)
    return config, hf.tensors_from_hf(config, {name: tensors[names[name]] for name in expected})


def _names(hf: HFModel, state: Iterable[str], tied: str | None) -> dict[str, str]:
    """Transformers' name of each tensor. The output matrix is stored once, as the matrix `tied` to it."""
    found: dict[str, str | None] = {}
    for name in state:
        ours = tied if tied and name == OUTPUT else name
        number = _NUMBER.search(ours)
        theirs = ours if hf.names is None else hf.names.get(_NUMBER.sub("{}", ours, count=1))
        found[name] = theirs and theirs.format(number and number[0])
    refuse_tensors([name for name, theirs in found.items() if theirs is None])
    return {name: theirs for name, theirs in found.items() if theirs}


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of the model's `state_dict()`; tied ones appear under each of their names."""
    return {name: tuple(tensor.shape) for name, tensor in outline(config).state_dict().items()}


def check(
    expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], what: str = "the weights don't fit"
) -> None:
    """Raises UserError that names tensors that are missing, unexpected, of the wrong shape or not floating-point."""
    both = sorted(expected.keys() & tensors.keys())
    problems = [
        *(f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())),
        *(f"{printable(name)} is not of the model" for name in sorted(tensors.keys() - expected.keys())),
        *(
            f"{name} should be {expected[name]}, is {tuple(tensors[name].shape)}"
            for name in both
            if tuple(tensors[name].shape) != expected[name]
        ),
        *(
            f"{name} is of {str(tensors[name].dtype).removeprefix('torch.')}, not of floating-point numbers"
            for name in both
            if not tensors[name].is_floating_point()
        ),
    ]
    if problems:
        raise UserError(f"{what}: {few(problems, '; ')}")
