"""Text out of a T5: decoding with a key-value cache, and putting generated spans back where they were masked."""

from collections.abc import Iterable, Mapping
from itertools import takewhile

import torch
from torch import Tensor

from data_pipeline.vocabulary import Vocabulary
from pretrain.models.t5 import T5


@torch.no_grad()
def generate(
    model: T5,
    encoder_input_ids: Tensor,
    encoder_attention_mask: Tensor | None = None,
    *,
    max_length: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    stop_early: bool = True,
) -> Tensor:
    """Ids (batch, at most max_length) for inputs (batch, input_length): each row ends with eos, then padding.

    Temperature 0 is greedy. Otherwise tokens are sampled among the `top_k` likeliest, and among the fewest that hold
    `top_p` of the probability; `seed` decides. `stop_early=False` always runs `max_length`
    steps: ranks that decode together under ZeRO-3 must take the same number.
    """
    was_training = model.training
    model.eval()
    pad, eos = model.config.pad_id, model.config.eos_id
    batch, device = encoder_input_ids.size(0), encoder_input_ids.device
    draws = torch.rand(max_length, batch, 1, generator=torch.Generator().manual_seed(seed)).to(device)
    encoder_states = model.encode(encoder_input_ids, encoder_attention_mask)
    cache = model.new_cache()
    tokens = torch.full((batch, 1), pad, device=device)
    finished = torch.zeros_like(tokens, dtype=torch.bool)
    generated = []
    for draw in draws:
        logits = model.decode(tokens, encoder_states, encoder_attention_mask, cache)[:, -1, : model.config.vocab_size]
        if temperature > 0.0:
            tokens = sample(logits.float() / temperature, draw, top_k, top_p)
        else:
            tokens = logits.argmax(dim=-1, keepdim=True)
        tokens = tokens.masked_fill(finished, pad)
        generated.append(tokens)
        finished |= tokens == eos
        if stop_early and finished.all():
            break
    model.train(was_training)
    return torch.cat(generated, dim=1)


def sample(logits: Tensor, draw: Tensor, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """One id (batch, 1) per row of logits (batch, vocabulary), where `draw` (batch, 1), uniform in [0, 1), falls.

    top_p is nucleus sampling (Holtzman et al. 2020): the likeliest tokens up to and with the one that reaches it.
    """
    probabilities, ids = logits.softmax(dim=-1).sort(dim=-1, descending=True)
    before = probabilities.cumsum(dim=-1) - probabilities
    probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    if top_k is not None:
        probabilities[:, top_k:] = 0.0
    mass = probabilities.cumsum(dim=-1)
    rank = torch.searchsorted(mass, draw * mass[:, -1:], right=True)
    last = (probabilities > 0.0).sum(dim=-1, keepdim=True) - 1  # rounding may put a draw at the very end of the mass
    return ids.gather(-1, torch.minimum(rank, last))


def split_spans(target_ids: Iterable[int], vocabulary: Vocabulary) -> dict[int, list[int]]:
    """The span after each sentinel of a target sequence, up to eos.

        targets:  <x> for inviting <y> last </s>    →    {<x>: for inviting, <y>: last}

    A model's output may be malformed: tokens before the first sentinel are dropped, and a repeated sentinel's later
    spans too.
    """
    spans: dict[int, list[int]] = {}
    span: list[int] = []
    for token in takewhile(lambda token: token != vocabulary.eos, target_ids):
        if token in vocabulary.sentinel_ids:
            span = []
            spans.setdefault(token, span)
        elif token != vocabulary.pad:
            span.append(token)
    return spans


def fill_in(input_ids: Iterable[int], spans: Mapping[int, list[int]], vocabulary: Vocabulary) -> list[int]:
    """The whole text: inputs with every sentinel replaced by its span (by nothing where there is none).

    inputs:  Thank you <x> me to your party <y> week </s>    →    Thank you for inviting me to your party last week
    """
    text: list[int] = []
    for token in takewhile(lambda token: token != vocabulary.eos, input_ids):
        if token in vocabulary.sentinel_ids:
            text += spans.get(token, [])
        elif token != vocabulary.pad:
            text.append(token)
    return text
