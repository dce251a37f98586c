"""Minimal pairs: how often a model prefers the acceptable sentence of two (BLiMP; Warstadt et al. 2020).

A sentence has several scores, which differ in what the model is asked:

- `word`: each word is blanked in turn, and the model writes it: Σ log p of the words (pseudo-log-likelihood; Salazar et
  al. 2020). The model must also end where the word ends, so that the number of tokens counts.
- `span`: the same with three neighbouring words in each mask, ÷ 3. At both ends masks are shorter, so that each word
  is in three of them.
- `sentence`: log p of the whole sentence, after an input without text.
- `official`: as the BabyLM challenge scores encoder-decoders (evaluation-pipeline-2025, enc_dec_mask): each token is
  replaced in turn, the decoder reads the mask alone, without its start token, and log p of the one token is taken.

Controls tell what a score shows: `no_input` is `word` with a mask as all of the input, `random` is a model with
initial weights, and `unigram` is Σ log p of the tokens by their frequency in the training text.
"""

import codecs
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from data_pipeline.base.atomic import strict_json, write_json
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import markdown
from data_pipeline.base.json_file import parse_json
from data_pipeline.corpus import Corpus
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.text.vocabulary import Vocabulary
from pretrain import models
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.input_use import training_examples
from pretrain.evaluate.prompt_format import Prompt, PromptFormat, PromptScores
from pretrain.tools.evaluate import opened_checkpoint, training_corpora

BLANKS = ("word", "span", "official", "no_input")  # scores that need a mask
_GROUPS = {"s-selection": "argument_structure"}  # BLiMP's files have 13 groups; its paper and BabyLM count 12
_SPAN = 3  # words
_TIE = 1e-9  # of a score: sums of the same numbers in another order

_Text = Annotated[str, Field(min_length=1)]
Score = Callable[[Sequence[str]], list[float]]
"""The scores of sentences."""


@dataclass(frozen=True)
class _Line:
    """A line of BLiMP's files."""

    sentence_good: _Text
    sentence_bad: _Text
    UID: _Text
    linguistics_term: _Text


@dataclass(frozen=True)
class Pair:
    """Two sentences of which the first is acceptable; they belong to a paradigm, and that to a group of them."""

    good: str
    bad: str
    paradigm: str
    group: str


@dataclass(frozen=True)
class Accuracies:
    """Of one score: the share of pairs in which the good sentence has the higher one, by paradigm. Ties count ½."""

    by_paradigm: Mapping[str, float]
    groups: Mapping[str, str] = field(repr=False)
    """The group of each paradigm."""

    @property
    def by_group(self) -> dict[str, float]:
        """The means over the paradigms of each group."""
        found: dict[str, list[float]] = defaultdict(list)
        for paradigm, accuracy in self.by_paradigm.items():
            found[self.groups[paradigm]].append(accuracy)
        return {group: fmean(found[group]) for group in sorted(found)}

    @property
    def of_paradigms(self) -> float:
        """The mean over paradigms, which is how BLiMP's authors sum up."""
        return fmean(self.by_paradigm.values())

    @property
    def of_groups(self) -> float:
        """The mean over groups, which is how the BabyLM challenge of 2023 sums up."""
        return fmean(self.by_group.values())


def read_pairs(directory: Path, limit: int | None = None) -> dict[str, list[Pair]]:
    """The pairs of each paradigm, in the order of the files *.jsonl in `directory`; at most `limit` of a paradigm.

    Lines have `sentence_good`, `sentence_bad`, `UID` and `linguistics_term`, as BLiMP's have. Raises UserError for a
    directory without such files, FailedError for a line that lacks one of them. Hidden files are left out: macOS puts
    some into archives.
    """
    found: dict[str, list[Pair]] = defaultdict(list)
    for path in sorted(path for path in directory.glob("*.jsonl") if not path.name.startswith(".")):
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
        for number, line in enumerate(lines, start=1):
            read = parse_json(line, _Line, f"{path}:{number}")
            group = _GROUPS.get(read.linguistics_term, read.linguistics_term)
            pair = Pair(read.sentence_good, read.sentence_bad, read.UID, group)
            if limit is None or len(found[pair.paradigm]) < limit:
                found[pair.paradigm].append(pair)
    if not found:
        raise UserError(f"{directory}: no *.jsonl with pairs there")
    return dict(found)


def accuracies(pairs: Mapping[str, Sequence[Pair]], score: Score) -> Accuracies:
    """Scores the sentences of one paradigm after the other."""
    by_paradigm = {}
    for paradigm, of_paradigm in pairs.items():
        found = score([sentence for pair in of_paradigm for sentence in (pair.good, pair.bad)])
        by_paradigm[paradigm] = fmean(map(_preferred, found[::2], found[1::2]))
    return Accuracies(by_paradigm, {paradigm: of_one[0].group for paradigm, of_one in pairs.items()})


def _preferred(good: float, bad: float) -> float:
    return 0.5 if abs(good - bad) <= _TIE * abs(good) else float(good > bad)


@dataclass(frozen=True)
class SentencePrompts:
    """The prompts by which a model scores a sentence, in the form of its training."""

    prompt_format: PromptFormat

    @property
    def scores(self) -> list[str]:
        """Those that the model can have."""
        return [*BLANKS, "sentence"] if self.prompt_format.form in ("blank", "copy") else ["sentence"]

    def of(self, score: str, ids: list[int]) -> list[Prompt]:
        """The prompts whose log p add up to `score` of a sentence; `span` is a third of the sum."""
        if score == "sentence":
            return [self.prompt_format.prompt([], ids)]
        if score == "official":
            return [self._official(ids, position) for position in range(len(ids))]
        form, width = self.prompt_format, _SPAN if score == "span" else 1
        places = blanks(ids, form.vocabulary, width)
        prompts = [form.infilling(ids[:start], ids[end:], ids[start:end], ends=True) for start, end in places]
        empty = form.with_blank([], [])
        return [replace(prompt, encoder=empty) for prompt in prompts] if score == "no_input" else prompts

    def _official(self, ids: list[int], position: int) -> Prompt:
        vocabulary = self.prompt_format.vocabulary
        blank = vocabulary.first_sentinel if self.prompt_format.form == "blank" else vocabulary.mask
        assert blank is not None
        bos = [] if vocabulary.bos is None else [vocabulary.bos]
        encoder = self.prompt_format.with_blank(ids[:position], ids[position + 1 :])
        return Prompt(encoder, [*bos, blank], [ids[position]], starts=False)


def blanks(ids: Sequence[int], vocabulary: Vocabulary, words: int) -> Iterator[tuple[int, int]]:
    """The spans (start, end) of up to `words` neighbouring words; each word is in that many of them."""
    starts = [0, *(place for place in range(1, len(ids)) if vocabulary.word_starts[ids[place]]), len(ids)]
    for first in range(1 - words, len(starts) - 1):
        yield starts[max(first, 0)], starts[min(first + words, len(starts) - 1)]


def model_score(
    name: str,
    prompts: SentencePrompts,
    tokenizer: Tokenizer,
    log_likelihoods: Callable[[Sequence[Prompt]], Sequence[tuple[float, bool]]],
) -> Score:
    """The score `name` by a model, which gives the log-likelihoods of prompts."""

    def score(sentences: Sequence[str]) -> list[float]:
        asked = [prompts.of(name, ids) for ids in tokenizer.encode(list(sentences))]
        different = {_key(prompt): prompt for of_one in asked for prompt in of_one}
        found = dict(zip(different, log_likelihoods([*different.values()]), strict=True))
        return [sum(found[_key(prompt)][0] for prompt in of_one) / (_SPAN if name == "span" else 1) for of_one in asked]

    return score


def _key(prompt: Prompt) -> tuple[tuple[int, ...], ...]:
    return tuple(prompt.encoder), tuple(prompt.prefix), tuple(prompt.scored)


def unigram_score(corpora: Sequence[Corpus], tokenizer: Tokenizer) -> Score:
    """By the frequencies of tokens in up to 20,000 training rows of each of `corpora`, each count plus one half."""
    counts = np.full(tokenizer.size, 0.5)
    for corpus in corpora:
        for examples in training_examples(corpus):
            for side in (examples.inputs, examples.targets):
                counts += np.bincount(side.values[side.filled].astype(np.int64), minlength=tokenizer.size)
    first, end = tokenizer.vocabulary.text
    log_shares = np.log(counts / counts[first:end].sum())
    return lambda sentences: [float(log_shares[ids].sum()) for ids in tokenizer.encode(list(sentences))]


def lines(found: Mapping[str, Accuracies]) -> list[str]:
    """A table of percentages: groups of paradigms × scores."""
    groups = next(iter(found.values())).by_group
    rows = [[group, *(f"{100 * one.by_group[group]:.1f}" for one in found.values())] for group in groups]
    rows.append(["mean of groups", *(f"{100 * one.of_groups:.1f}" for one in found.values())])
    rows.append(["mean of paradigms", *(f"{100 * one.of_paradigms:.1f}" for one in found.values())])
    return markdown(["", *found], rows)


def score_checkpoint(
    checkpoint: Path,
    directory: Path,
    form: str | None,
    limit: int | None,
    batch_size: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Scores the minimal pairs in `directory` by a checkpoint and prints a table of groups × scores, with controls.

    On several ranks if a launcher started them. `form`: the form of an encoder-decoder's prompts; None: that of its
    training. `limit`: the most pairs of each paradigm. Accuracies of all paradigms go to `out`/minimal_pairs.json.
    Raises UserError for wrong pairs, and for a model that can't be prompted so.
    """
    pairs = read_pairs(directory, limit)
    with opened_checkpoint(checkpoint, batch_size) as session:
        trained, prompt_format = session.trained, session.prompt_format(form)
        tokenizer, prompts = trained.tokenizer, SentencePrompts(prompt_format)
        torch.manual_seed(0)
        untrained = TrainedModel(models.build(trained.model.config).eval(), tokenizer).on_best_device()
        by_model = {name: (name, trained) for name in prompts.scores} | {"random": (prompts.scores[0], untrained)}
        scores: dict[str, Score] = {}
        for name, (score, model) in by_model.items():
            likelihoods = PromptScores(prompt_format, session.evaluation(model), batch_size)
            scores[name] = model_score(score, prompts, tokenizer, likelihoods)
        if corpora := training_corpora(session.config):
            scores["unigram"] = unigram_score(corpora, tokenizer)
        found = {}
        for name, by in scores.items():
            found[name] = accuracies(pairs, by)
            if session.world.rank == 0:
                print(f"{name}: {100 * found[name].of_paradigms:.1f} %", file=sys.stderr, flush=True)
        if session.world.rank == 0:
            _show(found, out, as_json)


def _show(found: dict[str, Accuracies], out: Path | None, as_json: bool) -> None:
    if out is not None:
        whole = {name: {"by_group": one.by_group, "by_paradigm": one.by_paradigm} for name, one in found.items()}
        write_json(out / "minimal_pairs.json", whole)
    metrics = {f"minimal_pairs/{name}/mean_of_groups": one.of_groups for name, one in found.items()}
    metrics |= {f"minimal_pairs/{name}/mean_of_paradigms": one.of_paradigms for name, one in found.items()}
    print(json.dumps(strict_json(metrics), indent=1) if as_json else "\n".join(lines(found)), flush=True)
