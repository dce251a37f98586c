"""Sorts parameters into groups that share settings.

The kind of a parameter follows from its module, not from its dimensions: ZeRO-3's sharded parameters have none.
"""

from fnmatch import fnmatchcase
from typing import Any, get_args

from torch import nn
from torch.nn import Parameter

from data_pipeline.base.errors import UserError
from pretrain.config.model_config import ModelConfig
from pretrain.config.optimizers.optimizer import NO_DECAY_OF_VECTORS, Freeze, Kind, OptimizerConfig
from pretrain.models.layers import RMSNorm
from pretrain.models.model import Head

_NORMS = (RMSNorm, nn.LayerNorm)


def kinds(model: nn.Module) -> dict[str, Kind]:
    """The kind of each parameter, by name. A tied matrix is an embedding."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kind_by_id = {
        id(parameter): _kind(path, module, own)
        for path, module in reversed(list(model.named_modules()))  # if two share a parameter, the first decides
        for own, parameter in module.named_parameters(recurse=False)
    }
    return {name: kind_by_id[parameter] for parameter, name in names.items()}


def _kind(path: str, module: nn.Module, own: str) -> Kind:
    if kind := getattr(module, "parameter_kinds", {}).get(own):
        return kind
    if isinstance(module, _NORMS):
        return "norms"
    if isinstance(module, nn.Embedding):
        return "embeddings"
    if isinstance(module, nn.Linear):
        if own == "bias":
            return "biases"
        return "output" if isinstance(module, Head) else "matrices"
    raise TypeError(
        f"{path}.{own}: parameters of {type(module).__name__} have no kind yet; name it in its parameter_kinds"
    )


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The optimizer's groups. Each has named `params`, `lr`, `base_rate` (the peak learning rate), `weight_decay`, the
    `algorithm` of the update, and `frozen_until`, the first step that trains the parameters.

    Parameters with equal settings share a group, since each group costs collectives. A group with the settings of
    `config` itself comes first. With muP, the learning rates of `config` apply to the base width. Raises UserError with
    all problems of `config.groups` and `config.freeze`, one line each.
    """
    if found := problems(model, config):
        raise UserError("\n".join(found))
    parameters = dict(model.named_parameters())
    model_config = getattr(model, "config", None)
    widening = model_config.widening if isinstance(model_config, ModelConfig) else 1.0
    merged: dict[tuple[str, float, float, int], list[tuple[str, Parameter]]] = {}
    for name, kind in kinds(model).items():
        rules = (rule for rule in config.groups if any(_matches(pattern, name, kind) for pattern in rule.match))
        rule = next(rules, None)
        rate = rule.learning_rate if rule and rule.learning_rate is not None else config.rate(kind)
        rate *= widening ** -config.width_exponent(kind)
        decay = rule.weight_decay if rule and rule.weight_decay is not None else config.weight_decay
        settings = config.algorithm(kind), rate, decay, _frozen_until(config.freeze, name, kind)
        merged.setdefault(settings, []).append((name, parameters[name]))
    own = (config.name, config.learning_rate, config.weight_decay)
    return [
        {
            "params": merged[settings],
            "lr": rate,
            "base_rate": rate,
            "weight_decay": decay,
            "algorithm": algorithm,
            "frozen_until": frozen_until,
        }
        for settings in sorted(merged, key=lambda settings: settings[:3] != own)
        for algorithm, rate, decay, frozen_until in [settings]
    ]


def problems(model: nn.Module, config: OptimizerConfig) -> list[str]:
    """A line for each pattern of `config.groups` and `config.freeze` that matches no parameter, and a line if all
    parameters are frozen. `model` may be on the meta device.

    Patterns of the default groups may match nothing: T5 has no biases.
    """
    found = _problems_of_freeze(model, config.freeze)
    if config.groups == [NO_DECAY_OF_VECTORS]:
        return found
    left = kinds(model)
    for number, rule in enumerate(config.groups):
        taken: set[str] = set()
        for index, pattern in enumerate(rule.match):
            matched = {name for name, kind in left.items() if _matches(pattern, name, kind)}
            if not matched:
                message = f"{pattern!r} matches no remaining parameter; kinds are {', '.join(get_args(Kind))}"
                found.append(f"optimizer.groups.{number}.match.{index}: {message}")
            taken |= matched
        left = {name: kind for name, kind in left.items() if name not in taken}
    return found


def _problems_of_freeze(model: nn.Module, freeze: Freeze | None) -> list[str]:
    if freeze is None:
        return []
    known = kinds(model)
    found = [
        f"optimizer.freeze.{key}.{index}: {pattern!r} matches no parameter; kinds are {', '.join(get_args(Kind))}"
        for key, patterns in (("match", freeze.match), ("but", freeze.but))
        for index, pattern in enumerate(patterns)
        if not any(_matches(pattern, name, kind) for name, kind in known.items())
    ]
    if not found and all(_frozen_until(freeze, name, kind) for name, kind in known.items()):
        found.append("optimizer.freeze: all parameters are frozen; list some that train under `but`")
    return found


def _frozen_until(freeze: Freeze | None, name: str, kind: Kind) -> int:
    """The first step in which a parameter trains."""
    if freeze is None or not any(_matches(pattern, name, kind) for pattern in freeze.match):
        return 0
    return 0 if any(_matches(pattern, name, kind) for pattern in freeze.but) else freeze.until_step


def _matches(pattern: str, name: str, kind: Kind) -> bool:
    return pattern == kind or fnmatchcase(name, pattern)
