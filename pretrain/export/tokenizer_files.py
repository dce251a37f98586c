"""Imports tokenizers that transformers or the `tokenizers` library saved, and exports them for `AutoTokenizer`."""

import base64
import json
import re
from collections.abc import Collection, Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any

import tokenizers
from sentencepiece import sentencepiece_model_pb2 as protocol
from tokenizers import AddedToken, processors

from data_pipeline.base.atomic import write_json
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.formatting import printable
from data_pipeline.corpus.tokenizer import Tokenizer, tokenizer_json, vocabulary_lists
from data_pipeline.corpus.tokenizer.byt5 import CLASS as BYT5
from data_pipeline.corpus.tokenizer.byt5 import Bytes
from data_pipeline.corpus.tokenizer.ids import MODEL as IDS
from data_pipeline.corpus.tokenizer.ids import Ids
from data_pipeline.corpus.tokenizer.sentencepiece import EOS, LINES, MODEL, PAD, SENTINEL, SPACE, UNK, SentencePiece
from data_pipeline.corpus.tokenizer.symbols import MODEL as SYMBOLS
from data_pipeline.corpus.tokenizer.symbols import Symbols
from data_pipeline.corpus.tokenizer.text_model import TextModel
from data_pipeline.corpus.tokenizer.tokenizer_json import (
    TokenizerJson,
    optional_json,
    read_backend,
    sentinels_at_the_end,
)
from data_pipeline.text.vocabulary import Vocabulary
from pretrain.models.state_dict_adapter import HFModel, Json

TOKENIZER, CONFIG, ADDED = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_OUR_SPECIAL = "encdec_pretrain_special_tokens"  # in tokenizer_config.json: those above the ids of a tokenizer.json
# transformers' T5 splits text at white space and puts ▁ before each word, also behind a sentinel inside a word.
_T5S_WORDS = [
    {"type": "WhitespaceSplit"},
    {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True},
]
# sentencepiece keeps one space of several, and puts ▁ at the start of a text alone.
_ONE_SPACE = {"type": "Replace", "pattern": {"Regex": r" (?= |\z)"}, "content": ""}
_WORDS = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": True}
# Where sentencepiece changes nothing: an end of a line or a tab is a piece; no piece spans where white space begins.
_LINES = {"type": "Split", "pattern": {"Regex": f"[{''.join(LINES)}]"}, "behavior": "Isolated", "invert": False}
_SPACES = {"type": "Split", "pattern": {"Regex": " +"}, "behavior": "MergedWithNext", "invert": False}
# The text "<0x41>" must not become a byte token.
_BYTE_TOKEN = {"Regex": "<(?=0x[0-9A-F]{2}>)"}
_NO_BYTES = {"type": "Split", "pattern": _BYTE_TOKEN, "behavior": "MergedWithPrevious", "invert": False}


# --- import ---


def read(directory: Path) -> Tokenizer:
    """Reads the tokenizer in `directory`: sentencepiece like T5's, ByT5's, symbols, ids, or any of the kinds BPE,
    WordPiece and WordLevel.

    As in transformers, tokenizer.json takes precedence; a spiece.model with the same pieces is used unchanged. The ids
    above the model's own must be special tokens, then sentinels, with <extra_id_0> last. Raises UserError for any other
    tokenizer, FailedError if a file is damaged.
    """
    path = directory / TOKENIZER
    saved: Json = json.loads(read_backend(path).to_str()) if path.exists() else {}  # as the library writes it today
    config = optional_json(directory / CONFIG)
    in_bytes = _is_bytes(saved) if saved else config.get("tokenizer_class") == BYT5
    kind = saved.get("model", {}).get("type")
    has_lists = not saved and not (directory / MODEL).exists() and vocabulary_lists.are_in(directory)
    if not in_bytes and not (directory / SYMBOLS).exists() and (kind in tokenizer_json.READ or has_lists):
        published, sentinels = tokenizer_json.without_sentinels(tokenizer_json.read(directory))
        special = config.get(_OUR_SPECIAL, [])
        return Tokenizer(published.without(special), special, sentinels)
    added = optional_json(directory / ADDED)
    model = Bytes() if in_bytes else _model(saved, directory)
    try:
        if isinstance(model, SentencePiece) and not saved:  # a T5Tokenizer without a list of its sentinels
            sentinels = model.own_sentinels or config.get("extra_ids", 100)
            names = {model.size + sentinels - 1 - number: SENTINEL.format(number) for number in range(sentinels)}
        elif isinstance(model, Bytes) and not saved:
            names = {model.size + number: SENTINEL.format(number) for number in range(config.get("extra_ids", 125))}
        else:
            names = {token["id"]: token["content"] for token in saved.get("added_tokens", [])}
        names |= {int(id_): token["content"] for id_, token in config.get("added_tokens_decoder", {}).items()}
        names |= {id_: token for token, id_ in added.items()}
        names |= _sentinel_pieces(saved)
        above = sorted(id_ for id_ in names if id_ >= model.size)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FailedError(f"{directory}: damaged: {CONFIG} or {ADDED}: {error!r}") from None
    if above != list(range(model.size, model.size + len(above))):
        raise UserError(f"{directory}: the tokenizer's ids from {model.size} on have gaps")
    added_names = [names[id_] for id_ in above]
    if model.sentinels_ascend:
        sentinels = sum(1 for _ in takewhile(lambda one: one[1] == SENTINEL.format(one[0]), enumerate(added_names)))
        special = added_names[sentinels:]
    else:
        special = added_names[: len(above) - sentinels_at_the_end(added_names)]
    if strange := [name for name in special if name.startswith(SENTINEL[:-3])]:
        raise UserError(
            f"{directory}: {printable(strange[0])} is out of place: sentinels come last, <extra_id_0> at the end; "
            "behind ByT5's bytes they come first, from <extra_id_0> on"
        )
    return Tokenizer(model, special, len(above) - len(special))


def _model(saved: Json, directory: Path) -> TextModel:
    path, kind = directory / TOKENIZER, saved.get("model", {}).get("type")
    if (directory / SYMBOLS).exists():
        symbols = Symbols.read(directory)
        if saved and saved["model"]["vocab"] != symbols.ids:
            raise UserError(
                f"{directory}: {SYMBOLS} and {TOKENIZER} are two different tokenizers; remove the wrong one"
            )
        return symbols
    if kind == "Unigram":
        if not (directory / MODEL).exists():
            return _sentencepiece(saved, path)
        model = SentencePiece.read(directory / MODEL)
        if [piece for piece, _ in model.pieces] != [piece for piece, _ in _text_pieces(saved)]:
            raise UserError(f"{directory}: {MODEL} and {TOKENIZER} are two different tokenizers; remove the wrong one")
        return model
    if kind:
        supported = "BPE, WordPiece, WordLevel and T5's Unigram (sentencepiece)"
        raise UserError(f"{path}: a tokenizer of kind {kind}; supported are {supported}")
    if (directory / MODEL).exists():
        return SentencePiece.read(directory / MODEL)
    if (directory / IDS).exists():
        return Ids.read(directory)
    raise UserError(f"{directory}: no supported tokenizer: neither {MODEL}, nor {TOKENIZER}, nor lists of tokens")


def _is_bytes(saved: Json) -> bool:
    """Whether `write` wrote this tokenizer for ByT5's bytes."""
    return bool(saved["model"].get("vocab") == json.loads(Bytes().backend().to_str())["model"]["vocab"])


def _sentencepiece(saved: Json, path: Path) -> SentencePiece:
    """A sentencepiece model with the same pieces, scores and normalization, without the sentinels.

    Texts get the same ids as from the original spiece.model, but the file's bytes differ: a tokenizer.json doesn't say
    how the model was trained. Raises UserError for what neither T5Tokenizer nor `write` writes.
    """
    pieces, keeps_text = _text_pieces(saved), _keeps_text(saved)
    steps = _steps(saved["normalizer"], "normalizers")
    charsmap = steps.pop(0)["precompiled_charsmap"] if steps and steps[0]["type"] == "Precompiled" else ""
    splits = [one for one in _steps(saved["pre_tokenizer"], "pretokenizers") if one != _NO_BYTES]
    ours = keeps_text or (steps, splits) == ([_ONE_SPACE], [_WORDS])
    inside = sorted(token["id"] for token in saved["added_tokens"] if UNK < token["id"] < len(pieces))
    _refuse(
        path,
        [
            (f"the normalizer is {(saved['normalizer'] or {}).get('type')}", steps and not ours),
            ("the pre_tokenizer is not T5's", splits != _T5S_WORDS and not ours),
            (f"unk_id is {saved['model']['unk_id']}, not {UNK}", saved["model"]["unk_id"] != UNK),
            (f"ids {inside[:8]} are pieces and added tokens at once", bool(inside)),
        ],
    )
    model = protocol.ModelProto()
    in_bytes = saved["model"]["byte_fallback"]
    for id_, (piece, score) in enumerate(pieces):
        kind = {PAD: "CONTROL", EOS: "CONTROL", UNK: "UNKNOWN"}.get(id_, "NORMAL")
        if in_bytes and _BYTE.fullmatch(piece):
            kind = "BYTE"
        elif keeps_text and piece in LINES:
            kind = "USER_DEFINED"
        model.pieces.add(piece=piece, score=score, type=protocol.ModelProto.SentencePiece.Type.Value(kind))
    model.trainer_spec.model_type = protocol.TrainerSpec.UNIGRAM
    model.trainer_spec.vocab_size = len(pieces)
    model.trainer_spec.pad_id, model.trainer_spec.eos_id, model.trainer_spec.unk_id = PAD, EOS, UNK
    model.trainer_spec.bos_id, model.trainer_spec.byte_fallback = -1, in_bytes
    model.normalizer_spec.precompiled_charsmap = base64.b64decode(charsmap)
    model.normalizer_spec.add_dummy_prefix = model.normalizer_spec.remove_extra_whitespaces = not keeps_text
    return SentencePiece(model.SerializeToString(), path)


def _text_pieces(saved: Json) -> list[tuple[str, float]]:
    """Pieces and scores of a Unigram model as in sentencepiece, without the sentinels behind them."""
    space = " " if _keeps_text(saved) else SPACE
    pieces = [(piece.replace(space, SPACE), score) for piece, score in saved["model"]["vocab"]]
    return pieces[: len(pieces) - len(_sentinel_pieces(saved))]


def _sentinel_pieces(saved: Json) -> dict[int, str]:
    """The last pieces of a Unigram model that are sentinels: T5Tokenizer appends them, and mT5's file has them."""
    if saved.get("model", {}).get("type") != "Unigram":
        return {}
    pieces = [piece.removeprefix(SPACE) for piece, _ in saved["model"]["vocab"]]
    last = [*takewhile(lambda piece: piece.startswith(SENTINEL[:-3]), reversed(pieces))]
    return dict(enumerate(reversed(last), len(pieces) - len(last)))


def _keeps_text(saved: Json) -> bool:
    """Whether `write` wrote this tokenizer for a sentencepiece model that changes nothing in a text."""
    return _steps(saved["pre_tokenizer"], "pretokenizers")[:1] == [_LINES]


def _steps(part: Json | None, name: str) -> list[Json]:
    """The steps of a normalizer or pre_tokenizer; `name`: the key of the list of several."""
    return [] if part is None else [*part[name]] if part["type"] == "Sequence" else [part]


def _refuse(path: Path, problems: Iterable[tuple[str, Any]]) -> None:
    if found := [problem for problem, is_so in problems if is_so]:
        raise UserError(f"{path}: tokenizers here don't support this: {'; '.join(found)}")


# --- export ---


def write(tokenizer: Tokenizer, hf: HFModel, objective: str | None, directory: Path) -> None:
    """Writes the tokenizer's files into `directory`, for a model of `hf` that was trained on `objective`.

    A text gets the same ids as here, and BOS and EOS around them as in training; without either, a tokenizer.json keeps
    its own. A special token or sentinel spelled out in a text becomes that token, as sentinels do in
    `Tokenizer.encode_with_sentinels`. The mask token, which programs put in place of a word, is the first sentinel for
    a model that fills spans.
    """
    model = tokenizer.model
    if isinstance(model, Ids):  # for an import: transformers has no tokenizer without text
        (directory / IDS).write_bytes(model.files[IDS])
        write_json(directory / ADDED, {name: id_ for id_, name in tokenizer.names.items()})
        return
    if isinstance(model, Bytes) and marks(hf, objective) == (False, True):
        _write_byt5(tokenizer, hf, directory)
        return
    for name in model.files.keys() & {MODEL, SYMBOLS}:
        # for other programs: transformers reads tokenizer.json and tokenizer_config.json
        (directory / name).write_bytes(model.files[name])
    _write_fast(tokenizer, hf, objective, directory)
    if isinstance(model, SentencePiece) and hf.model_type == "t5":
        # for programs that read spiece.model and this file instead of tokenizer.json
        write_json(directory / ADDED, {name: id_ for id_, name in tokenizer.names.items()})


def marks(hf: HFModel, objective: str | None) -> tuple[bool, bool]:
    """Whether a text has BOS before it, and EOS after it, for a model that was trained on `objective`.

    As in training, or as `hf` asks for if the objective is unknown.
    """
    return hf.begins and objective in (None, "denoising", "masked_lm"), hf.ends or objective == "in_one_row"


def _write_byt5(tokenizer: Tokenizer, hf: HFModel, directory: Path) -> None:
    """Writes tokenizer_config.json for ByT5Tokenizer, which ends a text with EOS and needs no other file."""
    vocabulary, names = tokenizer.vocabulary, tokenizer.names
    settings = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {str(id_): {"content": name, **settings} for id_, name in sorted(names.items())}
    roles = {role: getattr(vocabulary, role) for role in ("bos", "eos", "unk", "pad", "mask")}
    config = {
        "tokenizer_class": BYT5,
        "extra_ids": 0,  # the tokens above the bytes are named below
        "added_tokens_decoder": added,
        # transformers 5 calls this `extra_special_tokens`, and reads transformers 4's name too
        "additional_special_tokens": [name for id_, name in sorted(names.items()) if id_ >= tokenizer.vocab_size],
        **{f"{role}_token": names[id_] for role, id_ in roles.items() if id_ is not None},
    }
    if hf.model_type == "t5gemma2":  # as in _write_fast
        config |= {"processor_class": BYT5}
    write_json(directory / CONFIG, config)


def _write_fast(tokenizer: Tokenizer, hf: HFModel, objective: str | None, directory: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json for PreTrainedTokenizerFast, or for an imported tokenizer's
    class."""
    model, vocabulary = tokenizer.model, tokenizer.vocabulary
    if isinstance(model, SentencePiece):
        backend, keeps_text = _unigram(tokenizer, model), model.keeps_text
    else:
        backend, keeps_text = model.backend(), False
    config: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    there: Collection[int] = ()
    if isinstance(model, TokenizerJson):
        config, there = model.config, model.names
    backend.add_special_tokens(
        [
            # lstrip absorbs all white space; in sentencepiece the normalizer takes the space, and may come first
            AddedToken(
                name,
                special=True,
                normalized=keeps_text and _absorbs(tokenizer, id_),
                lstrip=not isinstance(model, SentencePiece) and model.gap == " " and _absorbs(tokenizer, id_),
            )
            for id_, name in sorted(tokenizer.names.items())
            if id_ not in there
        ]
    )
    begins, ends = marks(hf, objective)
    if not isinstance(model, TokenizerJson) or begins or ends:
        roles = {
            f"{role}_token": token
            for role in ("bos", "eos", "unk", "pad", "mask")
            if (id_ := getattr(vocabulary, role)) is not None and (token := backend.id_to_token(id_))
        }
        if _fills_spans(tokenizer, hf, objective):
            roles["mask_token"] = SENTINEL.format(0)
        backend.post_processor = _template(vocabulary, roles, begins, ends)
        flags = {"add_bos_token": begins, "add_eos_token": ends}  # transformers 4 reads them
        config = {**config, **roles, **{key: value for key, value in flags.items() if key in config}}
    if isinstance(model, TokenizerJson) and tokenizer.special_tokens:
        config = {**config, _OUR_SPECIAL: list(tokenizer.special_tokens)}
    if hf.model_type == "t5gemma2":  # without it, AutoProcessor looks for an image processor, which isn't exported
        config |= {"processor_class": "PreTrainedTokenizerFast"}
    backend.save(str(directory / TOKENIZER))
    write_json(directory / CONFIG, config)


def _unigram(tokenizer: Tokenizer, model: SentencePiece) -> tokenizers.Tokenizer:
    """The library's tokenizer that gives the ids of `model`, without the special tokens above them.

    Where the model changes nothing, a space is itself in the pieces, and ▁ a character like any other.
    """
    spec, in_bytes = model.normalizer_spec, bool(model.byte_ids)
    decoder: Json
    if model.keeps_text:
        pieces = [(piece.replace(SPACE, " "), score) for piece, score in model.pieces]
        names = "|".join(re.escape(name) for id_, name in tokenizer.names.items() if _absorbs(tokenizer, id_))
        before = {"type": "Replace", "pattern": {"Regex": f" (?={names})"}, "content": ""}
        runs = [{**_LINES, "pattern": {"Regex": "|".join(model.runs)}}] if model.runs else []
        normalizers, splits, decoder = [before] if names else [], [_LINES, *runs, _SPACES], {"type": "Fuse"}
    else:
        pieces = model.pieces
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        normalizers = [{"type": "Precompiled", "precompiled_charsmap": charsmap}] if charsmap else []
        normalizers, splits, decoder = [*normalizers, _ONE_SPACE], [_WORDS], {**_WORDS, "prepend_scheme": "always"}
    saved = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, _NO_BYTES] if in_bytes else splits},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, decoder]} if in_bytes else decoder,
        "model": {"type": "Unigram", "unk_id": UNK, "vocab": pieces, "byte_fallback": in_bytes},
    }
    backend = tokenizers.Tokenizer.from_str(json.dumps(saved))
    backend.add_special_tokens([AddedToken(pieces[id_][0], special=True, normalized=False) for id_ in (PAD, EOS, UNK)])
    return backend


def _absorbs(tokenizer: Tokenizer, id_: int) -> bool:
    """Whether a token replaces words of a text, and so absorbs the space before it, as the words did."""
    return id_ in tokenizer.vocabulary.sentinel_ids or tokenizer.names[id_] == "<mask>"


def _fills_spans(tokenizer: Tokenizer, hf: HFModel, objective: str | None) -> bool:
    """True if the first sentinel becomes the mask token; with an unknown `objective`, if the tokenizer has no mask.

    Only for sentencepiece: elsewhere transformers' mask token would no longer absorb the space before it.
    """
    learnt = objective in ("span_corruption", "iid_denoising", "infilling", "ul2")
    likely = objective is None and tokenizer.vocabulary.mask is None and hf.encoder_decoder
    return isinstance(tokenizer.model, SentencePiece) and tokenizer.sentinels > 0 and (learnt or likely)


def _template(vocabulary: Vocabulary, roles: dict[str, str], begins: bool, ends: bool) -> processors.TemplateProcessing:
    """Puts BOS and EOS around one text and around two: bos A eos, bos A eos B eos."""
    begin = [roles["bos_token"]] if begins and "bos_token" in roles else []
    end = [roles["eos_token"]] if ends else []
    ids = {roles[f"{role}_token"]: getattr(vocabulary, role) for role in ("bos", "eos") if f"{role}_token" in roles}
    return processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, "$B:1", *(f"{token}:1" for token in end)],
        special_tokens=list(ids.items()),
    )
