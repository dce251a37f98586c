"""Reads the tokenizer model from a tokenizer.json: transformers 5 writes no other file of the tokenizer."""

import base64
import json
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.tokenizer.byte_level_bpe import ByteLevelBPE
from data_pipeline.tokenizer.sentencepiece import EOS, PAD, UNK, SentencePiece
from data_pipeline.tokenizer.wordpiece import LONGEST_WORD, PREFIX, Normalization, WordPiece
from data_pipeline.tokenizer.wordpiece import UNK as UNKNOWN_WORD
from pretrain.huggingface import json_files
from pretrain.huggingface.json_files import Json

_BYTE = re.compile("<0x[0-9A-F]{2}>")
SENTINEL = "<extra_id_"
END_MARKS = {"<|endoftext|>", "</s>"}
# Before T5's pieces are looked up, text is split at white space, which becomes the mark of a word's beginning.
_WORDS = [
    {"type": "WhitespaceSplit"},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
]
# T5Tokenizer knows no bytes of characters without a piece. They are no pieces of text: "<0x41>" isn't taken for one.
_NO_BYTES = {
    "type": "Split",
    "pattern": {"Regex": "<(?=0x[0-9A-F]{2}>)"},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
# Options of BPE in a tokenizer.json besides merging, where it is GPT-2's.
_PLAIN_BPE: Json = {
    "dropout": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "byte_fallback": False,
    "ignore_merges": False,
}


def read(path: Path) -> Json:
    """The content of tokenizer.json as the `tokenizers` library writes it today, or empty if there is no file.

    Raises FailedError if the library can't read it.
    """
    if not path.exists():
        return {}
    json_files.read(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise FailedError(f"{path}: damaged: {error}") from None
    return json.loads(tokenizer.to_str())


def is_gpt2s(saved: Json) -> bool:
    """Whether the BPE in `saved` encodes text as GPT-2's does: as `byte_level_bpe` reads it."""
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
    from sentencepiece import sentencepiece_model_pb2 as protocol

    pieces = text_pieces(saved)
    normalizer, splits = saved["normalizer"] or {}, (saved["pre_tokenizer"] or {}).get("pretokenizers")
    inside = sorted(token["id"] for token in saved["added_tokens"] if UNK < token["id"] < len(pieces))
    _refuse(
        path,
        [
            (f"the normalizer is {normalizer.get('type')}", normalizer.get("type") not in (None, "Precompiled")),
            ("the pre_tokenizer is not T5's", splits not in (_WORDS, [*_WORDS, _NO_BYTES])),
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


def with_bytes(t5: Tokenizer) -> Tokenizer:
    """T5Tokenizer's tokenizer, with the bytes of characters that have no piece: as sentencepiece has them."""
    saved: Json = json.loads(t5.to_str())
    saved["model"]["byte_fallback"] = True
    saved["pre_tokenizer"]["pretokenizers"].append(_NO_BYTES)
    saved["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, saved["decoder"]]}
    return Tokenizer.from_str(json.dumps(saved))


def text_pieces(saved: Json) -> list[tuple[str, float]]:
    """Pieces and scores of a Unigram model, without the sentinels that T5Tokenizer appends."""
    pieces = [(piece, score) for piece, score in saved["model"]["vocab"]]
    while pieces and pieces[-1][0].startswith(SENTINEL):
        pieces.pop()
    return pieces


def _refuse(path: Path, problems: Iterable[tuple[str, Any]]) -> None:
    if found := [problem for problem, is_so in problems if is_so]:
        raise UserError(f"{path}: tokenizers here don't support this: {'; '.join(found)}")
