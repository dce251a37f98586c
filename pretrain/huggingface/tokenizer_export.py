"""Export of tokenizers for transformers' `AutoTokenizer`."""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from data_pipeline.foundation.atomic import write_json
from data_pipeline.foundation.errors import UserError
from data_pipeline.text.vocabulary import Vocabulary
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.byte_level_bpe import MERGES, VOCABULARY, ByteLevelBPE
from data_pipeline.tokenizer.sentencepiece import MODEL, SentencePiece
from data_pipeline.tokenizer.text_model import TextModel
from data_pipeline.tokenizer.tokenizer_json import TokenizerJson
from data_pipeline.tokenizer.wordpiece import LISTING, WordPiece
from pretrain.models.state_dict_adapter import HFModel, Json

TOKENIZER, CONFIG, ADDED = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
ROLES = ("bos", "eos", "unk", "pad", "mask")
_FIRST_SENTINEL = "<extra_id_0>"
# T5Tokenizer has no byte fallback, so it is added. Byte tokens never match text: "<0x41>" isn't taken for one.
NO_BYTES = {
    "type": "Split",
    "pattern": {"Regex": "<(?=0x[0-9A-F]{2}>)"},
    "behavior": "MergedWithPrevious",
    "invert": False,
}


def write(tokenizer: Tokenizer, hf: HFModel, objective: str | None, directory: Path) -> None:
    """Writes the tokenizer's files into `directory`, for a model of the family of `hf` that learnt `objective`.

    A text gets the same ids as here, within the family's begin and EOS tokens; if the family has none, a tokenizer.json
    keeps its own. A special token or sentinel spelled out in a text becomes that token, as sentinels do in
    `Tokenizer.encode_with_sentinels`. The mask token, which programs put in place of a word, is the first sentinel for
    a model that fills in spans.
    """
    model, vocabulary, sentinels = tokenizer.model, tokenizer.vocabulary, _sentinels(tokenizer)
    as_t5s = isinstance(model, SentencePiece) and hf.model_type == "t5" and not model.byte_ids
    if as_t5s and not tokenizer.special_tokens:
        from transformers import T5Tokenizer  # takes seconds to import

        # transformers prefers tokenizer.json and needs tokenizer_config.json; other programs read spiece.model
        (directory / MODEL).write_bytes(model.files[MODEL])
        mask = {"mask_token": _FIRST_SENTINEL} if tokenizer.sentinels else {}
        T5Tokenizer.from_pretrained(directory, extra_ids=tokenizer.sentinels, **mask).save_pretrained(directory)
        _write_added(tokenizer, directory)
        return
    backend, config = _in_transformers(model, directory)
    # tokens that replace words of a text absorb the white space before them, as those words did
    fills = {*sentinels, "<mask>"}
    backend.add_special_tokens(
        [
            AddedToken(name, special=True, normalized=False, lstrip=name in fills)
            for name in (*_to_add(model), *tokenizer.special_tokens, *sentinels)
        ]
    )
    if not isinstance(model, TokenizerJson) or hf.begins or hf.ends:
        roles = {
            f"{role}_token": token
            for role in ROLES
            if (id_ := getattr(vocabulary, role)) is not None and (token := backend.id_to_token(id_))
        }
        if _fills_spans(tokenizer, hf, objective):
            roles["mask_token"] = _FIRST_SENTINEL
        backend.post_processor = _template(vocabulary, roles, hf)
        flags = {"add_bos_token": hf.begins, "add_eos_token": hf.ends}  # transformers 4 reads them
        config = {**config, **roles, **{key: value for key, value in flags.items() if key in config}}
    if isinstance(model, WordPiece):
        config |= {"cls_token": config["bos_token"], "sep_token": config["eos_token"]}  # their names in BERT
    if hf.model_type == "t5gemma2":  # else AutoProcessor looks for the image processor, which isn't exported
        config |= {"processor_class": "PreTrainedTokenizerFast"}
    backend.save(str(directory / TOKENIZER))
    write_json(directory / CONFIG, config)
    if isinstance(model, SentencePiece) and hf.model_type == "t5":
        _write_added(tokenizer, directory)


def _in_transformers(model: TextModel, directory: Path) -> tuple[tokenizers.Tokenizer, Json]:
    """A tokenizer of the library with this model, and its tokenizer_config.json; writes the model's own files."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    match model:
        case TokenizerJson():
            return tokenizers.Tokenizer.from_str(model.files[TOKENIZER].decode()), model.config
        case SentencePiece():
            from transformers import T5Tokenizer  # takes seconds to import

            (directory / MODEL).write_bytes(model.files[MODEL])
            backend = T5Tokenizer.from_pretrained(directory, extra_ids=0).backend_tokenizer
            return _with_bytes(backend) if model.byte_ids else backend, config
        case ByteLevelBPE():
            for name, content in model.files.items():
                (directory / name).write_bytes(content)
            backend = tokenizers.Tokenizer(models.BPE.from_file(str(directory / VOCABULARY), str(directory / MERGES)))
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()
            return backend, config
        case WordPiece():
            (directory / LISTING).write_bytes(model.files[LISTING])
            return model.backend(), config
    raise UserError(f"a tokenizer of kind {model.kind} can't be exported")


def _fills_spans(tokenizer: Tokenizer, hf: HFModel, objective: str | None) -> bool:
    """True if a sentinel is the model's blank. If `objective` isn't known, it is where the tokenizer has no mask.

    Of sentencepiece models alone: elsewhere transformers' mask token would no longer absorb the space before it.
    """
    learnt = objective in ("span_corruption", "iid_denoising", "ul2")
    likely = objective is None and tokenizer.vocabulary.mask is None and hf.encoder_decoder
    return isinstance(tokenizer.model, SentencePiece) and tokenizer.sentinels > 0 and (learnt or likely)


def _to_add(model: TextModel) -> list[str]:
    """The model's special tokens, unless its tokenizer.json has them."""
    return [] if isinstance(model, TokenizerJson) else [name for _, name in sorted(model.names.items())]


def _write_added(tokenizer: Tokenizer, directory: Path) -> None:
    """For programs that read spiece.model and this file instead of tokenizer.json."""
    names = [*tokenizer.special_tokens, *_sentinels(tokenizer)]
    write_json(directory / ADDED, {name: id_ for id_, name in enumerate(names, start=tokenizer.vocab_size)})


def _sentinels(tokenizer: Tokenizer) -> list[str]:
    return [f"<extra_id_{number}>" for number in reversed(range(tokenizer.sentinels))]


def _template(vocabulary: Vocabulary, roles: dict[str, str], hf: HFModel) -> processors.TemplateProcessing:
    """BOS and EOS around one text and around two: bos A eos, bos A eos B eos."""
    begin = [roles["bos_token"]] if hf.begins and "bos_token" in roles else []
    end = [roles["eos_token"]] if hf.ends else []
    ids = {roles[f"{role}_token"]: getattr(vocabulary, role) for role in ("bos", "eos") if f"{role}_token" in roles}
    return processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, "$B:1", *(f"{token}:1" for token in end)],
        special_tokens=list(ids.items()),
    )


def _with_bytes(t5: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """T5Tokenizer's tokenizer, with the bytes of characters that have no piece: as sentencepiece has them."""
    saved: Json = json.loads(t5.to_str())
    saved["model"]["byte_fallback"] = True
    saved["pre_tokenizer"]["pretokenizers"].append(NO_BYTES)
    saved["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, saved["decoder"]]}
    return tokenizers.Tokenizer.from_str(json.dumps(saved))
