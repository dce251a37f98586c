"""The autoregressive encoder-decoder in transformers, which lacks it: an exported directory holds modelling files.

Load it with `AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)`; `AutoTokenizer` needs the same
argument. The weights keep our names. They include those of the embedding loss, for further training; transformers
ignores these.
"""

from dataclasses import replace
from pathlib import Path

from pretrain.huggingface.conversion import Conversion, Exported, Json, State, shapes
from pretrain.models import AutoregressiveConfig

FILES = {
    "AutoConfig": ("configuration_autoregressive", "AutoregressiveConfig"),
    "AutoModelForCausalLM": ("modeling_autoregressive", "AutoregressiveForCausalLM"),
}
LOSS = "embedding_loss"
SETTINGS = (
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


def to_theirs(config: AutoregressiveConfig) -> Json:
    return {
        "architectures": [FILES["AutoModelForCausalLM"][1]],
        "auto_map": {auto: f"{module}.{name}" for auto, (module, name) in FILES.items()},
        **config.model_dump(include={LOSS}),
    }


def to_ours(settings: Json, tensors: State) -> Json:
    """If transformers has saved the model again, the embedding loss's weights are gone; the config then drops it."""
    whole = AutoregressiveConfig.model_validate({"vocab_size": 1, **{name: settings[name] for name in SETTINGS}})
    loss_weights = {name for name in shapes(whole) if name.startswith(f"{LOSS}.")}
    return {LOSS: None} if loss_weights and loss_weights.isdisjoint(tensors) else {}


def with_code(exported: Exported) -> Exported:
    folder = Path(__file__).with_name("remote_code")
    return replace(exported, files={f"{name}.py": (folder / f"{name}.py").read_bytes() for name, _ in FILES.values()})


EXPORTED = Conversion(
    "autoregressive_encoder_decoder",
    "AutoModelForCausalLM",
    AutoregressiveConfig,
    {},
    {name: name for name in SETTINGS},
    remote_code=True,
    copies={"embedding.weight": ["lm_head.weight"]},
    last_norm=lambda config: {"none": "final_norm", "with_norm": "subtracted_norm"}.get(config.subtract_positions),
    fixed={"tie_word_embeddings": True},
    to_theirs=to_theirs,
    to_ours=to_ours,
    complete=with_code,
)
CONVERSIONS = (EXPORTED,)
