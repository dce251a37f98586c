"""Decoding with a key-value cache: greedy, sampling or beam search, by one loop."""

from collections.abc import Sequence

import torch
from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.generation.decoder import Decoder
from pretrain.generation.logits_processors import uniform_draws, without_forbidden
from pretrain.generation.search import BeamSearch, Search
from pretrain.generation.settings import GenerationSettings
from pretrain.models.config.base import ModelConfig
from pretrain.models.encoder_decoder import EncoderDecoder
from pretrain.models.model import Model

# Examples that are decided leave the batch once this share of it, or less, is left: leaving costs a copy of the caches.
LEAVE_AT = 0.75


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
    must take the same number of steps. Raises UserError for settings that the model doesn't support.
    """
    settings = settings or GenerationSettings()
    _check(model, input_ids.size(1), settings)
    was_training = model.training
    model.eval()
    try:
        decoder = Decoder(model, input_ids, attention_mask)
        if settings.num_beams > 1:
            search: Search = BeamSearch(decoder.prompt, model.config, settings)
        else:
            numbers = range(len(input_ids)) if numbers is None else numbers
            draws = uniform_draws(settings, numbers).to(input_ids.device) if settings.temperature > 0.0 else None
            search = Search(decoder.prompt, model.config, settings, draws)
        return decode(decoder, search, model.config, settings, stop_early)
    finally:
        model.train(was_training)


def decode(
    decoder: Decoder, search: Search, config: ModelConfig, settings: GenerationSettings, stop_early: bool = True
) -> Tensor:
    """The texts (batch, longest) that `search` finds, as from `generate`.

    Probabilities count all rows of a padded vocabulary, as in training and in transformers; padding is never chosen.
    """
    tokens, history = decoder.prompt, decoder.history
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
        if settings.no_repeat_ngram_size:
            history = torch.cat([history, tokens], dim=1)
        if left <= LEAVE_AT * len(rows):
            result[rows] = search.texts
            stay = (~search.decided).nonzero()[:, 0]
            hypotheses = torch.arange(len(tokens), device=tokens.device).view(len(rows), -1)[stay].flatten()
            decoder.select(hypotheses)
            search.keep(stay)
            rows, tokens, history = rows[stay], tokens[hypotheses], history[hypotheses]
    result[rows] = search.texts
    ends = (result == config.eos_id).cumsum(dim=1) == 0
    return result[:, : int(ends.sum(dim=1).max()) + 1]


def _check(model: Model, length: int, settings: GenerationSettings) -> None:
    vocab_size, longest = model.config.vocab_size, model.config.longest_sequence
    assert vocab_size is not None
    if 2 * settings.num_beams > vocab_size:
        raise UserError(f"num_beams: {settings.num_beams} beams need twice as many ids, not {vocab_size}")
    if longest is None:
        return
    if length > longest:
        raise UserError(f"an input has {length} tokens, but the model takes {longest} at most")
    prompt = 1 if isinstance(model, EncoderDecoder) else length
    if prompt + settings.max_new_tokens - 1 > longest:  # the last token is not read again
        raise UserError(
            f"max_new_tokens: {settings.max_new_tokens} tokens after {prompt} exceed the {longest} that the model takes"
        )
