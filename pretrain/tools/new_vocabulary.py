"""`pretrain adapt --tokenizer`: gives a model the vocabulary of a corpus.

A new token starts as the mean of the old tokens of its text (Gee et al. 2022, "Fast Vocabulary Transfer for Language
Model Compression"). Where there are none, it is drawn with the mean and the standard deviation of the old tokens of
text (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.base.errors import UserError
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.text_model import TextModel
from data_pipeline.text.vocabulary import Vocabulary
from pretrain.engine.checkpoint.trained import save_weights
from pretrain.models import ModelConfig, meta_model
from pretrain.tools.adapt import read, refuse_existing
from pretrain.training.prepare import with_tokenizer_ids

NEW_ROWS = ("mean", "random")
SHARED, ROLE, MEAN, DRAWN, PADDING = "shared", "role", "mean", "drawn", "padding"
_ROLES = ("pad", "mask", "unk", "bos", "eos")  # the last one counts if an id has several
_UNIT = 128  # rows are a multiple of this number at most, if their number changes


class Row(NamedTuple):
    """How the row of a new id starts: as the mean of the rows `old`; () if it is drawn. `sort`: why."""

    sort: str
    old: tuple[int, ...] = ()


def adapt(model: Path, out: Path, corpus: str, new_rows: str, seed: int) -> list[str]:
    """Writes the checkpoint `out` of step 0: `model` with the tokenizer of `corpus`. Returns lines that say how many
    rows of its matrices are kept, computed and drawn.

    `model`: a directory that transformers saved, a checkpoint or a run. `new_rows`: one of NEW_ROWS. `seed`: for rows
    that are drawn.
    """
    if new_rows not in NEW_ROWS:
        raise UserError(f"--new-rows: expected {' or '.join(NEW_ROWS)}, got {new_rows!r}")
    refuse_existing(out)
    opened = open_corpus(corpus)
    config, state, old = read(model)
    new = opened.tokenizer
    adapted, _ = with_tokenizer_ids(config, opened)
    if new.size != old.size:
        unit = min(config.pad_vocab_to_multiple_of, _UNIT)
        adapted = adapted.model_copy(update={"pad_vocab_to_multiple_of": unit})
    names = [name for name in of_tokens(config) if name in state]
    rows = rows_of(old, new, config.padded_vocab_size, adapted.padded_vocab_size, new_rows == "mean")
    generator = torch.Generator().manual_seed(seed)
    changed = {name: renewed(state[name], rows, old.vocabulary.text, generator) for name in names}
    save_weights(adapted, {**state, **changed}, new, out)
    return report(rows, config.padded_vocab_size, names)


def of_tokens(config: ModelConfig) -> list[str]:
    """The names of the parameters and buffers with a row, or an element, for each id."""
    longer = config.padded_vocab_size + config.pad_vocab_to_multiple_of
    models = [meta_model(one) for one in (config, config.model_copy(update={"vocab_size": longer}))]
    here, there = ({name: one.shape for name, one in (*m.named_parameters(), *m.named_buffers())} for m in models)
    return [name for name, shape in here.items() if shape != there[name]]


def rows_of(old: Tokenizer, new: Tokenizer, old_size: int, new_size: int, mean: bool) -> list[Row]:
    """How each of the `new_size` rows starts; the last rows may pad the vocabulary, as in the model with
    `old_size` rows. `mean`: tokens that `old` lacks are the mean of its tokens of their text; otherwise they are drawn.

    Raises UserError if the mean is asked for and the new tokens have no text.
    """
    if mean and not any(new.model.token_bytes):
        raise UserError(
            f"--tokenizer: tokens of the kind {new.model.kind} have no text that the model's tokenizer could split; "
            "--new-rows random draws their rows"
        )
    roles, shared = by_role(old.vocabulary, new.vocabulary), by_text(old.model, new.model)
    of_byte = {content: id_ for id_, content in enumerate(old.model.token_bytes) if len(content) == 1}
    found = []
    for id_, content in enumerate([*new.model.token_bytes, *[b""] * (new.size - new.vocab_size)]):
        if id_ in roles:
            found.append(Row(ROLE, (roles[id_],)))
        elif id_ in shared:
            found.append(Row(SHARED, (shared[id_],)))
        else:
            pieces = pieces_of(old, content, of_byte) if mean and content else []
            found.append(Row(MEAN, tuple(pieces)) if pieces else Row(DRAWN))
    padding = [*range(old.size, old_size)][: new_size - new.size]
    found += [Row(PADDING, (row,)) for row in padding]
    return found + [Row(PADDING)] * (new_size - len(found))


def by_role(old: Vocabulary, new: Vocabulary) -> dict[int, int]:
    """The old id of each new id with the same role: a special token of the same name, sentinel k, and pad, EOS, unk,
    BOS and mask. BOS is mapped to the old decoder's start token."""
    found = {id_: old.special[name] for name, id_ in new.special.items() if name in old.special}
    found |= {new.sentinel(number): old.sentinel(number) for number in range(min(old.sentinels, new.sentinels))}
    found[new.start] = old.start
    for role in _ROLES:
        here, there = getattr(new, role), getattr(old, role)
        if here is not None and there is not None:
            found[here] = there
    return found


def by_text(old: TextModel, new: TextModel) -> dict[int, int]:
    """The old id of each new id with the same text. A byte that spells characters without a token is first looked for
    among such bytes, and other tokens among others."""
    if (old.kind, old.sha256) == (new.kind, new.sha256):
        return {id_: id_ for id_ in range(new.size)}
    ids: dict[object, int] = {}
    for id_, content in enumerate(old.token_bytes):
        if content:
            ids.setdefault((content, id_ in old.byte_ids), id_)
    found = {}
    for id_, content in enumerate(new.token_bytes):
        is_byte = id_ in new.byte_ids
        places = (ids.get((content, one)) for one in (is_byte, not is_byte))
        if (first := next((place for place in places if place is not None), None)) is not None:
            found[id_] = first
    return found


def pieces_of(old: Tokenizer, content: bytes, of_byte: Mapping[bytes, int]) -> list[int]:
    """The old ids of a token's `content` within a text; none if the old tokenizer doesn't know all of it.

    `of_byte`: the old tokens of single bytes, which are the pieces of a part of a character.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError:
        spelled = [bytes([byte]) for byte in content]
        return [of_byte[byte] for byte in spelled] if of_byte.keys() >= {*spelled} else []
    try:
        ids = old.model.encode_rest(text)
    except UserError:  # a tokenizer of symbols refuses text between them
        return []
    return [] if old.vocabulary.unk in ids else ids


def renewed(tensor: Tensor, rows: Sequence[Row], text: tuple[int, int], generator: torch.Generator) -> Tensor:
    """The `tensor` (old ids, …) with new rows (new ids, …). `text`: the range of old ids that are text, whose mean and
    standard deviation rows have that are drawn."""
    old = tensor.reshape(len(tensor), -1)
    new = old[[row.old[0] if row.old else 0 for row in rows]]
    if means := [id_ for id_, row in enumerate(rows) if len(row.old) > 1]:
        pieces = [rows[id_].old for id_ in means]
        starts = torch.tensor([0, *map(len, pieces)]).cumsum(0)[:-1]
        new[means] = F.embedding_bag(torch.tensor([id_ for one in pieces for id_ in one]), old, starts, mode="mean")
    if drawn := [id_ for id_, row in enumerate(rows) if not row.old]:
        std, mean = torch.std_mean(old[slice(*text)], dim=0, correction=0)
        new[drawn] = mean + std * torch.randn(len(drawn), old.size(1), generator=generator)
    return new.reshape(len(rows), *tensor.shape[1:])


def report(rows: Sequence[Row], old_size: int, names: Sequence[str]) -> list[str]:
    """A line for each sort of rows, and how many of the old rows are left out."""
    pieces = [len(row.old) for row in rows if row.sort == MEAN]
    meanings = {
        SHARED: "kept: tokens with the same text",
        ROLE: "kept: special tokens and sentinels with the same role",
        MEAN: f"the mean of the old tokens of their text, {sum(pieces) / max(1, len(pieces)):.1f} on average",
        DRAWN: "drawn",
        PADDING: "beyond the tokenizer's ids, as padding",
    }
    counts = Counter(row.sort for row in rows)
    lines = [f"{counts[sort]:>9,}  {meaning}" for sort, meaning in meanings.items() if counts[sort]]
    unused = old_size - len({id_ for row in rows for id_ in row.old})
    return [
        f"{len(rows):,} rows instead of {old_size:,} in {', '.join(names)}:",
        *lines,
        f"{unused:>9,}  old rows are left out",
    ]
