"""The autoregressive encoder-decoder in transformers, which lacks it: an exported directory holds modelling files.

Load it with `AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)`; `AutoTokenizer` needs the same
argument. The weights keep our names. They include those of the embedding loss, for further training; transformers
ignores these.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from pretrain.huggingface.interchange import Exported, Interchange, State, drop_copies, renamed, shapes
from pretrain.huggingface.json_files import Json
from pretrain.models import AutoregressiveConfig

MODEL_TYPE, CLASS_NAME = "autoregressive_encoder_decoder", "AutoregressiveForCausalLM"
FILES = ("configuration_autoregressive.py", "modeling_autoregressive.py")
LOSS = "embedding_loss"
SHAPE = (
    "d_model",
    "d_ff",
    "num_heads",
    "num_cross_heads",
    "num_encoder_layers",
    "num_decoder_layers",
    "positions",
    "max_positions",
    "bias",
    "cross_attention_bias",
    "order",
    "bridge_norm",
    "subtract_positions",
    "add_positions",
    "dropout_rate",
    LOSS,
)


def to_hugging_face(state_dict: Mapping[str, Tensor], config: AutoregressiveConfig) -> Exported:
    tensors = {name: tensor for name, tensor in state_dict.items() if name != "lm_head.weight"}  # stored once
    ids = {"pad_token_id": config.pad_id, "eos_token_id": config.eos_id}
    saved = {
        "architectures": [CLASS_NAME],
        "model_type": MODEL_TYPE,
        "auto_map": {
            "AutoConfig": f"{FILES[0].removesuffix('.py')}.AutoregressiveConfig",
            "AutoModelForCausalLM": f"{FILES[1].removesuffix('.py')}.{CLASS_NAME}",
        },
        "vocab_size": config.padded_vocab_size,
        **config.model_dump(include=set(SHAPE)),
        "tie_word_embeddings": True,
        **ids,
    }
    here = Path(__file__).with_name("remote_code")
    return Exported(tensors, saved, ids, {name: (here / name).read_bytes() for name in FILES})


def from_hugging_face(saved: Json, tensors: State) -> tuple[AutoregressiveConfig, State]:
    """If transformers has saved the model again, the embedding loss's weights are gone; the config then drops it."""
    config = AutoregressiveConfig(
        vocab_size=saved["vocab_size"],
        pad_id=saved["pad_token_id"],
        eos_id=saved["eos_token_id"],
        **{key: saved[key] for key in SHAPE},
    )
    its_own = {name for name in shapes(config) if name.startswith(f"{LOSS}.")}
    if its_own and not its_own & tensors.keys():
        config = config.model_copy(update={LOSS: None})
    drop_copies(tensors, "embedding.weight", ["lm_head.weight"])
    if "embedding.weight" in tensors:
        tensors["lm_head.weight"] = tensors["embedding.weight"]
    return config, renamed(tensors, config, str)


EXPORTED = Interchange(
    MODEL_TYPE,
    "AutoModelForCausalLM",
    to_hugging_face,
    from_hugging_face,
    {key: key for key in SHAPE},
    fixed={"tie_word_embeddings": True},
    remote_code=True,
    last_norm=lambda config: {"none": "final_norm", "with_norm": "subtracted_norm"}.get(config.subtract_positions),
)
INTERCHANGES = (EXPORTED,)
