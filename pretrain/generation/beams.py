"""Beam search, with the rules of Hugging Face transformers."""

import torch
from torch import Tensor

from pretrain.config.models import ModelConfig
from pretrain.generation.decoders import Decoder
from pretrain.generation.logits_processors import without_forbidden
from pretrain.generation.settings import GenerationSettings

# Examples that are decided leave the batch once this share of it, or less, is left: leaving costs a copy of the caches.
LEAVE_AT = 0.75


def beam_search(decoder: Decoder, config: ModelConfig, settings: GenerationSettings, stop_early: bool) -> Tensor:
    """The best finished hypothesis of each row, (batch, longest): it ends with eos or is `max_new_tokens` long.

    Each row keeps its `num_beams` likeliest running hypotheses and its `num_beams` best finished ones. Each step
    considers the 2 · `num_beams` likeliest continuations of a row, so that enough remain if half of them end. Only
    those that end among the first `num_beams` become finished hypotheses. Scores are fp32. With `stop_early`, rows
    whose finished hypotheses can't be beaten leave the batch.
    """
    assert config.vocab_size is not None
    beams, most, penalty = settings.num_beams, settings.max_new_tokens, settings.length_penalty
    tokens, history = decoder.prompt, decoder.history
    batch, device = tokens.size(0), tokens.device
    result = torch.full((batch, most), config.pad_id, device=device)
    longest = torch.zeros(batch, dtype=torch.long, device=device)
    rows = torch.arange(batch, device=device)  # those still in the batch; all that follows is about them
    # log probabilities of the running hypotheses; before the first step there is one per row
    sums = torch.zeros(batch, 1, device=device)
    running = torch.full((batch, 1, most), config.pad_id, device=device)
    finished = torch.full((batch, beams, most), config.pad_id, device=device)
    worth = torch.full((batch, beams), -torch.inf, device=device)
    lengths = torch.zeros(batch, beams, dtype=torch.long, device=device)
    shut = torch.zeros(batch, 1, dtype=torch.bool, device=device)  # rows whose finished hypotheses stay as they are
    closed = shut  # rows whose finished hypotheses can't be beaten
    among_first = torch.arange(2 * beams, device=device) < beams

    for step in range(most):
        length = step + 1
        scores = decoder.step(tokens)[:, : config.vocab_size].float().log_softmax(dim=-1)
        scores = without_forbidden(scores, history, step, settings, config.eos_id)
        candidates, origin, token = continuations(scores, sums, 2 * beams)
        continued = _rows(running, origin)
        continued[:, :, step] = token
        ended = (token == config.eos_id) | (length == most)

        worth = torch.cat(
            [worth, (candidates / length**penalty).masked_fill(~(ended & among_first & ~shut), -torch.inf)], dim=1
        )
        worth, best = worth.topk(beams)
        finished = _rows(torch.cat([finished, continued], dim=1), best)
        lengths = torch.cat([lengths, torch.full_like(token, length)], dim=1).gather(1, best)

        sums, best = candidates.masked_fill(ended, -torch.inf).topk(beams)
        running, tokens, origin = _rows(continued, best), token.gather(1, best), origin.gather(1, best)
        worst = worth[:, -1:]
        reach = most if settings.early_stopping == "never" and penalty > 0.0 else length
        closed = closed | (sums[:, :1] / reach**penalty <= worst)
        shut = closed | (worst > -torch.inf) if settings.early_stopping is True else closed
        if length == most:
            break

        decoder.branch(origin)
        if settings.no_repeat_ngram_size:
            before = history.view(len(rows), -1, history.size(1))
            history = torch.cat([_rows(before, origin), tokens[..., None]], dim=2).flatten(0, 1)
        left = (~shut).sum() if stop_early else len(rows)
        if left == 0:
            break
        if left <= LEAVE_AT * len(rows):
            result[rows], longest[rows] = finished[:, 0], lengths[:, 0]
            stay = (~shut[:, 0]).nonzero()[:, 0]
            decoder.keep(stay)
            history = history.view(len(rows), -1, history.size(1))[stay].flatten(0, 1)
            rows, tokens, sums, running, finished = rows[stay], tokens[stay], sums[stay], running[stay], finished[stay]
            worth, lengths, shut, closed = worth[stay], lengths[stay], shut[stay], closed[stay]
        tokens = tokens.view(-1, 1)

    result[rows], longest[rows] = finished[:, 0], lengths[:, 0]
    return result[:, : int(longest.max())]


def continuations(scores: Tensor, sums: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `number` likeliest continuations of each example: their log probabilities, hypotheses and tokens, each
    (examples, number), for log probabilities of tokens, `scores` (hypotheses, vocabulary), and of hypotheses, `sums`
    (examples, width)."""
    examples, width = sums.shape
    values, tokens = scores.topk(number)
    values = values.view(examples, width, number) + sums[..., None]
    candidates, indices = values.flatten(1).topk(number)
    return candidates, indices // number, tokens.view(examples, -1).gather(1, indices)


def _rows(hypotheses: Tensor, chosen: Tensor) -> Tensor:
    """Selects from hypotheses (batch, n, length) those `chosen` (batch, k) in each row: (batch, k, length)."""
    return hypotheses.gather(1, chosen[..., None].expand(-1, -1, hypotheses.size(2)))
