"""docs/explanation/objectives.svg: one row under five objectives, each applied by its own code.

    .venv/bin/python -m docs.pictures.objectives

A token is a word here, so that the picture is short; a sentence's period is a token too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np

from data_pipeline.corpus.objectives.denoising import Denoising
from data_pipeline.corpus.objectives.language_modelling import CausalLM, PrefixLM
from data_pipeline.corpus.objectives.masked_lm import MaskedLM
from data_pipeline.corpus.objectives.objective import Objective, Padded
from data_pipeline.corpus.objectives.randomness import noise_keys
from data_pipeline.corpus.objectives.span_corruption import SpanCorruption
from data_pipeline.text.vocabulary import Vocabulary

OUT = Path(__file__).parents[1] / "explanation" / "objectives.svg"
FIRST = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week", "."]
SECOND = ["It", "was", "fun", "."]
OTHERS = ["red", "green", "river", "lamp", "seven", "apple", "window", "under"]  # random tokens, beside the row's
ROW_ID = 12255  # one at which each objective shows what it can do

TEXT = 10  # the row's first id; each of its tokens has one of its own
ROW = np.arange(TEXT, TEXT + len(FIRST) + len(SECOND))
PAD, EOS, BOS, MASK, CLS, SEP, SENTINEL = 0, 1, 2, 3, 4, 5, 9
SPECIAL = {BOS: "<s>", EOS: "</s>", MASK: "mask", CLS: "[CLS]", SEP: "[SEP]"}
SPECIAL |= {SENTINEL - k: f"<{k}>" for k in range(4)}
WORDS = dict(enumerate(FIRST + SECOND + OTHERS, TEXT))
PERIODS = [id_ for id_, word in WORDS.items() if word == "."]


def vocabulary(**special: int) -> Vocabulary:
    size = TEXT + len(WORDS)
    ends = np.isin(np.arange(size), PERIODS)
    starts = ~ends & (np.arange(size) >= TEXT)
    return Vocabulary(
        size, (TEXT, size), PAD, EOS, None, BOS, MASK, SENTINEL, 4, special, word_starts=starts, sentence_ends=ends
    )


@dataclass(frozen=True)
class Shown:
    """An objective in the picture: who reads its inputs and writes its targets.

    `in_place`: whether each target stands below the input at whose place it is predicted.
    """

    title: str
    objective: Objective
    reads: str
    writes: str
    in_place: bool = False
    special: dict[str, int] = field(default_factory=dict)

    def tokens(self) -> tuple[list[int], list[tuple[int, bool]]]:
        """The inputs, and the targets with whether each has a loss."""
        keys = noise_keys(0, "train", 0, np.array([ROW_ID]))
        made = self.objective.apply(Padded.full(ROW[None]), keys, vocabulary(**self.special), {})
        predicted = made.targets.filled if made.predicted is None else made.predicted
        (inputs,), (targets,) = (side.values[:, : side.lengths[0]].tolist() for side in (made.inputs, made.targets))
        return inputs, list(zip(targets, predicted[0].tolist(), strict=False))


# T5 and BERT blank out more than by default, so that a short row shows it
SHOWN = [
    Shown("T5", SpanCorruption(inputs_length=16, noise_density=0.25, mean_span_length=2.0),
          "encoder reads", "decoder writes"),
    Shown("BART", Denoising(length=len(ROW) + 2), "encoder reads", "decoder writes"),
    Shown("Prefix LM", PrefixLM(length=len(ROW)), "encoder reads", "decoder writes"),
    Shown("GPT", CausalLM(length=len(ROW) - 1), "decoder reads", "and predicts", in_place=True),
    Shown("BERT", MaskedLM(length=len(ROW) + 2, mask_ratio=0.2), "encoder reads", "and predicts", in_place=True,
          special={"[CLS]": CLS, "[SEP]": SEP}),
]  # fmt: skip

WIDE, LEFT = 800, 206  # of the picture; where tokens begin
HIGH, LINE = 24, 30  # of a token; from one line to the next
STYLES = {
    "first": ("#ffffff", "#8c959f"),
    "second": ("#ddf4ff", "#54aeff"),
    "blank": ("#fff8c5", "#d4a72c"),
    "random": ("#ffebe9", "#ff8182"),
    "mark": ("#eaeef2", "#d0d7de"),
}  # fill and border
LEGEND = {
    "first": "first sentence",
    "second": "second sentence",
    "blank": "stands for what is missing",
    "random": "random token",
    "mark": "begins or ends a text",
}


def style(id_: int) -> str:
    if id_ in SPECIAL:
        return "blank" if id_ == MASK or SPECIAL[id_][1].isdigit() else "mark"
    if id_ >= TEXT + len(ROW):
        return "random"
    return "first" if id_ < TEXT + len(FIRST) else "second"


def name(id_: int) -> str:
    return SPECIAL[id_] if id_ in SPECIAL else WORDS[id_]


def width(id_: int) -> float:
    """About as wide as the token's text in Helvetica, with room beside it."""
    narrow, wide = (sum(map(name(id_).count, letters)) for letters in ("ilft.I", "mwMT"))
    return round(max(15.0, 7.2 * len(name(id_)) + 8 - 3 * narrow + 2.5 * wide), 1)


def line(y: float, label: str, tokens: Sequence[tuple[int, bool]], widths: Sequence[float]) -> Iterator[str]:
    """A label and tokens in boxes as wide as `widths`; those without a loss are faint."""
    yield f'<text x="{LEFT - 10}" y="{y + 16.5:g}" text-anchor="end" fill="#57606a">{label}</text>'
    x = float(LEFT)
    for (id_, loss), wide in zip(tokens, widths, strict=True):
        fill, stroke = STYLES[style(id_)]
        yield (
            f'<g opacity="{1 if loss else 0.35}">'
            f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{HIGH}" rx="4" fill="{fill}" stroke="{stroke}"/>'
            f'<text x="{x + wide / 2:g}" y="{y + 16.5:g}" text-anchor="middle">{escape(name(id_))}</text></g>'
        )
        x = round(x + wide + 2, 1)
    assert x <= WIDE, f"{label}: {x} is wider than the picture"


def svg() -> str:
    """The picture."""
    row = [(id_, True) for id_ in ROW.tolist()]
    body = [*line(14, "the row", row, [width(id_) for id_, _ in row])]
    y = 62
    for one in SHOWN:
        inputs, targets = one.tokens()
        widths = [width(id_) for id_ in inputs], [width(id_) for id_, _ in targets]
        if one.in_place:
            widths = ([max(both) for both in zip(*widths, strict=True)],) * 2
        body.append(f'<path d="M12 {y - 10} H788" stroke="#d0d7de"/>')
        body.append(f'<text x="12" y="{y + 17}" font-size="15" font-weight="bold">{one.title}</text>')
        body.append(f'<text x="12" y="{y + 36}" font-size="12" fill="#57606a">{one.objective.name}</text>')
        body += line(y, one.reads, [(id_, True) for id_ in inputs], widths[0])
        body += line(y + LINE, one.writes, targets, widths[1])
        y += 2 * LINE + 18
    body.append(f'<path d="M12 {y - 10} H788" stroke="#d0d7de"/>')
    x = 12.0
    for kind, text in LEGEND.items():
        fill, stroke = STYLES[kind]
        body.append(f'<rect x="{x:g}" y="{y + 2}" width="14" height="14" rx="3" fill="{fill}" stroke="{stroke}"/>')
        body.append(f'<text x="{x + 20:g}" y="{y + 14}" font-size="12" fill="#57606a">{text}</text>')
        x += 38 + 5.6 * len(text)
    body.append(f'<text x="{x:g}" y="{y + 14}" font-size="12" fill="#57606a" opacity="0.5">faint: no loss</text>')
    high = y + 28
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {high}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#24292f">'
    )
    return "\n".join([head, f'<rect width="{WIDE}" height="{high}" fill="#ffffff"/>', *body, "</svg>", ""])


if __name__ == "__main__":
    OUT.write_text(svg(), encoding="utf-8")
