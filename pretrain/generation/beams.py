"""Beam search, with the rules of Hugging Face transformers."""

import torch
from torch import Tensor

from pretrain.generation.decoders import Decoder
from pretrain.generation.forbidden import without_forbidden
from pretrain.generation.settings import GenerationSettings
from pretrain.models.config.base import ModelConfig


def beam_search(decoder: Decoder, config: ModelConfig, settings: GenerationSettings, stop_early: bool) -> Tensor:
    """The best finished hypothesis of each row, (batch, longest): it ends with eos or is `max_new_tokens` long.

    Each row keeps its `num_beams` likeliest running hypotheses and its `num_beams` best finished ones. Each step
    considers the 2 · `num_beams` likeliest continuations of a row, so that enough remain if half of them end. Only
    those that end among the first `num_beams` become finished hypotheses. Scores are fp32.
    """
    assert config.vocab_size is not None
    vocabulary, beams, most, penalty = (
        config.vocab_size,
        settings.num_beams,
        settings.max_new_tokens,
        settings.length_penalty,
    )
    tokens, history = decoder.prompt, decoder.history
    batch, device = tokens.size(0), tokens.device
    # log probabilities of the running hypotheses; before the first step there is one per row
    sums = torch.zeros(batch, 1, device=device)
    running = torch.full((batch, 1, most), config.pad_id, device=device)
    finished = torch.full((batch, beams, most), config.pad_id, device=device)
    worth = torch.full((batch, beams), -torch.inf, device=device)
    lengths = torch.zeros(batch, beams, dtype=torch.long, device=device)
    full = torch.zeros(batch, 1, dtype=torch.bool, device=device)
    closed = torch.zeros(batch, 1, dtype=torch.bool, device=device)  # rows whose finished hypotheses can't be beaten
    first_of_row = torch.arange(batch, device=device)[:, None]

    for step in range(most):
        length = step + 1
        scores = decoder.step(tokens)[:, :vocabulary].float().log_softmax(dim=-1)
        scores = without_forbidden(scores, history, step, settings, config.eos_id)
        width = sums.size(1)
        scores = (scores.view(batch, width, vocabulary) + sums[..., None]).flatten(1)
        candidates, places = scores.topk(2 * beams)
        origin, token = places // vocabulary, places % vocabulary
        continued = _rows(running, origin)
        continued[:, :, step] = token
        ended = (token == config.eos_id) | (length == most)

        shut = closed | full if settings.early_stopping is True else closed
        counts = ended & (torch.arange(2 * beams, device=device) < beams) & ~shut
        worth = torch.cat([worth, (candidates / length**penalty).masked_fill(~counts, -torch.inf)], dim=1)
        worth, best = worth.topk(beams)
        finished = _rows(torch.cat([finished, continued], dim=1), best)
        lengths = torch.cat([lengths, torch.full_like(token, length)], dim=1).gather(1, best)

        sums, best = candidates.masked_fill(ended, -torch.inf).topk(beams)
        running, tokens = _rows(continued, best), token.gather(1, best).view(-1, 1)
        rows = (origin.gather(1, best) + width * first_of_row).flatten()
        decoder.select(rows)
        history = torch.cat([history[rows], tokens], dim=1)

        worst = worth[:, -1:]
        full = worst > -torch.inf
        reach = most if settings.early_stopping == "never" and penalty > 0.0 else length
        closed |= sums[:, :1] / reach**penalty <= worst
        if stop_early and ((closed | full) if settings.early_stopping is True else closed).all():
            break

    return finished[:, 0, : int(lengths[:, 0].max())]


def _rows(hypotheses: Tensor, chosen: Tensor) -> Tensor:
    """Selects from hypotheses (batch, n, length) those `chosen` (batch, k) in each row: (batch, k, length)."""
    return hypotheses.gather(1, chosen[..., None].expand(-1, -1, hypotheses.size(2)))
