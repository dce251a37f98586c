"""Import of tokenizers that transformers or the `tokenizers` library saved."""

import base64
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from typing import Any

import tokenizers
from sentencepiece import sentencepiece_model_pb2 as protocol

from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.formatting import printable
from data_pipeline.foundation.json_file import read_json
from data_pipeline.tokenizer import Tokenizer, auto_tokenizer
from data_pipeline.tokenizer.byte_level_bpe import MERGES, VOCABULARY, ByteLevelBPE
from data_pipeline.tokenizer.sentencepiece import EOS, MODEL, PAD, UNK, SentencePiece
from data_pipeline.tokenizer.sentencepiece import LISTING as PIECES
from data_pipeline.tokenizer.text_model import TextModel
from data_pipeline.tokenizer.wordpiece import LISTING, LONGEST_WORD, PREFIX, Normalization, WordPiece
from data_pipeline.tokenizer.wordpiece import UNK as UNKNOWN_WORD
from pretrain.huggingface.tokenizer_export import ADDED, CONFIG, NO_BYTES, TOKENIZER
from pretrain.huggingface.weights import check_files
from pretrain.models.state_dict_adapter import Json

_BYTE = re.compile("<0x[0-9A-F]{2}>")
SENTINEL = "<extra_id_"
END_MARKS = {"<|endoftext|>", "</s>"}
# T5's tokenizer splits text at white space and puts ▁ before each word.
_WORDS = [
    {"type": "WhitespaceSplit"},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
]
# Options of BPE in a tokenizer.json besides merging, where it is GPT-2's.
_PLAIN_BPE: Json = {
    "dropout": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "byte_fallback": False,
    "ignore_merges": False,
}


def read(directory: Path) -> Tokenizer:
    """Reads the tokenizer in `directory`: sentencepiece like T5's, WordPiece like BERT's, or any BPE.

    As in transformers, tokenizer.json takes precedence; a spiece.model with the same pieces is used unchanged. Raises
    UserError for any other tokenizer, and unless the ids above the model's own are special tokens followed by
    sentinels; FailedError if a file is damaged.
    """
    check_files(directory)
    saved = _saved(directory / TOKENIZER)
    config = _json(directory / CONFIG)
    if saved.get("model", {}).get("type") == "BPE" and not (is_gpt2s(saved) and not config.get("add_prefix_space")):
        return _published(directory)
    added = _json(directory / ADDED)
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
            return sentencepiece(saved, path)
        model = SentencePiece.read(directory / MODEL)
        pieces = [line.split("\t")[0] for line in model.files[PIECES].decode().split("\n")[:-1]]
        if pieces != [piece for piece, _ in text_pieces(saved)]:
            raise UserError(f"{directory}: {MODEL} and {TOKENIZER} are two different tokenizers; remove the wrong one")
        return model
    if kind == "BPE":
        return byte_level_bpe(saved)
    if kind == "WordPiece":
        return wordpiece(saved, path)
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
        raise UserError(
            f"{directory}: {printable(strange[0])} is out of place: sentinels come last, ending with <extra_id_0>"
        )
    return Tokenizer(model, special, sentinels)


def _published(directory: Path) -> Tokenizer:
    """BPE that isn't GPT-2's; with sentinels, if an export of ours put them there."""
    model = auto_tokenizer.read(directory)
    sentinels = _sentinels_at_the_end([model.names.get(id_, "") for id_ in range(model.size)])
    return Tokenizer(model.first(model.size - sentinels), (), sentinels)


def _sentinels_at_the_end(names: Sequence[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[1] == f"<extra_id_{pair[0]}>", enumerate(reversed(names))))


def _json(path: Path) -> Json:
    return read_json(path, Json) if path.exists() else {}


def _saved(path: Path) -> Json:
    """The content of tokenizer.json as the `tokenizers` library writes it today, or empty if there is no file.

    Raises FailedError if the library can't read it.
    """
    if not path.exists():
        return {}
    read_json(path, Json)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise FailedError(f"{path}: damaged: {error}") from None
    return json.loads(tokenizer.to_str())


def is_gpt2s(saved: Json) -> bool:
    """True if the BPE in `saved` encodes text as GPT-2's does, which `byte_level_bpe` reads."""
    splits, model = saved["pre_tokenizer"] or {}, saved["model"]
    vocabulary = model["vocab"]
    return (
        all((model[key] or plain) == plain for key, plain in _PLAIN_BPE.items() if key in model)
        and saved["normalizer"] is None
        and splits.get("type") == "ByteLevel"
        and not splits.get("add_prefix_space")
        and splits.get("use_regex") is not False
        and all(token["special"] for token in saved["added_tokens"])
        and bool(END_MARKS & vocabulary.keys())
        and set(vocabulary.values()) == set(range(len(vocabulary)))
    )


def byte_level_bpe(saved: Json) -> ByteLevelBPE:
    """The byte-level BPE model in `saved`, which must be GPT-2's."""
    return ByteLevelBPE(saved["model"]["vocab"], [tuple(pair) for pair in saved["model"]["merges"]])


def wordpiece(saved: Json, path: Path) -> WordPiece:
    """The WordPiece model in `saved`. Raises UserError if it encodes text differently from ours."""
    model, vocabulary = saved["model"], saved["model"]["vocab"]
    normalizer, splits = saved["normalizer"] or {}, saved["pre_tokenizer"] or {}
    longest = model["max_input_chars_per_word"]
    _refuse(
        path,
        [
            (f"unk_token is {model['unk_token']!r}, not {UNKNOWN_WORD}", model["unk_token"] != UNKNOWN_WORD),
            ("its continuations don't begin with ##", model["continuing_subword_prefix"] != PREFIX),
            (f"max_input_chars_per_word is {longest}, not {LONGEST_WORD}", longest != LONGEST_WORD),
            (f"the normalizer is {normalizer.get('type')}, not BERT's", normalizer.get("type") != "BertNormalizer"),
            (f"the pre_tokenizer is {splits.get('type')}, not BERT's", splits.get("type") != "BertPreTokenizer"),
            ("the ids of its model have gaps", set(vocabulary.values()) != set(range(len(vocabulary)))),
        ],
    )
    settings = {field.name: normalizer[field.name] for field in fields(Normalization)}
    return WordPiece(sorted(vocabulary, key=vocabulary.__getitem__), Normalization(**settings), path)


def sentencepiece(saved: Json, path: Path) -> SentencePiece:
    """The sentencepiece model with the same pieces, scores and normalization; sentinels are not pieces.

    A text gets the same ids as from T5Tokenizer's original model, but the bytes of the file differ: a tokenizer.json
    doesn't say how the model was trained. Raises UserError for what T5Tokenizer doesn't write.
    """
    pieces = text_pieces(saved)
    normalizer, splits = saved["normalizer"] or {}, (saved["pre_tokenizer"] or {}).get("pretokenizers")
    inside = sorted(token["id"] for token in saved["added_tokens"] if UNK < token["id"] < len(pieces))
    _refuse(
        path,
        [
            (f"the normalizer is {normalizer.get('type')}", normalizer.get("type") not in (None, "Precompiled")),
            ("the pre_tokenizer is not T5's", splits not in (_WORDS, [*_WORDS, NO_BYTES])),
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
        model.pieces.add(piece=piece, score=score, type=protocol.ModelProto.SentencePiece.Type.Value(kind))
    model.trainer_spec.model_type = protocol.TrainerSpec.UNIGRAM
    model.trainer_spec.vocab_size = len(pieces)
    model.trainer_spec.pad_id, model.trainer_spec.eos_id, model.trainer_spec.unk_id = PAD, EOS, UNK
    model.trainer_spec.bos_id, model.trainer_spec.byte_fallback = -1, in_bytes
    model.normalizer_spec.precompiled_charsmap = base64.b64decode(normalizer.get("precompiled_charsmap") or "")
    return SentencePiece(model.SerializeToString(), path)


def text_pieces(saved: Json) -> list[tuple[str, float]]:
    """Pieces and scores of a Unigram model, without the sentinels that T5Tokenizer appends."""
    pieces = [(piece, score) for piece, score in saved["model"]["vocab"]]
    while pieces and pieces[-1][0].startswith(SENTINEL):
        pieces.pop()
    return pieces


def _refuse(path: Path, problems: Iterable[tuple[str, Any]]) -> None:
    if found := [problem for problem, is_so in problems if is_so]:
        raise UserError(f"{path}: tokenizers here don't support this: {'; '.join(found)}")
