"""A model of any family with its key-value caches, as a state of decoding."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.models.attention import KeyValueCache, MemoryCache
from pretrain.models.encoder_decoder import EncoderDecoder
from pretrain.models.model import Model

NO_TOKEN = -1  # in a history: padding before a prompt


class Decoder:
    """Hypotheses are rows in the order of their examples, each of which has the same number of them, at first one.

    `prompt` (examples, length): the tokens to start from, padded to one length. `history`: the same, NO_TOKEN at
    padding.
    """

    def __init__(self, model: Model, input_ids: Tensor, attention_mask: Tensor | None):
        """Reads inputs (examples, length); a causal model's inputs are prompts, padded on the left.

        `attention_mask`, of the same shape, is nonzero at real tokens (None: all). Raises UserError for a family that
        doesn't generate.
        """
        if not hasattr(model, "new_cache"):
            raise UserError(f"models of the family {model.config.family} don't generate text")
        self._model: Any = model
        self._cache, self._mask, self._rows = self._model.new_cache(), attention_mask, len(input_ids)
        self._states: Tensor | None = None
        if isinstance(model, EncoderDecoder):
            self._states = model.encode(input_ids, attention_mask)
            self.prompt = self.history = torch.full_like(input_ids[:, :1], model.config.decoder_start_id)
        else:
            self.prompt = input_ids
            self.history = input_ids if attention_mask is None else input_ids.masked_fill(attention_mask == 0, NO_TOKEN)

    def step(self, tokens: Tensor) -> Tensor:
        """Appends `tokens` (hypotheses, new) and returns the logits (hypotheses, padded vocabulary) of the next one."""
        if self._states is not None:
            return self._model.decode(tokens, self._states, self._mask, self._cache)[:, -1]
        logits = self._model.decode(tokens, self._cache, self._mask)[:, -1]
        if self._mask is not None:
            self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        return logits

    def select(self, rows: Tensor) -> None:
        """Hypothesis i goes on from hypothesis `rows[i]`.

        While the number of hypotheses stays, each goes on from one of the same example, which shares its input.
        """
        moved = len(rows) != self._rows
        for cache in _caches(self._cache):
            if moved or not isinstance(cache, MemoryCache):
                cache.select(rows)
        if moved:
            self._rows = len(rows)
            self._states = None if self._states is None else self._states[rows]
            self._mask = None if self._mask is None else self._mask[rows]


def _caches(caches: Any) -> Iterator[KeyValueCache]:
    """All caches in a family's own lists and tuples."""
    if isinstance(caches, KeyValueCache):
        yield caches
    else:
        for part in caches:
            yield from _caches(part)
