"""Spans that are masked in a text, one in each: what a model writes there, and how likely the right span is."""

import contextlib
import csv
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from data_pipeline.base.errors import UserError
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import split_spans, written
from pretrain.evaluate.prompt_format import Prompt, PromptScores
from pretrain.tools.evaluate import Session

T = TypeVar("T")
_AT_ONCE = 32  # rows


@dataclass(frozen=True)
class Masked:
    """A text whose `middle` is masked."""

    before: str
    middle: str
    after: str

    def filled(self, span: str) -> str:
        return self.before + span + self.after


def prompts(session: Session, spans: Sequence[Masked]) -> list[Prompt]:
    """The prompts of the model's training: the text with a sentinel, and the masked span as its target; of a model that
    copies its input, as BART, the text with a mask, and the masked span after the text before."""
    form, tokenizer = session.prompt_format(None), session.trained.tokenizer
    before, middle, after = (
        tokenizer.encode([getattr(one, part) for one in spans]) for part in ("before", "middle", "after")
    )
    return [form.infilling(*parts) for parts in zip(before, after, middle, strict=True)]


def fillings(session: Session, spans: Sequence[Masked], longest: int) -> list[str]:
    """What the model writes in place of each masked span: at most `longest` tokens, by greedy decoding.

    Raises UserError for a model that doesn't write masked spans after sentinels, such as BART.
    """
    form = session.prompt_format(None).form
    if form != "blank":
        raise UserError(f"needs a model that writes masked spans after sentinels, as T5; prompts have the form {form}")
    tokenizer, model = session.trained.tokenizer, session.trained.model
    settings = GenerationSettings(max_new_tokens=longest + 1)  # the sentinel comes first
    inputs = [one.encoder for one in prompts(session, spans)]
    order = sorted(range(len(inputs)), key=lambda number: len(inputs[number]))
    found = [""] * len(inputs)
    for start in range(0, len(order), _AT_ONCE):
        rows = order[start : start + _AT_ONCE]
        answers = written(model, [inputs[row] for row in rows], tokenizer.vocabulary, settings, causal=False)
        for row, ids in zip(rows, answers, strict=True):
            answer = split_spans(ids, tokenizer.vocabulary)
            found[row] = tokenizer.decode(answer.get(tokenizer.vocabulary.first_sentinel, []))
    return found


def bits(session: Session, asked: Sequence[Prompt]) -> list[float]:
    """−log₂ of the probability of each prompt's masked span. That the span ends isn't counted."""
    score = PromptScores(session.prompt_format(None), session.evaluation(session.trained), _AT_ONCE)
    return [-log_p / math.log(2) for log_p, _ in score(asked)]


def others(values: Sequence[T]) -> list[T]:
    """For each row the value of another row: half of all rows away."""
    half = len(values) // 2
    return [*values[half:], *values[:half]]


def share(right: Sequence[bool]) -> str:
    """A share in percent, with its standard error."""
    mean = sum(right) / len(right)
    return f"{100 * mean:.1f} ± {100 * math.sqrt(mean * (1 - mean) / len(right)):.1f}"


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], out: Path | None) -> None:
    """Prints a table as CSV, or writes the table to the file `out`."""
    with contextlib.nullcontext(sys.stdout) if out is None else out.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows([columns, *rows])
