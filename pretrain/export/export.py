"""Export: writes a directory for transformers' `from_pretrained`, completely or not at all."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from data_pipeline.base.atomic import new_directory, write_json
from data_pipeline.base.errors import UserError, os_errors
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.ids import Ids
from pretrain.export import card, sentence_transformers_files, tokenizer_files
from pretrain.export.card import Lineage
from pretrain.export.load import CONFIG, GENERATION
from pretrain.export.weights import check, shapes
from pretrain.models import FAMILIES, ModelConfig, meta_model
from pretrain.models.state_dict_adapter import (
    TOKEN_IDS,
    Exported,
    HFModel,
    hf_models,
    lacks,
    tensor_names,
    tied,
    to_theirs,
)

README = "README.md"
MODELLING_FILES = Path(__file__).with_name("remote_code")


def hf_model_of(config: ModelConfig) -> HFModel:
    """The model of transformers to which a model with this config is exported. Raises UserError if there is none."""
    nearest = min(hf_models(config.family), key=lambda one: len(lacks(one.can_be, config)), default=None)
    if nearest is None:
        raise UserError(f"transformers has no model of the family {config.family}")
    if lacking := lacks(nearest.can_be, config):
        raise UserError(f"transformers has no {nearest.name} with {', '.join(lacking)}")
    return nearest


def export(
    state_dict: Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer: Tokenizer,
    out: Path,
    shard_bytes: int = 5_000_000_000,
    lineage: Lineage | None = None,
    embeds: bool = False,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Writes a directory for `from_pretrained(out)`; returns a sentence that says how to load it.

    Args:
        state_dict: unsharded fp32 tensors under the names of the model's `state_dict()`.
        out: must be new or empty; appears only once it is complete.
        shard_bytes: larger weights are split into several files.
        lineage: where the model comes from, for the model card and the tokenizer's mask token.
        embeds: also write the files by which sentence-transformers embeds texts with the encoder.
        dtype: the floating-point type of the weights that are written.

    Raises UserError if weights, config and tokenizer don't fit together.
    """
    hf = hf_model_of(config)
    if embeds:
        sentence_transformers_files.check(hf)
    exported = _exported(hf, state_dict, config, tokenizer)
    lineage = lineage or Lineage()
    with new_directory(out) as partial, os_errors():
        (partial / README).write_text(card.page(lineage, config, hf, tokenizer), encoding="utf-8")
        tokenizer_files.write(tokenizer, hf, lineage.objective, partial)
        if embeds:
            sentence_transformers_files.write(config, partial)
        write_json(partial / CONFIG, {**exported.config, "dtype": str(dtype).removeprefix("torch.")})
        if exported.generation_config is not None:
            write_json(partial / GENERATION, exported.generation_config)
        for file in hf.code:
            (partial / Path(file).name).write_bytes((MODELLING_FILES / file).read_bytes())
        tensors = {key: one.to(dtype) for key, one in exported.tensors.items()}
        # save_torch_state_dict refuses a view of a larger tensor, such as a matrix cut to its vocabulary
        whole = {
            key: one if one.untyped_storage().nbytes() == one.nbytes else one.clone() for key, one in tensors.items()
        }
        save_torch_state_dict(whole, partial, max_shard_size=shard_bytes)  # model.safetensors, or an index and shards
    if isinstance(tokenizer.model, Ids):
        permission = " and trust_remote_code=True" if hf.code else ""
        return f"load it with {hf.class_name}{permission}; it has no tokenizer, and {README} shows a call with ids"
    permission = ", both with trust_remote_code=True" if hf.code else ""
    other = ", or with SentenceTransformer" if embeds else ""
    return f"load it with {hf.class_name} and AutoTokenizer{permission}{other}"


def _exported(hf: HFModel, state: Mapping[str, Tensor], config: ModelConfig, tokenizer: Tokenizer) -> Exported:
    """The model in transformers' form, without muP."""
    check(shapes(config), state, "the weights don't fit the model")
    if tokenizer.size != config.vocab_size:
        special = f"{len(tokenizer.special_tokens)} special tokens and {tokenizer.sentinels} sentinels"
        ids = f"the tokenizer's {tokenizer.vocab_size} tokens, {special} make {tokenizer.size} ids"
        raise UserError(f"{ids}, but the model's vocab_size is {config.vocab_size}")
    state, config = without_mup(hf, state, config)
    model = to_hf(hf, config, state)
    bos = {"bos_token_id": tokenizer.vocabulary.bos}
    generation = model.generation_config
    if generation is not None:
        padding = list(range(tokenizer.size, config.padded_vocab_size))
        generation = {**generation, **bos, **({"suppress_tokens": padding} if padding else {})}
    return replace(model, config={**model.config, **bos}, generation_config=generation)


def to_hf(hf: HFModel, config: ModelConfig, state: Mapping[str, Tensor]) -> Exported:
    """The model in transformers' form. `state`: unsharded tensors under our names.

    Raises UserError for settings that transformers' model lacks, and for tensors that it would ignore.
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
    names = tensor_names(hf, theirs, tied(meta_model(config)))
    start = {"decoder_start_token_id": config.decoder_start_id} if hf.encoder_decoder else {}
    generation = None if FAMILIES[config.family].generates is None else {**ids, **start}
    tensors = {names[name]: tensor for name, tensor in theirs.items()}
    like = next(iter(state.values()))
    tensors |= {name: like.new_zeros(shape) for name, shape in hf.unused(saved).items()}
    return Exported(tensors, saved, generation)


def without_mup(
    hf: HFModel, state: Mapping[str, Tensor], config: ModelConfig
) -> tuple[Mapping[str, Tensor], ModelConfig]:
    """Weights and config of the model without muP that computes the same: transformers has no muP.

    The last norm takes the multiplier of the logits, since the output matrix may be tied to the embedding. Embeddings
    that the model without muP would scale by √m too much are divided by √m. Logits are the same to the bit if the
    multipliers are powers of two, and else differ by rounding. Raises UserError if no norm can take the multiplier.
    """
    if config.mup is None:
        return state, config
    norm = hf.last_norm(config)
    if norm is None:
        raise UserError("mup: no norm directly before the output matrix could take the multiplier of the logits")
    weights, root = dict(state), config.widening**0.5
    factor = config.logits_multiplier
    if getattr(config, "scale_embedding", False):
        embeddings = [weights[name] for name in ("embedding.weight", "decoder_embedding.weight") if name in weights]
        scaled = {tensor.data_ptr() for tensor in embeddings}
        if weights["lm_head.weight"].data_ptr() in scaled:
            factor *= root
        weights = {name: tensor / root if tensor.data_ptr() in scaled else tensor for name, tensor in weights.items()}
    around_one = getattr(config, "norm", None) == "rms_around_one"  # gains are 1 + weight
    for name in {f"{norm}.weight", f"{norm}.bias"} & weights.keys():
        if around_one and name.endswith("weight"):
            weights[name] = (weights[name] + 1) * factor - 1
        else:
            weights[name] = weights[name] * factor
    return weights, config.model_copy(update={"mup": None})
