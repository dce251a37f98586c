"""Export of tokenizers for transformers' `AutoTokenizer`, and import."""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.text.vocabulary import Vocabulary
from data_pipeline.tokenizer import Tokenizer, auto_tokenizer
from data_pipeline.tokenizer.byte_level_bpe import MERGES, VOCABULARY, ByteLevelBPE
from data_pipeline.tokenizer.sentencepiece import LISTING as PIECES
from data_pipeline.tokenizer.sentencepiece import MODEL, SentencePiece
from data_pipeline.tokenizer.text_model import TextModel
from data_pipeline.tokenizer.tokenizer_json import TokenizerJson
from data_pipeline.tokenizer.wordpiece import LISTING, WordPiece
from pretrain.huggingface import fast_tokenizers, json_files
from pretrain.huggingface.interchange import Interchange
from pretrain.huggingface.json_files import Json

TOKENIZER, CONFIG, ADDED = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
ROLES = ("bos", "eos", "unk", "pad", "mask")


def write(tokenizer: Tokenizer, interchange: Interchange, directory: Path) -> None:
    """Writes the tokenizer's files into `directory`, for a model of the family of `interchange`.

    A text gets the same ids as here, within the family's begin and EOS tokens; if the family has none, a tokenizer.json
    keeps its own. A special token or sentinel spelled out in a text becomes that token, as sentinels do in
    `Tokenizer.encode_with_sentinels`.
    """
    model, vocabulary, sentinels = tokenizer.model, tokenizer.vocabulary, _sentinels(tokenizer)
    as_t5s = isinstance(model, SentencePiece) and interchange.model_type == "t5" and not model.byte_ids
    if as_t5s and not tokenizer.special_tokens:
        from transformers import T5Tokenizer  # takes seconds to import

        # Beside spiece.model, tokenizer.json and tokenizer_config.json: transformers prefers and needs these.
        (directory / MODEL).write_bytes(model.files[MODEL])
        T5Tokenizer.from_pretrained(directory, extra_ids=tokenizer.sentinels).save_pretrained(directory)
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
    if not isinstance(model, TokenizerJson) or interchange.begins or interchange.ends:
        roles = {
            f"{role}_token": token
            for role in ROLES
            if (id_ := getattr(vocabulary, role)) is not None and (token := backend.id_to_token(id_))
        }
        backend.post_processor = _marks(vocabulary, roles, interchange)
        marks = {"add_bos_token": interchange.begins, "add_eos_token": interchange.ends}  # transformers 4 heeds them
        config = {**config, **roles, **{key: value for key, value in marks.items() if key in config}}
    if isinstance(model, WordPiece):
        config |= {"cls_token": config["bos_token"], "sep_token": config["eos_token"]}  # their names in BERT
    backend.save(str(directory / TOKENIZER))
    json_files.write(directory / CONFIG, config)
    if isinstance(model, SentencePiece) and interchange.model_type == "t5":
        _write_added(tokenizer, directory)


def _in_transformers(model: TextModel, directory: Path) -> tuple[tokenizers.Tokenizer, Json]:
    """A tokenizer of the library with this model, and its tokenizer_config.json; writes the model's own files."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    match model:
        case TokenizerJson():
            return tokenizers.Tokenizer.from_str(model.files[TOKENIZER].decode()), model.config
        case SentencePiece():
            from transformers import T5Tokenizer

            (directory / MODEL).write_bytes(model.files[MODEL])
            backend = T5Tokenizer.from_pretrained(directory, extra_ids=0).backend_tokenizer
            return fast_tokenizers.with_bytes(backend) if model.byte_ids else backend, config
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


def _to_add(model: TextModel) -> list[str]:
    """The model's special tokens, unless its tokenizer.json has them."""
    return [] if isinstance(model, TokenizerJson) else [name for _, name in sorted(model.names.items())]


def _write_added(tokenizer: Tokenizer, directory: Path) -> None:
    """For llama.cpp's converter, which reads spiece.model and this file instead of tokenizer.json."""
    names = [*tokenizer.special_tokens, *_sentinels(tokenizer)]
    json_files.write(directory / ADDED, {name: id_ for id_, name in enumerate(names, start=tokenizer.pieces)})


def _sentinels(tokenizer: Tokenizer) -> list[str]:
    return [f"<extra_id_{number}>" for number in reversed(range(tokenizer.sentinels))]


def read(directory: Path) -> Tokenizer:
    """Reads the tokenizer in `directory`: sentencepiece like T5's, WordPiece like BERT's, or any BPE.

    As in transformers, tokenizer.json takes precedence; a spiece.model with the same pieces is used unchanged. Raises
    UserError for any other tokenizer, and unless the ids above the model's own are special tokens followed by
    sentinels; FailedError if a file is damaged.
    """
    saved = fast_tokenizers.read(directory / TOKENIZER)
    config = json_files.read_if_there(directory / CONFIG)
    if saved.get("model", {}).get("type") == "BPE" and not (
        fast_tokenizers.is_gpt2s(saved) and not config.get("add_prefix_space")
    ):
        return _published(directory)
    added = json_files.read_if_there(directory / ADDED)
    if config.get("add_prefix_space"):
        raise UserError(f"{directory / CONFIG}: add_prefix_space is true: our tokenizers put no space before a text")
    model = _model(saved, directory)
    try:
        if isinstance(model, SentencePiece) and not saved:  # a T5Tokenizer without a list of its sentinels
            sentinels = config.get("extra_ids", 100)
            names = {model.size + sentinels - 1 - number: f"<extra_id_{number}>" for number in range(sentinels)}
        else:
            names = {token["id"]: token["content"] for token in saved.get("added_tokens", [])}
        names |= {int(id_): token["content"] for id_, token in config.get("added_tokens_decoder", {}).items()}
        names |= {id_: token for token, id_ in added.items()}
        above = sorted(id_ for id_ in names if id_ >= model.size)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FailedError(f"{directory}: damaged: {CONFIG} or {ADDED}: {error!r}") from None
    if above != list(range(model.size, model.size + len(above))):
        raise UserError(f"{directory}: the tokenizer's ids from {model.size} on have gaps")
    return _with_names(model, [names[id_] for id_ in above], directory)


def _model(saved: Json, directory: Path) -> TextModel:
    path, kind = directory / TOKENIZER, saved.get("model", {}).get("type")
    if kind == "Unigram":
        if not (directory / MODEL).exists():
            return fast_tokenizers.sentencepiece(saved, path)
        model = SentencePiece.read(directory / MODEL)
        pieces = [line.split("\t")[0] for line in model.files[PIECES].decode().split("\n")[:-1]]
        if pieces != [piece for piece, _ in fast_tokenizers.text_pieces(saved)]:
            raise UserError(f"{directory}: {MODEL} and {TOKENIZER} are two different tokenizers; remove the wrong one")
        return model
    if kind == "BPE":
        return fast_tokenizers.byte_level_bpe(saved)
    if kind == "WordPiece":
        return fast_tokenizers.wordpiece(saved, path)
    if kind:
        raise UserError(
            f"{path}: a tokenizer of kind {kind}; supported are BPE, T5's Unigram (sentencepiece) and BERT's WordPiece"
        )
    if (directory / MODEL).exists():
        return SentencePiece.read(directory / MODEL)
    if (directory / MERGES).exists() and (directory / VOCABULARY).exists():
        return ByteLevelBPE.read(directory)
    if (directory / LISTING).exists():
        return WordPiece.read(directory)
    raise UserError(
        f"{directory}: no supported tokenizer: neither {MODEL}, nor {VOCABULARY} and {MERGES}, nor {LISTING}, "
        f"nor {TOKENIZER}"
    )


def _with_names(model: TextModel, names: Sequence[str], directory: Path) -> Tokenizer:
    """`names` are those of the ids above the model's own: special tokens, then sentinels with <extra_id_0> last."""
    sentinels = _sentinels_at_the_end(names)
    special = names[: len(names) - sentinels]
    if strange := [name for name in special if name.startswith("<extra_id_")]:
        raise UserError(f"{directory}: {strange[0]} is out of place: sentinels come last, ending with <extra_id_0>")
    return Tokenizer(model, special, sentinels)


def _published(directory: Path) -> Tokenizer:
    """BPE that isn't GPT-2's; with sentinels, if an export of ours put them there."""
    model = auto_tokenizer.read(directory)
    sentinels = _sentinels_at_the_end([model.names.get(id_, "") for id_ in range(model.size)])
    return Tokenizer(model.first(model.size - sentinels), (), sentinels)


def _sentinels_at_the_end(names: Sequence[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[1] == f"<extra_id_{pair[0]}>", enumerate(reversed(names))))


def _marks(vocabulary: Vocabulary, roles: dict[str, str], interchange: Interchange) -> processors.TemplateProcessing:
    """The marks around one text and around two: bos A eos, bos A eos B eos."""
    begin = [roles["bos_token"]] if interchange.begins and "bos_token" in roles else []
    end = [roles["eos_token"]] if interchange.ends else []
    ids = {roles[f"{role}_token"]: getattr(vocabulary, role) for role in ("bos", "eos") if f"{role}_token" in roles}
    return processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, "$B:1", *(f"{mark}:1" for mark in end)],
        special_tokens=list(ids.items()),
    )
