"""The hook `text_to_text`: the model answers held-out inputs of pairs, and metrics compare the answers with targets."""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, zip_longest
from typing import Any, NamedTuple

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from data_pipeline.base.errors import UserError
from pretrain.config.evaluation import TextToTextSettings
from pretrain.evaluate import held_out_pairs
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import before_eos, without_bos, written
from pretrain.evaluate.held_out_pairs import Question, Task
from pretrain.evaluate.hook import EvalResult, Evaluation, Row
from pretrain.evaluate.prompt_format import Prompt, PromptFormat, PromptScores
from pretrain.models.model import Model

_MOST_CHOICES = 1000


class Answer(NamedTuple):
    """The model's answer to a question.

    Attributes:
        written: the generated answer.
        unfinished: True if the generated answer was cut.
        chosen: the likeliest choice.
    """

    written: str = ""
    unfinished: bool = False
    chosen: str = ""


class TextToTextAnswers:
    """Metrics `text_to_text/NAME/METRIC` of each held-out corpus of pairs, and a table of answers beside references.

    Inputs are cut to `inputs_length`, as in training; references aren't cut. Each row counts once, on any number of
    ranks. Once the budget is spent, the metrics cover the rows so far.
    """

    def __init__(self, settings: TextToTextSettings):
        self._settings = settings
        self._tasks: list[Task] | None = None

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        metrics: dict[str, float] = {}
        tables: dict[str, Sequence[Row]] = {}
        lines: list[str] = []
        if self._tasks is None:
            found_tasks = held_out_pairs.tasks(self._settings, evaluation.held_out.corpora)
            self._tasks = [_with_choices(task, self._settings) for task in found_tasks]
        with evaluation.whole_model() as model:
            for task in self._tasks:
                work = partial(self._answers, evaluation, model, task)
                answers = held_out_pairs.until_late(evaluation, task.questions, work)
                answered = task.questions[: len(answers)]
                found = self._metrics(answered, answers)
                metrics |= {f"text_to_text/{task.name}/{name}": value for name, value in found.items()}
                tables[f"text_to_text/{task.name}"] = self._table(answered, answers)
                lines += self._lines(task, answers, found)
                if evaluation.collectives.late:
                    break
        return EvalResult(metrics, tables, lines=lines)

    def _answers(self, evaluation: Evaluation, model: Model, task: Task, questions: Sequence[Question]) -> list[Answer]:
        """The answers to some questions of `task`, in order. The ranks divide the questions."""
        tokenizer, settings = evaluation.held_out.tokenizer, self._settings
        vocabulary, objective = tokenizer.vocabulary, task.objective
        form = PromptFormat.choose(model.config, vocabulary, None, objective.name)
        causal = form.form == "continuation"
        begin = task.first_ids(model.config, tokenizer)
        inputs = task.input_ids((question.text for question in questions), tokenizer, begin)
        answers = [Answer() for _ in inputs]
        if settings.writes:
            most = settings.max_new_tokens or objective.targets_length
            decoding = GenerationSettings(max_new_tokens=most, num_beams=settings.num_beams)

            def write(mine: Sequence[list[int]]) -> list[Answer]:
                rows = written(model, mine, vocabulary, decoding, causal) if mine else []
                texts = [tokenizer.decode(without_bos(before_eos(row, vocabulary), vocabulary)) for row in rows]
                return [Answer(text, vocabulary.eos not in row) for text, row in zip(texts, rows, strict=True)]

            answers = evaluation.shared(inputs, write, Answer)
        if settings.ranks:
            prompts = [
                Prompt([], ids, target) if causal else Prompt(ids, begin, target)
                for ids, question in zip(inputs, questions, strict=True)
                for target in ([*choice, vocabulary.eos] for choice in tokenizer.encode(list(question.choices)))
            ]
            scores = iter(PromptScores(form, evaluation, evaluation.held_out.layout.micro_batch)(prompts))
            for number, question in enumerate(questions):
                log_p = [next(scores)[0] for _ in question.choices]
                answers[number] = answers[number]._replace(chosen=question.choices[log_p.index(max(log_p))])
        return answers

    def _metrics(self, questions: Sequence[Question], answers: Sequence[Answer]) -> dict[str, float]:
        references = [question.references for question in questions]
        found: dict[str, float] = {}
        for name in self._settings.metrics:
            texts = [answer.chosen if name == "rank_accuracy" else answer.written for answer in answers]
            found[name] = ANSWER_METRICS[name](texts, references)
        return found

    def _table(self, questions: Sequence[Question], answers: Sequence[Answer]) -> list[Row]:
        """The rows of the table, with the columns that the metrics need."""
        rows: list[Row] = []
        for question, answer in islice(zip(questions, answers, strict=True), self._settings.shown):
            written = {"answer": answer.written} if self._settings.writes else {}
            ranked = {"choice": answer.chosen} if self._settings.ranks else {}
            rows.append({"input": question.text, **written, **ranked, "reference": " | ".join(question.references)})
        return rows

    def _lines(self, task: Task, answers: Sequence[Answer], found: dict[str, float]) -> Iterator[str]:
        values = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        yield f"{task.name}: {values} of {len(answers):,} held-out rows"
        question, first = task.questions[0], answers[0]
        answer = first.written if self._settings.writes else first.chosen
        yield f"  {question.text} → {answer} (reference: {question.references[0]})"
        if unfinished := sum(answer.unfinished for answer in answers):
            most = self._settings.max_new_tokens or task.objective.targets_length
            yield f"warning: {task.name}: {unfinished:,} of {len(answers):,} answers were cut after {most} tokens"


def _with_choices(task: Task, settings: TextToTextSettings) -> Task:
    """The task with choices for each question: its own, the setting `choices`, or else all distinct right answers."""
    if not settings.ranks:
        return task
    labels = settings.choices or sorted({one.references[0] for one in task.questions})
    if len(labels) > _MOST_CHOICES and not all(one.choices for one in task.questions):
        raise UserError(f"rank_accuracy: {len(labels):,} answers are too many to rank; list the labels in choices")
    return task._replace(questions=[replace(one, choices=one.choices or labels) for one in task.questions])


Answers = Sequence[str]
References = Sequence[Sequence[str]]  # for each answer one or more


def mean_of_best(score: Callable[[str, str], float], answers: Answers, references: References) -> float:
    """The mean over answers of the largest `score` with a reference."""
    best = [max(score(answer, right) for right in rights) for answer, rights in zip(answers, references, strict=True)]
    return sum(best) / len(best)


def equal(form: Callable[[str], str], answers: Answers, references: References) -> float:
    """The share of answers that equal a reference after `form` has normalized both."""
    return mean_of_best(lambda answer, right: float(form(answer) == form(right)), answers, references)


def of_corpus(metric: type[BLEU | CHRF], answers: Answers, references: References) -> float:
    """A metric of all answers together, from 0 to 100, by sacrebleu with default settings."""
    # lists of all first references, of all second references and so on, with None for answers that have fewer
    streams: Any = [list(texts) for texts in zip_longest(*references)]
    return metric().corpus_score(list(answers), streams).score


def rouge(kind: str, answers: Answers, references: References) -> float:
    """The mean F1 of ROUGE `kind` (Lin 2004), by rouge-score with Porter's stemmer, as in T5.

    For rougeLsum, lines are sentences. Of several references, the one with the largest F1 counts.
    """
    from rouge_score import rouge_scorer  # loads nltk: 2.4 s and 190 MB

    scorer = rouge_scorer.RougeScorer([kind], use_stemmer=True)
    return mean_of_best(lambda answer, right: scorer.score(right, answer)[kind].fmeasure, answers, references)


def normalized(text: str) -> str:
    """A text as SQuAD compares texts (Rajpurkar et al. 2016): in lower case, without ASCII punctuation and articles.

    "The Eiffel-Tower, in  Paris"  ->  "eiffeltower in paris"
    """
    letters = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())


def word_f1(answer: str, reference: str) -> float:
    """The harmonic mean of precision and recall of the normalized answer's words."""
    words, right = normalized(answer).split(), normalized(reference).split()
    common = sum((Counter(words) & Counter(right)).values())
    return 2 * common / (len(words) + len(right)) if common else 0.0


ANSWER_METRICS: dict[str, Callable[[Answers, References], float]] = {
    "exact_match": partial(equal, str.strip),
    "rank_accuracy": partial(equal, str.strip),  # of the likeliest choices
    "squad_exact_match": partial(equal, normalized),
    "squad_f1": partial(mean_of_best, word_f1),
    "bleu": partial(of_corpus, BLEU),  # Papineni et al. 2002; 13a, exponential smoothing
    "chrf": partial(of_corpus, CHRF),  # Popović 2015: chrF2; 6 characters, no words
    **{kind: partial(rouge, kind) for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum")},
}
