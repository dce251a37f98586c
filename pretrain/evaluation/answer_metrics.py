"""Metrics of answers beside their references, by the names that `evaluation` of a run file uses.

BLEU and chrF are sacrebleu's, ROUGE is rouge-score's: their scores can be compared with published ones.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from data_pipeline.foundation.lazy_imports import imported_at_first_use

with imported_at_first_use():
    from rouge_score import rouge_scorer  # loads nltk: 2.4 s and 190 MB

Answers = Sequence[str]
References = Sequence[Sequence[str]]  # of each answer, one or more


def exact_match(answers: Answers, references: References) -> float:
    """The share of answers that are a reference, white space at their ends apart."""
    return _mean_of_best(lambda answer, right: float(answer.strip() == right.strip()), answers, references)


def accuracy(answers: Answers, references: References) -> float:
    """The share of answers that are a reference, case and the amount of white space apart: for labels."""
    return _mean_of_best(lambda answer, right: float(_label(answer) == _label(right)), answers, references)


def squad_exact_match(answers: Answers, references: References) -> float:
    """SQuAD's exact match: the share of answers that are a reference after `normalized`."""
    return _mean_of_best(lambda answer, right: float(normalized(answer) == normalized(right)), answers, references)


def squad_f1(answers: Answers, references: References) -> float:
    """SQuAD's F1: the mean of `word_f1` with the reference that gives the most."""
    return _mean_of_best(word_f1, answers, references)


def bleu(answers: Answers, references: References) -> float:
    """BLEU of the corpus, from 0 to 100 (Papineni et al. 2002), by sacrebleu with its defaults (13a, exponential
    smoothing)."""
    return BLEU().corpus_score(list(answers), _streams(references)).score


def chrf(answers: Answers, references: References) -> float:
    """chrF2 of the corpus, from 0 to 100 (Popović 2015), by sacrebleu with its defaults (6 characters, no words)."""
    return CHRF().corpus_score(list(answers), _streams(references)).score


def rouge(kind: str, answers: Answers, references: References) -> float:
    """The mean F1 of ROUGE `kind` (Lin 2004), by rouge-score with Porter's stemmer, as T5 has it.

    Sentences of rougeLsum are lines. Of several references, the one with the largest F1 counts.
    """
    scorer = rouge_scorer.RougeScorer([kind], use_stemmer=True)
    return _mean_of_best(lambda answer, right: scorer.score(right, answer)[kind].fmeasure, answers, references)


ANSWER_METRICS: dict[str, Callable[[Answers, References], float]] = {
    "exact_match": exact_match,
    "accuracy": accuracy,
    "squad_exact_match": squad_exact_match,
    "squad_f1": squad_f1,
    "bleu": bleu,
    "chrf": chrf,
    **{kind: partial(rouge, kind) for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum")},
}


def normalized(text: str) -> str:
    """A text as SQuAD compares it (Rajpurkar et al. 2016): in lower case, without ASCII punctuation and articles.

    "The Eiffel-Tower, in  Paris"  ->  "eiffeltower in paris"
    """
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def word_f1(answer: str, reference: str) -> float:
    """The harmonic mean of precision and recall of the normalised answer's words, each as often as in both texts."""
    words, right = normalized(answer).split(), normalized(reference).split()
    common = sum((Counter(words) & Counter(right)).values())
    return 2 * common / (len(words) + len(right)) if common else 0.0


def _label(text: str) -> str:
    return " ".join(text.casefold().split())


def _mean_of_best(score: Callable[[str, str], float], answers: Answers, references: References) -> float:
    best = [max(score(answer, right) for right in rights) for answer, rights in zip(answers, references, strict=True)]
    return sum(best) / len(best)


def _streams(references: References) -> list[list[Any]]:
    """The references as sacrebleu has them: a list of the first ones, one of the second ones …; None where a row has
    fewer."""
    most = max(map(len, references))
    return [[rights[index] if index < len(rights) else None for rights in references] for index in range(most)]
