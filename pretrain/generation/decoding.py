"""Decoding with key-value caches: greedy, sampling or beam search, by one loop for every family."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.generation.search import BeamSearch, Search, without_forbidden
from pretrain.generation.settings import GenerationSettings
from pretrain.models.attention import KeyValueCache, MemoryCache
from pretrain.models.model import Model
from pretrain.models.stacks import EncoderDecoder

# Examples that are decided leave the batch once this share of it, or less, is left: leaving costs a copy of the caches.
LEAVE_AT = 0.75
NO_TOKEN = -1  # in a history: padding before a prompt


@torch.no_grad()
def generate(
    model: Model,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    settings: GenerationSettings | None = None,
    *,
    numbers: Sequence[int] | None = None,
    stop_early: bool = True,
) -> Tensor:
    """Generates ids (batch, at most max_new_tokens) for inputs (batch, length): each row ends with eos, then padding.

    Inputs are for the encoder, or prompts of a causal model, padded on the left. `attention_mask`, of the same shape,
    is nonzero at real tokens. The seed and a row's number (`numbers`, by default from 0) determine its samples, in any
    batch. `stop_early=False` always runs `max_new_tokens` steps with all rows: ranks that decode together under ZeRO-3
    must take the same number of steps. Probabilities count all rows of a padded vocabulary, as in training and in
    transformers, but padding is never chosen. Raises UserError for settings that the model doesn't support.
    """
    settings, config = settings or GenerationSettings(), model.config
    _check(model, input_ids.size(1), settings)
    was_training = model.training
    model.eval()
    try:
        decoder = Decoder(model, input_ids, attention_mask)
        tokens, history = decoder.prompt, decoder.history
        numbers = range(len(tokens)) if numbers is None else numbers
        search = (BeamSearch if settings.num_beams > 1 else Search)(tokens, config, settings, numbers)
        result = search.texts.clone()
        rows = torch.arange(len(tokens), device=tokens.device)  # the examples still in the batch
        for step in range(settings.max_new_tokens):
            scores = decoder.step(tokens).float()
            scores = scores.log_softmax(dim=1) if settings.num_beams > 1 else scores
            scores = without_forbidden(scores[:, : config.vocab_size], history, step, settings, config.eos_id)
            tokens, origin = search.choose(scores, step)
            left = int((~search.decided).sum()) if stop_early else len(rows)
            if left == 0:
                break
            if origin is not None:
                decoder.select(origin)
                history = history[origin]
            history = torch.cat([history, tokens], dim=1)
            if left <= LEAVE_AT * len(rows):
                result[rows] = search.texts
                stay = (~search.decided).nonzero()[:, 0]
                hypotheses = torch.arange(len(tokens), device=tokens.device).view(len(rows), -1)[stay].flatten()
                decoder.select(hypotheses)
                search.keep(stay)
                rows, tokens, history = rows[stay], tokens[hypotheses], history[hypotheses]
        result[rows] = search.texts
        before_eos = (result == config.eos_id).cumsum(dim=1) == 0
        return result[:, : int(before_eos.sum(dim=1).max()) + 1]
    finally:
        model.train(was_training)


def _check(model: Model, length: int, settings: GenerationSettings) -> None:
    vocab_size, longest = model.config.vocab_size, model.config.longest_sequence
    assert vocab_size is not None
    if 2 * settings.num_beams > vocab_size:
        raise UserError(f"num_beams: {settings.num_beams} beams need twice as many ids, not {vocab_size}")
    if longest is not None and length > longest:
        raise UserError(f"an input has {length} tokens, but the model takes {longest} at most")
    prompt = 1 if isinstance(model, EncoderDecoder) else length
    if longest is not None and prompt + settings.max_new_tokens - 1 > longest:  # the last token is not read again
        raise UserError(
            f"max_new_tokens: {settings.max_new_tokens} tokens after {prompt} exceed the {longest} that the model takes"
        )


class Decoder:
    """A model with its caches, for a batch of examples.

    Hypotheses are rows in the order of their examples, each of which has the same number of them, at first one.
    `prompt` (examples, length): the tokens to start from. `history`: the same, NO_TOKEN at padding.
    """

    def __init__(self, model: Any, input_ids: Tensor, attention_mask: Tensor | None):
        """Takes the inputs of `generate`. Raises UserError for a model that doesn't generate."""
        if not hasattr(model, "new_cache"):
            raise UserError(f"models of the family {model.config.family} don't generate text")
        self._model, self._cache = model, model.new_cache()
        self._mask, self._rows = attention_mask, len(input_ids)
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
        """Hypothesis i goes on from hypothesis `rows[i]`, of the same example, which shares its input, unless their
        number changes."""
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
