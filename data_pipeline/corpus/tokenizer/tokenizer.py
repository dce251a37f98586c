"""A tokenizer: a text model, with special tokens and sentinels added above its ids.

In ascending order the ids are the model's own, the special tokens in their order, and the sentinels, with
`<extra_id_0>` the highest. Behind ByT5's bytes, the sentinels come first, with `<extra_id_0>` the lowest. No text is
ever encoded as one of these special tokens or sentinels, even if it spells one.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import NonNegativeInt

from data_pipeline.base import arguments
from data_pipeline.base.atomic import write_bytes, write_json
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.json_file import PathBelow, read_json
from data_pipeline.base.packages import missing
from data_pipeline.base.store import Store
from data_pipeline.corpus.tokenizer.config import KINDS
from data_pipeline.corpus.tokenizer.text_model import ROLES, TextModel
from data_pipeline.text.vocabulary import Vocabulary

FOLDER = "tokenizer"  # in a corpus and in a checkpoint
_DESCRIPTION = f"{FOLDER}/description.json"
_SENTINEL = re.compile(r"<extra_id_(0|[1-9][0-9]{0,8})>")


@dataclass(frozen=True)
class TokenizerDescription:
    """A tokenizer's files and ids, in a manifest and in a checkpoint.

    Attributes:
        file: the first of `files`.
        files: the sha256 of each file.
        sha256: a checksum of everything that decides which ids a text gets.
        size: the number of ids.
        pieces: the number of the model's own ids.
        sentinel_step: what is added to a sentinel's id for the next one's.
    """

    kind: str
    file: str
    files: dict[PathBelow, str]
    sha256: str
    size: NonNegativeInt
    pieces: NonNegativeInt
    special_tokens: list[str]
    sentinels: NonNegativeInt
    pad: int
    eos: int
    unk: int | None
    bos: int | None
    mask: int | None
    special: dict[str, int]
    first_sentinel: int | None
    sentinel_step: int = -1


class Tokenizer:
    """`model` with ids for `special_tokens` and `sentinels` above its own.

    Attributes:
        model: the text model, such as sentencepiece's.
        special_tokens: the names of the special tokens added to the model.
        sentinels: the number of sentinels.
    """

    def __init__(self, model: TextModel, special_tokens: Sequence[str] = (), sentinels: int = 0):
        if taken := [name for name in special_tokens if model.has(name)]:
            raise UserError(f"tokenizer.special_tokens: {', '.join(taken)}: the tokenizer has that token already")
        if sentinels and model.has("<extra_id_0>"):
            raise UserError("tokenizer.sentinels: the tokenizer has a token <extra_id_0> already")
        if (own := model.own_sentinels) and sentinels not in (0, own):
            raise UserError(f"tokenizer.sentinels: {sentinels}, but the tokenizer's file has {own}; give that number")
        self.model, self.special_tokens, self.sentinels = model, tuple(special_tokens), sentinels

    @property
    def sha256(self) -> str:
        """Checksum of the model alone."""
        return self.model.sha256

    @property
    def vocab_size(self) -> int:
        """The number of the model's own ids."""
        return self.model.size

    @property
    def size(self) -> int:
        """The number of all ids: the model's, special tokens and sentinels."""
        return self.vocab_size + len(self.special_tokens) + self.sentinels

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The roles of the ids."""
        return with_more_ids(self.model.vocabulary, self.special_tokens, self.sentinels, self.model.sentinels_ascend)

    @cached_property
    def names(self) -> dict[int, str]:
        """The names of the ids without text: the model's, then special tokens and sentinels."""
        sentinels = [f"<extra_id_{number}>" for number in range(self.sentinels)]
        ascend = self.model.sentinels_ascend
        added = [*sentinels, *self.special_tokens] if ascend else [*self.special_tokens, *reversed(sentinels)]
        return {**self.model.names, **dict(enumerate(added, self.vocab_size))}

    def __repr__(self) -> str:
        added = f"{len(self.special_tokens)} special tokens and {self.sentinels} sentinels"
        return f"Tokenizer({self.model.kind}: {self.size:,} ids, {self.vocab_size:,} of the model, {added})"

    def encode(self, texts: str | Sequence[str]) -> list[list[int]]:
        """Ids of each text, without an EOS token. A str is one text. Raises UserError for anything but texts."""
        return self.model.encode(arguments.texts(texts))

    def encode_with_sentinels(self, text: str) -> list[int]:
        """Ids of an input to fill in, with EOS: `<extra_id_k>` in `text` becomes sentinel k, if there is one, and
        `<mask>` the mask.

        A space before one is part of it, as in `decode`, unless the kind has every character as it is, as bytes do. So
        no token consists of that space alone. The text behind one begins a word only after a space: `MKT<extra_id_0>AY`
        masks a part of a word, as training does. Raises UserError for anything but a text.
        """
        (text,) = arguments.texts([text])
        ids: list[int] = []
        start = 0
        for found in _SENTINEL.finditer(text):
            if (number := int(found[1])) >= self.sentinels:
                continue
            before = text[start : found.start()].removesuffix(self.model.gap)
            ids += [*self._ids_with_masks(before, not start), self.vocabulary.sentinel(number)]
            start = found.end()
        return [*ids, *self._ids_with_masks(text[start:], not start), self.vocabulary.eos]

    def _ids_with_masks(self, text: str, is_start: bool) -> list[int]:
        """`is_start`: `text` is the start of a text, not the rest behind a sentinel."""
        mask = self.vocabulary.mask
        *before, last = [text] if mask is None else text.split(self.names[mask])
        first, *others = [*(part.removesuffix(self.model.gap) for part in before), last]
        ids = self.encode([first])[0] if is_start else self.model.encode_rest(first)
        for part in others:
            ids = [*ids, *([] if mask is None else [mask]), *self.model.encode_rest(part)]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`. Special tokens and sentinels are shown by name, after a space where text has such spaces;
        pad and eos are left out.

        Raises UserError for anything but ids of this tokenizer, such as the -100 of padded labels.
        """
        hidden = (self.vocabulary.pad, self.vocabulary.eos)
        shown = [id_ for id_ in arguments.token_ids(ids, self.size) if id_ not in hidden]
        text = ""
        for named, group in groupby(shown, self.names.__contains__):
            run = list(group)
            gap = self.model.gap
            part = gap.join(self.names[id_] for id_ in run) if named else self.model.decode(run)
            between = gap if named else self.model.glue(run[0])
            text += (between if text and part else "") + part
        return text

    def describe(self) -> TokenizerDescription:
        vocabulary = self.vocabulary
        files = {f"{FOLDER}/{name}": hashlib.sha256(content).hexdigest() for name, content in self.model.files.items()}
        return TokenizerDescription(
            kind=self.model.kind,
            file=next(iter(files)),
            files=files,
            sha256=self.sha256,
            size=self.size,
            pieces=self.vocab_size,
            special_tokens=list(self.special_tokens),
            sentinels=self.sentinels,
            pad=vocabulary.pad,
            eos=vocabulary.eos,
            unk=vocabulary.unk,
            bos=vocabulary.bos,
            mask=vocabulary.mask,
            special=vocabulary.special,
            first_sentinel=vocabulary.first_sentinel if self.sentinels else None,
            sentinel_step=vocabulary.sentinel_step,
        )


def meaning_of_ids(tokenizer: Tokenizer) -> dict[str, object]:
    """The facts that decide what a tokenizer's ids mean, by their keys in messages."""
    described = vars(tokenizer.describe())
    return {f"tokenizer.{key}": described[key] for key in ("kind", "sha256", "special_tokens", "sentinels")}


def with_more_ids(own: Vocabulary, special_tokens: Sequence[str], sentinels: int, ascend: bool) -> Vocabulary:
    """A model's `own` vocabulary with special tokens and sentinels above it. `ascend`: sentinels come first, in the
    order of their numbers."""
    special = {name: own.size + ascend * sentinels + number for number, name in enumerate(special_tokens)}
    roles: dict[str, Any] = {ROLES[name]: id_ for name, id_ in special.items() if name in ROLES}
    neither = np.zeros(len(special) + sentinels, dtype=bool)
    size = own.size + len(neither)
    return replace(
        own,
        **roles,
        size=size,
        first_sentinel=(own.size if ascend else size - 1) if sentinels else -1,
        sentinel_step=1 if ascend else -1,
        sentinels=sentinels,
        special=own.special | {name: id_ for name, id_ in special.items() if name not in ROLES},
        word_starts=np.append(own.word_starts, neither),
        sentence_ends=np.append(own.sentence_ends, neither),
        texts=(*own.texts, *[""] * len(neither)) if own.texts else (),
    )


def load(directory: Path, described: TokenizerDescription | None = None) -> Tokenizer:
    """The tokenizer in `directory`, a corpus or a checkpoint.

    `described`: the description in the corpus's manifest; None: the file that `save` wrote in a checkpoint. Raises
    FailedError if the files or ids differ from the description.
    """
    if described is None:
        try:
            described = read_json(directory / _DESCRIPTION, TokenizerDescription)
        except FileNotFoundError as error:
            raise UserError(f"{error.filename}: no such file or directory") from None
    tokenizer = read(directory, described.kind, described.special_tokens, described.sentinels)
    if described.sha256 != tokenizer.sha256:
        raise FailedError(f"{directory / FOLDER}: not the tokenizer that {directory} was made with: sha256 differs")
    expected, found = (asdict(replace(one, file="", files={})) for one in (described, tokenizer.describe()))
    if wrong := [key for key in expected if expected[key] != found[key]]:
        lines = (
            f"{directory}: tokenizer.{key} is described as {expected[key]!r}; the one in {FOLDER} has {found[key]!r}"
            for key in wrong
        )
        raise FailedError("\n".join(lines))
    return tokenizer


def read(directory: Path, kind: str, special_tokens: Sequence[str], sentinels: int) -> Tokenizer:
    """The tokenizer in `directory`, with these special tokens and sentinels."""
    return Tokenizer(_model_class(kind, directory).read(directory / FOLDER), special_tokens, sentinels)


def _model_class(kind: str, where: object) -> type[TextModel]:
    if kind not in KINDS:
        raise UserError(f"{where}: {missing('tokenizers', kind)}; expected one of {', '.join(KINDS)}")
    return KINDS[kind].model


def in_corpus(store: Store, kind: str, special_tokens: Sequence[str], sentinels: int) -> Tokenizer:
    """The tokenizer of a corpus, which may be in an object store."""
    names = _model_class(kind, store).file_names
    with store.local(f"{FOLDER}/{name}" for name in names) as directory:
        return read(directory, kind, special_tokens, sentinels)


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the tokenizer so that `load(directory)` can read it."""
    for name, content in tokenizer.model.files.items():
        write_bytes(directory / FOLDER / name, content)
    write_json(directory / _DESCRIPTION, tokenizer.describe())


def as_section(tokenizer: Tokenizer, directory: Path) -> str:
    """The `tokenizer:` section of a corpus file, as YAML in one line, for the tokenizer that `save` wrote into
    `directory`."""
    model = tokenizer.model
    settings: dict[str, Any] = {"kind": model.kind}
    if "path" in KINDS[model.kind].model_fields:
        settings["path"] = str(directory / FOLDER)
    settings |= {**model.settings, "special_tokens": [*tokenizer.special_tokens], "sentinels": tokenizer.sentinels}
    shown = yaml.safe_dump(settings, default_flow_style=True, sort_keys=False, allow_unicode=True, width=float("inf"))
    return f"tokenizer: {shown.strip()}"
