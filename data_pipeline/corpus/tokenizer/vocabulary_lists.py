"""Tokenizers from before tokenizer.json, which transformers makes of lists: GPT-2's, BART's and BERT's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.json_file import read_json
from data_pipeline.corpus.tokenizer.text_model import read_file

_BPE = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))  # GPT-2's names, and Hugging Face's
_WORDPIECES, _SETTINGS = "vocab.txt", "tokenizer_config.json"
_BERTS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def are_in(directory: Path) -> bool:
    """Whether a directory has the lists of a tokenizer: tokens and merges, or pieces of words."""
    return any(all((directory / name).exists() for name in names) for names in (*_BPE, (_WORDPIECES,)))


def read(directory: Path) -> Any:
    """transformers' tokenizer of the lists in `directory`; a tokenizer_config.json says whether BERT's lower-cases.

    Raises UserError for lists that don't fit each other, FailedError for a damaged file.
    """
    import transformers  # 3 s and 230 MB, only to read a published tokenizer

    if (directory / "dict.txt").exists():
        what = "fairseq's dictionary, by which BART's ids differ from GPT-2's"
        raise UserError(f"{directory / 'dict.txt'}: {what}; read vocab.json and merges.txt of facebook/bart-base")
    for tokens, merges in ((directory / one, directory / other) for one, other in _BPE):
        if tokens.exists() and merges.exists():
            ids = _ids(tokens)
            pairs = _merges(merges, tokens.name, ids)
            if "</s>" not in ids:
                return transformers.GPT2Tokenizer(vocab=ids, merges=pairs)
            mask = AddedToken("<mask>", lstrip=True, special=True, normalized=False)  # as facebook/bart-base has it
            return transformers.BartTokenizer(vocab=ids, merges=pairs, mask_token=mask)
    settings = read_json(directory / _SETTINGS, dict) if (directory / _SETTINGS).exists() else {}
    options = {
        key: settings[key] for key in ("do_lower_case", "strip_accents", "tokenize_chinese_chars") if key in settings
    }
    return transformers.BertTokenizer(vocab=_pieces(directory / _WORDPIECES), **options)


def _ids(path: Path) -> dict[str, int]:
    try:
        ids = json.loads(read_file(path))
    except ValueError:
        raise FailedError(f"{path}: damaged: not valid JSON") from None
    numbers = list(ids.values()) if isinstance(ids, dict) else []
    if not numbers or not all(isinstance(id_, int) for id_ in numbers) or set(numbers) != set(range(len(numbers))):
        raise UserError(f"{path}: expected tokens with consecutive ids from 0, each used once")
    if not {"</s>", "<|endoftext|>"} & ids.keys():
        raise UserError(f"{path}: has no EOS: neither <|endoftext|> nor </s>")
    return ids


def _merges(path: Path, tokens: str, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs in a list of merges, whose tokens are in the file `tokens`."""
    merges = []
    for number, line in enumerate(read_file(path).split("\n"), 1):
        if not line or line.startswith("#version"):
            continue
        left, *right = line.split(" ")
        if len(right) != 1:
            raise UserError(f"{path}: line {number}: expected two tokens")
        if missing := [one for one in (left, right[0], left + right[0]) if one not in ids]:
            raise UserError(f"{path}: line {number}: {tokens} lacks the token {missing[0]!r}")
        merges.append((left, right[0]))
    return merges


def _pieces(path: Path) -> dict[str, int]:
    lines = read_file(path).split("\n")
    tokens = [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
    if len(set(tokens)) < len(tokens):
        raise UserError(f"{path}: lists a token twice")
    if missing := [name for name in _BERTS if name not in tokens]:
        raise UserError(f"{path}: lacks BERT's tokens {', '.join(missing)}")
    return {token: id_ for id_, token in enumerate(tokens)}
