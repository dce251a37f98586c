"""Decoding with a key-value cache: greedy, sampling or beam search."""

from collections.abc import Sequence

import torch
from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.config.models import ModelConfig
from pretrain.generation.beams import LEAVE_AT, beam_search
from pretrain.generation.decoders import Decoder, start
from pretrain.generation.incremental import PackedModel
from pretrain.generation.logits_processors import sample, uniform_draws, warped, without_forbidden
from pretrain.generation.settings import GenerationSettings
from pretrain.models.encoder_decoder import EncoderDecoder
from pretrain.models.model import Model


def generate(
    model: Model,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    settings: GenerationSettings | None = None,
    *,
    numbers: Sequence[int] | None = None,
    stop_early: bool = True,
    packed: PackedModel | None = None,
) -> Tensor:
    """Generates ids (batch, at most max_new_tokens) for inputs (batch, length): each row ends with eos, then padding.

    Inputs are for the encoder, or prompts of a causal model, padded on the left. `attention_mask`, of the same shape,
    is nonzero at real tokens. The seed and a row's number (`numbers`, by default from 0) determine its samples, in any
    batch. `stop_early=False` always runs `max_new_tokens` steps with all rows and the model's own code: ranks that
    decode together under ZeRO-3 must take the same number of steps. `packed`: the copy to decode with, for a
    model that doesn't change between calls. Raises UserError for settings that the model doesn't support.
    """
    settings = settings or GenerationSettings()
    _check(model, input_ids.size(1), settings)
    draws = None
    if settings.temperature > 0.0:
        draws = uniform_draws(settings, range(len(input_ids)) if numbers is None else numbers).to(input_ids.device)
    packed = (packed or PackedModel.of(model)) if stop_early else None
    was_training = model.training
    model.eval()
    try:
        # the model's own code may gather weights under ZeRO-3, which training uses later
        with torch.no_grad(), torch.inference_mode(packed is not None):
            decoder = start(model, input_ids, attention_mask, packed, plain=packed is None)
            if settings.num_beams > 1:
                found = beam_search(decoder, model.config, settings, stop_early)
            else:
                found = _token_by_token(decoder, model.config, settings, draws, stop_early)
        return found.clone()  # an ordinary tensor
    finally:
        model.train(was_training)


def _token_by_token(
    decoder: Decoder, config: ModelConfig, settings: GenerationSettings, draws: Tensor | None, stop_early: bool
) -> Tensor:
    """Picks the likeliest tokens or, with `draws` (batch, max_new_tokens), samples them."""
    tokens, history = decoder.prompt, decoder.history
    batch, most = len(tokens), settings.max_new_tokens
    result = torch.full((batch, most), config.pad_id, device=tokens.device)
    rows = torch.arange(batch, device=tokens.device)  # those still in the batch; all that follows is about them
    generated = result.clone()
    ended = torch.zeros_like(tokens[:, :1], dtype=torch.bool)
    for step in range(most):
        logits = decoder.step(tokens)[:, : config.vocab_size].float()
        logits = without_forbidden(logits, history, step, settings, config.eos_id)
        if draws is None:
            tokens = logits.argmax(dim=1, keepdim=True)
        else:
            tokens = sample(warped(logits, settings), draws[rows, step, None])
        tokens = tokens.masked_fill(ended, config.pad_id)
        generated[:, step : step + 1] = tokens
        if settings.no_repeat_ngram_size:
            history = torch.cat([history, tokens], dim=1)
        ended = ended | (tokens == config.eos_id)
        left = int((~ended).sum()) if stop_early else batch
        if left == 0:
            break
        if left <= LEAVE_AT * len(rows):
            result[rows] = generated
            stay = (~ended[:, 0]).nonzero()[:, 0]
            decoder.keep(stay)
            rows, tokens, history, ended = rows[stay], tokens[stay], history[stay], ended[stay]
            generated = generated[stay]
    result[rows] = generated
    return result[:, : step + 1]


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
