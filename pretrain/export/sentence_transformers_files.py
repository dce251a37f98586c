"""The files by which sentence-transformers embeds texts with an export: as the mean of its encoder's states."""

from pathlib import Path

from data_pipeline.base.atomic import write_json
from data_pipeline.base.errors import UserError
from pretrain.models import ModelConfig
from pretrain.models.state_dict_adapter import HFModel

PROGRAM = "sentence-transformers"
# The library loads the encoders of these alone. It would embed with BART's decoder, and can't load our modelling files.
_ENCODERS = ("t5", "umt5", "t5gemma", "t5gemma2", "bert", "roberta")
# Names and keys that all its versions read.
_MODULES = {"": "Transformer", "1_Pooling": "Pooling"}


def embeds(hf: HFModel) -> bool:
    """Whether sentence-transformers embeds with the encoder of this model."""
    return hf.model_type in _ENCODERS


def check(hf: HFModel) -> None:
    """Raises UserError if sentence-transformers doesn't embed with the encoder of this model."""
    if not embeds(hf):
        raise UserError(f"--for {PROGRAM}: it embeds with the encoder of T5, T5Gemma or BERT, not with {hf.name}")


def write(config: ModelConfig, directory: Path) -> None:
    """Writes modules.json and the settings of its modules into `directory`, which has an export of `config`."""
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (path, name) in enumerate(_MODULES.items())
    ]
    write_json(directory / "modules.json", modules)
    # null: as many tokens as the model has positions
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": None, "do_lower_case": False})
    (directory / "1_Pooling").mkdir()
    width = next(iter(config.stacks.values())).d_model
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    write_json(directory / "1_Pooling/config.json", pooling)
