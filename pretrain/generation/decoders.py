"""The interface between decoding and the models of every family."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.models.attention import KeyValueCache, MemoryCache
from pretrain.models.encoder_decoder import EncoderDecoder
from pretrain.models.model import Model

NO_TOKEN = -1  # in a history: padding before a prompt

Caches = Any  # key-value caches, in each family's own lists and tuples


@runtime_checkable
class CausalModel(Protocol):
    """GPT-2, … With a cache, ids follow its tokens, and the mask (batch, held + length) covers both."""

    config: Any

    def decode(
        self, input_ids: Tensor, cache: Caches | None = None, attention_mask: Tensor | None = None
    ) -> Tensor: ...

    def new_cache(self) -> Caches: ...


class Decoder(Protocol):
    """The decoding state of a batch of rows.

    `prompt` (rows, length): the tokens to start from, padded to one length. `history`: the same, NO_TOKEN at padding.
    """

    prompt: Tensor
    history: Tensor

    def step(self, tokens: Tensor) -> Tensor:
        """Appends `tokens` (rows, new) and returns the logits (rows, vocabulary) of the next token."""
        ...

    def select(self, rows: Tensor) -> None:
        """Keeps only these `rows` (n,), in this order; a row may be repeated."""
        ...


def start(model: Model, input_ids: Tensor, attention_mask: Tensor | None) -> Decoder:
    """Starts decoding inputs (rows, length); a causal model's inputs are prompts, padded on the left.

    `attention_mask`, of the same shape, is nonzero at real tokens (None: all). Raises UserError for a family that
    doesn't generate.
    """
    if isinstance(model, EncoderDecoder):
        return _EncoderDecoder(model, input_ids, attention_mask)
    if isinstance(model, CausalModel):
        return _Causal(model, input_ids, attention_mask)
    raise UserError(f"models of the family {model.config.family} don't generate text")


class _EncoderDecoder:
    def __init__(self, model: EncoderDecoder, input_ids: Tensor, attention_mask: Tensor | None):
        self.model, self.mask, self.cache = model, attention_mask, model.new_cache()
        self.states = model.encode(input_ids, attention_mask)
        self.examples = torch.arange(input_ids.size(0), device=input_ids.device)
        self.prompt = self.history = torch.full_like(input_ids[:, :1], model.config.decoder_start_id)

    def step(self, tokens: Tensor) -> Tensor:
        return self.model.decode(tokens, self.states, self.mask, self.cache)[:, -1]

    def select(self, rows: Tensor) -> None:
        """Moves the encoded input only if a row changes to another example: beams of one example share it."""
        examples = self.examples[rows]
        moved = not torch.equal(examples, self.examples)
        for cache in _caches(self.cache):
            if moved or not isinstance(cache, MemoryCache):
                cache.select(rows)
        if moved:
            self.examples, self.states = examples, self.states[rows]
            self.mask = None if self.mask is None else self.mask[rows]


class _Causal:
    def __init__(self, model: CausalModel, input_ids: Tensor, attention_mask: Tensor | None):
        self.model, self.mask, self.cache = model, attention_mask, model.new_cache()
        self.prompt = self.history = input_ids
        if attention_mask is not None:
            self.history = input_ids.masked_fill(attention_mask == 0, NO_TOKEN)
        self.held = 0

    def step(self, tokens: Tensor) -> Tensor:
        if self.mask is not None and self.held:
            self.mask = torch.cat([self.mask, torch.ones_like(tokens, dtype=self.mask.dtype)], dim=1)
        self.held += tokens.size(1)
        return self.model.decode(tokens, self.cache, self.mask)[:, -1]

    def select(self, rows: Tensor) -> None:
        for cache in _caches(self.cache):
            cache.select(rows)
        self.mask = None if self.mask is None else self.mask[rows]


def _caches(held: Caches) -> Iterator[KeyValueCache]:
    if isinstance(held, KeyValueCache):
        yield held
    else:
        for part in held:
            yield from _caches(part)
