"""Generates text from text: `answer_texts`, for `pretrain generate` and samples."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data_pipeline.base.errors import UserError
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.text.vocabulary import Vocabulary
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.decoding import generate
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.models import FAMILIES, Family
from pretrain.models.model import Model


@dataclass(frozen=True)
class Answer:
    """A generated answer.

    Attributes:
        text: the given text.
        generated: the text that the model generated.
        whole: the continued text, or the text with its masked spans filled in brackets; the answer itself for a text
            without masked spans.
        has_blanks: whether the text has masked spans.
    """

    text: str
    generated: str
    whole: str
    has_blanks: bool


def answer_texts(
    trained: TrainedModel, texts: Sequence[str], settings: GenerationSettings, batch_size: int = 16
) -> Iterator[Answer]:
    """Generates an answer to each text, in order, `batch_size` texts at a time.

    An encoder-decoder reads a text and answers; a causal model continues the text. Seed and number of a text determine
    its samples. Raises UserError at once if the model doesn't generate, or a text is too long for it.
    """
    model, tokenizer = trained.model, trained.tokenizer
    family = FAMILIES[model.config.family]
    if family.generates is None:
        raise UserError(f"models of the family {model.config.family} don't generate text")
    causal = family.generates == "continuations"
    inputs = [input_ids(tokenizer, text, family) for text in texts]
    _check_lengths(inputs, causal, settings.max_new_tokens, model.config.longest_sequence)

    def answers() -> Iterator[Answer]:
        for start in range(0, len(texts), batch_size):
            batch = inputs[start : start + batch_size]
            numbers = range(start, start + len(batch))
            rows = written(model, batch, tokenizer.vocabulary, settings, causal, numbers)
            for number, given, row in zip(numbers, batch, rows, strict=True):
                yield _answer(tokenizer, texts[number], given, row, causal)

    return answers()


def _answer(tokenizer: Tokenizer, text: str, given: list[int], row: list[int], causal: bool) -> Answer:
    vocabulary = tokenizer.vocabulary
    new = before_eos(row, vocabulary)
    new = new[1:] if new[:1] == [vocabulary.bos] else new  # BART's answers begin with it
    generated = tokenizer.decode(new)
    if causal:
        return Answer(text, generated, tokenizer.decode([*given, *new]), has_blanks=False)
    if any(id_ in vocabulary.sentinel_ids for id_ in given):
        return Answer(text, generated, _filled(tokenizer, text, new), has_blanks=True)
    return Answer(text, generated, generated, has_blanks=False)


def written(
    model: Model,
    inputs: Sequence[Sequence[int]],
    vocabulary: Vocabulary,
    settings: GenerationSettings,
    causal: bool,
    numbers: Sequence[int] | None = None,
) -> list[list[int]]:
    """The generated ids for each of `inputs`: answers or, if the model is `causal`, continuations. See `generate`."""
    ids, mask = padded(inputs, vocabulary.pad, causal, next(model.parameters()).device)
    return generate(model, ids, mask, settings, numbers=numbers).tolist()


def before_eos(ids: Iterable[int], vocabulary: Vocabulary) -> list[int]:
    """The ids before the first EOS."""
    return list(takewhile(lambda id_: id_ != vocabulary.eos, ids))


def padded(
    rows: Sequence[Sequence[int]], pad: int, left: bool, device: torch.device | None = None
) -> tuple[Tensor, Tensor | None]:
    """Ids (rows, longest), padded on the right or left, and their attention mask; None: nothing is padded."""
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    side = "left" if left else "right"
    ids = pad_sequence(tensors, batch_first=True, padding_value=pad, padding_side=side)
    mask = pad_sequence([torch.ones_like(row) for row in tensors], batch_first=True, padding_side=side)
    return ids.to(device), None if mask.all() else mask.to(device)


def input_ids(tokenizer: Tokenizer, text: str, family: Family) -> list[int]:
    """The ids of an input to answer, with BOS and EOS as in training and sentinel k for `<extra_id_k>`; or of a prompt
    to continue, EOS for an empty text."""
    if family.generates == "continuations":
        return tokenizer.encode([text])[0] or [tokenizer.vocabulary.eos]
    bos = tokenizer.vocabulary.bos
    begin = [bos] if family.inputs_begin_with_bos and bos is not None else []
    return [*begin, *tokenizer.encode_with_sentinels(text)]


def _check_lengths(inputs: Sequence[list[int]], causal: bool, new: int, longest: int | None) -> None:
    if longest is None:
        return
    problems = []
    if not causal and new > longest:
        problems.append(f"max_new_tokens: {new}, but the model takes sequences of {longest} at most")
    more = new - 1 if causal else 0  # the last token is not read again
    problems += [
        f"text {number}: its {len(ids)} tokens{f' and {more} new ones' if more else ''} exceed the {longest} that the "
        f"model takes"
        for number, ids in enumerate(inputs, 1)
        if len(ids) + more > longest
    ]
    if problems:
        raise UserError("\n".join(problems))


def _filled(tokenizer: Tokenizer, blanks: str, generated: list[int]) -> str:
    spans = split_spans(generated, tokenizer.vocabulary)
    words = {tokenizer.decode([id_]): tokenizer.decode(span).strip() for id_, span in spans.items()}
    return re.sub(r"<extra_id_\d+>", lambda mark: f"[{words.get(mark[0], '')}]", blanks)


def split_spans(target_ids: Iterable[int], vocabulary: Vocabulary) -> dict[int, list[int]]:
    """The span after each sentinel of a target sequence, up to eos.

        targets:  <x> for inviting <y> last </s>    →    {<x>: for inviting, <y>: last}

    Tokens before the first sentinel are dropped, and of a repeated sentinel all spans but the first.
    """
    spans: dict[int, list[int]] = {}
    span: list[int] = []
    for token in before_eos(target_ids, vocabulary):
        if token in vocabulary.sentinel_ids:
            span = []
            spans.setdefault(token, span)
        elif token != vocabulary.pad:
            span.append(token)
    return spans
