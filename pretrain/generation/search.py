"""Texts that grow by a token a step: the likeliest one, a sample, or several by beam search with transformers' rules."""

import torch
from torch import Tensor

from pretrain.generation.logits_processors import sample, warped
from pretrain.generation.settings import GenerationSettings
from pretrain.models.config.base import ModelConfig


class Search:
    """One text for each example: its likeliest tokens or, with `draws` (examples, max_new_tokens), samples.

    The first axis of every tensor is that of the examples. `decided` (examples,): what comes changes `texts` no more.
    """

    def __init__(self, prompt: Tensor, config: ModelConfig, settings: GenerationSettings, draws: Tensor | None = None):
        self.settings, self.eos, self.pad, self.draws = settings, config.eos_id, config.pad_id, draws
        self.texts = prompt.new_full((len(prompt), settings.max_new_tokens), config.pad_id)
        self.decided = torch.zeros_like(prompt[:, 0], dtype=torch.bool)

    def choose(self, scores: Tensor, step: int) -> tuple[Tensor, Tensor | None]:
        """The next tokens (hypotheses, 1), for scores (hypotheses, vocabulary) of all; and the hypotheses
        (hypotheses,) that they continue, None: each its own."""
        if self.draws is None:
            tokens = scores.argmax(dim=1)
        else:
            tokens = sample(warped(scores, self.settings), self.draws[:, step, None])[:, 0]
        self.texts[:, step] = tokens = tokens.masked_fill(self.decided, self.pad)
        self.decided = self.decided | (tokens == self.eos)
        return tokens[:, None], None

    def keep(self, examples: Tensor) -> None:
        """Drops all examples but these (n,)."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[examples])


class BeamSearch(Search):
    """Each example keeps its `num_beams` likeliest running hypotheses and its `num_beams` best finished ones.

    Each step considers the 2 · `num_beams` likeliest continuations of an example, so that enough remain if half of them
    end. Only those that end among the first `num_beams` become finished hypotheses. Scores are log probabilities.
    """

    def __init__(self, prompt: Tensor, config: ModelConfig, settings: GenerationSettings):
        super().__init__(prompt, config, settings)
        self.sums = torch.zeros_like(prompt[:, :1], dtype=torch.float32)  # log probabilities of running hypotheses
        self.running = self.texts[:, None]  # at first one
        self.finished = self.running.repeat(1, settings.num_beams, 1)
        self.worth = self.sums.new_full((len(prompt), settings.num_beams), -torch.inf)  # of finished hypotheses
        self.beaten = self.decided[:, None]  # the finished hypotheses can't be beaten

    def choose(self, scores: Tensor, step: int) -> tuple[Tensor, Tensor | None]:
        beams, penalty, early = self.settings.num_beams, self.settings.length_penalty, self.settings.early_stopping
        length, most = step + 1, self.settings.max_new_tokens
        examples, width = self.sums.shape
        sums, best = (self.sums.view(-1, 1) + scores).view(examples, -1).topk(2 * beams)
        origin, tokens = best // scores.size(1), best % scores.size(1)
        continued = _chosen(self.running, origin)
        continued[:, :, step] = tokens
        ended = (tokens == self.eos) | (length == most)

        new = (sums / length**penalty).masked_fill(~ended | self.decided[:, None], -torch.inf)
        new[:, beams:] = -torch.inf
        self.worth, best = torch.cat([self.worth, new], dim=1).topk(beams)
        self.finished = _chosen(torch.cat([self.finished, continued], dim=1), best)
        self.texts = self.finished[:, 0]

        self.sums, best = sums.masked_fill(ended, -torch.inf).topk(beams)
        self.running = _chosen(continued, best)
        reach = most if early == "never" and penalty > 0.0 else length
        worst = self.worth[:, -1:]
        self.beaten = self.beaten | (self.sums[:, :1] / reach**penalty <= worst)
        self.decided = (self.beaten | (worst > -torch.inf) if early is True else self.beaten)[:, 0]
        origin = origin.gather(1, best) + width * torch.arange(examples, device=best.device)[:, None]
        return tokens.gather(1, best).view(-1, 1), origin.flatten()


def _chosen(texts: Tensor, chosen: Tensor) -> Tensor:
    """Selects from texts (examples, n, length) those `chosen` (examples, k): (examples, k, length)."""
    return texts.gather(1, chosen[..., None].expand(-1, -1, texts.size(2)))
