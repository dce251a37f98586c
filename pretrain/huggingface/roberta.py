"""RoBERTa in transformers (Liu et al. 2019), which is imported as an encoder-only model; that is exported as BERT."""

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface import encoder_only
from pretrain.huggingface.interchange import Interchange, State
from pretrain.huggingface.json_files import Json
from pretrain.models import EncoderOnlyConfig

POSITIONS = "bert.embeddings.position_embeddings.weight"
HEAD = {
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
    "lm_head.decoder": "cls.predictions.decoder",
}


def from_hugging_face(saved: Json, tensors: State) -> tuple[EncoderOnlyConfig, State]:
    """Its first positions, up to the id of padding, belong to padding alone, which nothing attends to; they are left
    out. Raises UserError if the head has another activation than the layers: its own is always GELU."""
    if saved["hidden_act"] != "gelu":
        raise UserError(f"hidden_act is {saved['hidden_act']!r}, but the head of RoBERTa has gelu")
    unused = (saved["pad_token_id"] or 0) + 1
    renamed = {_as_in_bert(name): tensor for name, tensor in tensors.items()}
    if POSITIONS in renamed:
        renamed[POSITIONS] = renamed[POSITIONS][unused:].contiguous()
    for kind in ("weight", "bias"):  # of a model for other tasks, which nothing here uses
        renamed.pop(f"bert.pooler.dense.{kind}", None)
    settings = {**saved, "max_position_embeddings": saved["max_position_embeddings"] - unused}
    return encoder_only.from_hugging_face(settings, renamed)


def _as_in_bert(name: str) -> str:
    if name == "lm_head.bias":
        return "cls.predictions.bias"
    part, _, kind = name.rpartition(".")
    return f"{HEAD[part]}.{kind}" if part in HEAD else name.replace("roberta.", "bert.", 1)


INTERCHANGE = Interchange(
    "roberta",
    "RobertaForMaskedLM",
    encoder_only.to_hugging_face,
    from_hugging_face,
    encoder_only.BERT.names,
    fixed=encoder_only.FIXED,
    begins=True,
    ends=True,
)
