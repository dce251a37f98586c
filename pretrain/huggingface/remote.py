"""Models that transformers lacks: an exported directory holds their modelling files, from `remote_code`.

Load them with `trust_remote_code=True`; `AutoTokenizer` needs the same argument. Weights and settings keep our names.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrain.huggingface.conversion import Conversion, Exported, Json
from pretrain.models import ModelConfig

_FOLDER = Path(__file__).with_name("remote_code")
# Settings of all families that the files don't have, or have under transformers' names.
_LEFT_OUT = ModelConfig.model_fields.keys() - {"dropout_rate"}


def conversion(
    code: str, model_type: str, config_class: type[ModelConfig], auto_class: str, class_name: str, **others: Any
) -> Conversion:
    """`code`: the end of the files' names. `class_name`: the model's class there, which transformers' `auto_class`
    loads. `others`: further fields of the conversion."""
    modules = [f"configuration_{code}", f"modeling_{code}", "layers"]
    auto_map = {"AutoConfig": f"{modules[0]}.{config_class.__name__}", auto_class: f"{modules[1]}.{class_name}"}
    settings = config_class.model_fields.keys() - _LEFT_OUT - config_class.initial_only

    def to_theirs(config: ModelConfig) -> Json:
        tied = getattr(config, "tie_embeddings", "all") != "none"
        return {
            "architectures": [class_name],
            "auto_map": auto_map,
            "tie_word_embeddings": tied,
            **config.model_dump(include=settings),
        }

    def with_code(exported: Exported) -> Exported:
        return replace(exported, files={f"{name}.py": (_FOLDER / f"{name}.py").read_bytes() for name in modules})

    return Conversion(
        model_type,
        auto_class,
        config_class,
        {},
        {name: name for name in config_class.model_fields if name in settings},
        remote_code=True,
        to_theirs=to_theirs,
        complete=with_code,
        **others,
    )
