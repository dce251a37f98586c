"""The interface between decoding and the models of every family."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.generation.incremental import Incremental, PackedModel
from pretrain.models.attention import KeyValueCache, MemoryCache
from pretrain.models.model import Model
from pretrain.models.stacks import EncoderDecoder

NO_TOKEN = -1  # in a history: padding before a prompt

Caches = Any  # key-value caches, in each family's own lists and tuples


@runtime_checkable
class CausalModel(Protocol):
    """GPT-2, … With a cache, ids follow its tokens, and the mask (batch, past length + length) covers both."""

    config: Any

    def decode(
        self, input_ids: Tensor, cache: Caches | None = None, attention_mask: Tensor | None = None
    ) -> Tensor: ...

    def new_cache(self) -> Caches: ...


class Decoder(Protocol):
    """The decoding state of a batch of examples, each with the same number of hypotheses, at first one.

    Hypotheses are rows in the order of their examples. `prompt` (examples, length): the tokens to start from, padded to
    one length. `history`: the same, NO_TOKEN at padding.
    """

    prompt: Tensor
    history: Tensor

    def step(self, tokens: Tensor) -> Tensor:
        """Appends `tokens` (hypotheses, new) and returns the logits (hypotheses, vocabulary) of the next token."""
        ...

    def branch(self, origin: Tensor) -> None:
        """Hypothesis j of an example goes on from hypothesis `origin[example, j]` of it, (examples, hypotheses)."""
        ...

    def keep(self, examples: Tensor) -> None:
        """Drops all examples but these (n,)."""
        ...


def start(
    model: Model,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    packed: PackedModel | None = None,
    plain: bool = False,
) -> Decoder:
    """Starts decoding inputs (examples, length); a causal model's inputs are prompts, padded on the left.

    `attention_mask`, of the same shape, is nonzero at real tokens (None: all). `packed`: the model's packed copy, if
    there is one already. `plain`: by the model's own code, which also serves families that have no faster form. Raises
    UserError for a family that doesn't generate.
    """
    packed = None if plain else packed or PackedModel.of(model)
    if isinstance(model, EncoderDecoder):
        if packed:
            return _FastEncoderDecoder(packed, input_ids, attention_mask)
        return _EncoderDecoder(model, input_ids, attention_mask)
    if isinstance(model, CausalModel):
        if packed:
            return _FastCausal(packed, input_ids, attention_mask)
        return _Causal(model, input_ids, attention_mask)
    raise UserError(f"models of the family {model.config.family} don't generate text")


class _FastEncoderDecoder(Incremental):
    def __init__(self, packed: PackedModel, input_ids: Tensor, attention_mask: Tensor | None):
        model: Any = packed.model
        super().__init__(packed, len(input_ids), encode(model, input_ids, attention_mask), attention_mask)
        self.prompt = self.history = torch.full_like(input_ids[:, :1], model.config.decoder_start_id)


class _FastCausal(Incremental):
    def __init__(self, packed: PackedModel, input_ids: Tensor, attention_mask: Tensor | None):
        super().__init__(packed, len(input_ids))
        self.prompt, self.history, self.mask = input_ids, _history(input_ids, attention_mask), attention_mask

    def step(self, tokens: Tensor) -> Tensor:
        return super().step(tokens) if self.position else self.read(tokens, self.mask)


def encode(model: EncoderDecoder, input_ids: Tensor, mask: Tensor | None) -> Tensor:
    """`model.encode` on a CPU without most of the padding: rows of similar lengths are encoded together.

    The states of padding are zeros instead.
    """
    if mask is None or input_ids.device.type != "cpu" or (mask[:, 1:] > mask[:, :-1]).any():
        return model.encode(input_ids, mask)
    states = None
    lengths = mask.bool().sum(dim=1)
    for step in (sixteenths := (lengths + 15) // 16).unique():
        rows = (sixteenths == step).nonzero().squeeze(1)
        length = int(lengths[rows].max())
        part = model.encode(input_ids[rows, :length], mask[rows, :length])
        if states is None:
            states = part.new_zeros(*input_ids.shape, part.size(-1))
        states[rows, :length] = part
    assert states is not None
    return states


class _Plain:
    """Decoding by the model's own code; `_select` keeps the state of some rows."""

    model: Any
    cache: Caches
    mask: Tensor | None
    examples: int
    hypotheses: int

    def branch(self, origin: Tensor) -> None:
        self._select(_rows(origin, self.hypotheses))

    def keep(self, examples: Tensor) -> None:
        self._select(_rows_of(examples, self.hypotheses // self.examples), moved=True)
        self.examples = len(examples)

    def _select(self, rows: Tensor, moved: bool = False) -> None:
        for cache in _caches(self.cache):
            cache.select(rows)
        self.hypotheses = len(rows)
        self.mask = None if self.mask is None else self.mask[rows]


class _EncoderDecoder(_Plain):
    def __init__(self, model: EncoderDecoder, input_ids: Tensor, attention_mask: Tensor | None):
        self.model, self.mask, self.cache = model, attention_mask, model.new_cache()
        self.states = model.encode(input_ids, attention_mask)
        self.examples = self.hypotheses = len(input_ids)
        self.prompt = self.history = torch.full_like(input_ids[:, :1], model.config.decoder_start_id)

    def step(self, tokens: Tensor) -> Tensor:
        return self.model.decode(tokens, self.states, self.mask, self.cache)[:, -1]

    def _select(self, rows: Tensor, moved: bool = False) -> None:
        """The hypotheses of an example share its input, so that moves only with `keep` or if their number changes."""
        if moved or len(rows) != self.hypotheses:
            super()._select(rows)
            self.states = self.states[rows]
            return
        for cache in _caches(self.cache):
            if not isinstance(cache, MemoryCache):
                cache.select(rows)


class _Causal(_Plain):
    def __init__(self, model: CausalModel, input_ids: Tensor, attention_mask: Tensor | None):
        self.model, self.mask, self.cache = model, attention_mask, model.new_cache()
        self.prompt, self.history = input_ids, _history(input_ids, attention_mask)
        self.examples = self.hypotheses = len(input_ids)
        self.begun = False

    def step(self, tokens: Tensor) -> Tensor:
        if self.mask is not None and self.begun:
            self.mask = torch.cat([self.mask, torch.ones_like(tokens, dtype=self.mask.dtype)], dim=1)
        self.begun = True
        return self.model.decode(tokens, self.cache, self.mask)[:, -1]


def _history(prompts: Tensor, mask: Tensor | None) -> Tensor:
    return prompts if mask is None else prompts.masked_fill(mask == 0, NO_TOKEN)


def _rows(origin: Tensor, hypotheses: int) -> Tensor:
    """The rows of the hypotheses `origin` (examples, n), of `hypotheses` in the order of examples."""
    examples = origin.size(0)
    return (origin + hypotheses // examples * torch.arange(examples, device=origin.device)[:, None]).flatten()


def _rows_of(examples: Tensor, width: int) -> Tensor:
    """All rows of these `examples`, which have `width` hypotheses each."""
    return (examples[:, None] * width + torch.arange(width, device=examples.device)).flatten()


def _caches(caches: Caches) -> Iterator[KeyValueCache]:
    if isinstance(caches, KeyValueCache):
        yield caches
    else:
        for part in caches:
            yield from _caches(part)
