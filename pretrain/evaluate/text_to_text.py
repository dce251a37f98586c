"""The hook `text_to_text`: the model answers held-out inputs of pairs, and metrics compare the answers with targets."""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from data_pipeline.base.errors import UserError
from data_pipeline.corpus.objectives.text_to_text import TextToText
from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain.config.evaluation import TextToTextSettings
from pretrain.evaluate import held_out_pairs
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import before_eos, written
from pretrain.evaluate.held_out_pairs import Question, Task
from pretrain.evaluate.hook import EvalResult, Evaluation, Row
from pretrain.evaluate.prompt_format import Prompt, PromptFormat
from pretrain.models.model import Model
from pretrain.run import watchdog

_AT_ONCE = 32  # rows that a rank answers between two checks of the budget
_TOKENS_AT_ONCE = 16_384  # tokens of choices in one forward pass
_MOST_CHOICES = 1000


class Answer(NamedTuple):
    """The model's answer to a question.

    Attributes:
        written: the generated answer.
        unfinished: True if the generated answer was cut.
        chosen: the likeliest choice.
        chosen_per_token: the choice whose tokens are likeliest on average.
    """

    written: str = ""
    unfinished: bool = False
    chosen: str = ""
    chosen_per_token: str = ""


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
        tables: dict[str, list[Row]] = {}
        lines: list[str] = []
        if self._tasks is None:
            found_tasks = held_out_pairs.tasks(self._settings, evaluation.held_out.corpora)
            self._tasks = [
                task._replace(questions=_with_choices(task.questions, self._settings)) for task in found_tasks
            ]
        with evaluation.whole_model() as model:
            for task in self._tasks:
                answerer = _Answerer(model, evaluation.held_out.tokenizer, task.objective, self._settings)
                answers: list[Answer] = []
                step = _AT_ONCE * evaluation.held_out.layout.ranks
                for start in range(0, len(task.questions), step):
                    watchdog.alive()
                    answers += evaluation.shared(task.questions[start : start + step], answerer.answers, Answer)
                    if evaluation.collectives.late:
                        break
                answered = task.questions[: len(answers)]
                found = self._metrics(answered, answers)
                metrics |= {f"text_to_text/{task.name}/{name}": value for name, value in found.items()}
                tables[f"text_to_text/{task.name}"] = self._table(answered, answers)
                lines += self._lines(task, answers, found)
                if evaluation.collectives.late:
                    break
        return EvalResult(metrics, tables, lines=lines)

    def _metrics(self, questions: Sequence[Question], answers: Sequence[Answer]) -> dict[str, float]:
        references = [question.references for question in questions]
        kinds = {"rank_accuracy": "chosen", "rank_accuracy_per_token": "chosen_per_token"}
        found: dict[str, float] = {}
        for name in self._settings.metrics:
            texts = [getattr(answer, kinds.get(name, "written")) for answer in answers]
            found[name] = ANSWER_METRICS["exact_match" if name in kinds else name](texts, references)
        return found

    def _table(self, questions: Sequence[Question], answers: Sequence[Answer]) -> list[Row]:
        """The rows of the table, with the columns that the metrics need."""
        rows: list[Row] = []
        for question, answer in islice(zip(questions, answers, strict=True), self._settings.shown):
            written = {"answer": answer.written} if self._settings.writes else {}
            ranked = {"choice": answer.chosen, "choice per token": answer.chosen_per_token}
            references = {"reference": " | ".join(question.references)}
            rows.append({"input": question.text, **written, **(ranked if self._settings.ranks else {}), **references})
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


class _Answerer:
    """Answers questions with a model, whose training objective was `objective`."""

    def __init__(self, model: Model, tokenizer: Tokenizer, objective: TextToText, settings: TextToTextSettings):
        self.model = model
        self.tokenizer = tokenizer
        self.objective = objective
        self.settings = settings
        self._form = PromptFormat.choose(model.config, tokenizer.vocabulary, None, objective.name)
        self._causal = self._form.form == "continuation"
        most = settings.max_new_tokens or objective.targets_length
        self._decoding = GenerationSettings(max_new_tokens=most, num_beams=settings.num_beams)

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """The answers, in order."""
        if not questions:
            return []
        eos = self.tokenizer.vocabulary.eos
        ids = self.tokenizer.encode([question.text for question in questions])
        inputs = [[*row[: self.objective.inputs_length - 1], eos] for row in ids]
        answers = self._written(inputs) if self.settings.writes else [Answer()] * len(inputs)
        if self.settings.ranks:
            chosen = [self._chosen(row, question.choices) for row, question in zip(inputs, questions, strict=True)]
            answers = [
                answer._replace(chosen=by_sum, chosen_per_token=by_mean)
                for answer, (by_sum, by_mean) in zip(answers, chosen, strict=True)
            ]
        return answers

    def _written(self, inputs: Sequence[list[int]]) -> list[Answer]:
        vocabulary = self.tokenizer.vocabulary
        rows = written(self.model, inputs, vocabulary, self._decoding, self._causal)
        return [Answer(self.tokenizer.decode(before_eos(row, vocabulary)), vocabulary.eos not in row) for row in rows]

    def _chosen(self, inputs: list[int], choices: Sequence[str]) -> tuple[str, str]:
        """The likeliest of `choices`, and the choice whose tokens, with EOS, are likeliest on average."""
        targets = [[*ids, self.tokenizer.vocabulary.eos] for ids in self.tokenizer.encode(list(choices))]
        sums: list[float] = []
        at_once = max(1, _TOKENS_AT_ONCE // (len(inputs) + max(map(len, targets))))
        for start in range(0, len(targets), at_once):
            some = targets[start : start + at_once]
            prompts = [Prompt([], inputs, target) if self._causal else Prompt(inputs, [], target) for target in some]
            device = next(self.model.parameters()).device
            batch = {name: tensor.to(device) for name, tensor in self._form.batch(prompts).items()}
            losses = self.model(**batch)
            sums += losses["labels"].double().sum(dim=1).tolist()
        means = [loss / len(target) for loss, target in zip(sums, targets, strict=True)]
        return choices[sums.index(min(sums))], choices[means.index(min(means))]


def _with_choices(questions: list[Question], settings: TextToTextSettings) -> list[Question]:
    """The questions with choices: their own, else `choices` of the settings, else all distinct right answers."""
    if not settings.ranks:
        return questions
    labels = settings.choices or sorted({one.references[0] for one in questions})
    if len(labels) > _MOST_CHOICES and not all(one.choices for one in questions):
        raise UserError(f"rank_accuracy: {len(labels):,} answers are too many to rank; list the labels in choices")
    return [Question(one.text, one.references, one.choices or labels) for one in questions]


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
    most = max(map(len, references))
    # a list of first references, a list of second references …, with None for rows that have fewer
    streams: Any = [[rights[index] if index < len(rights) else None for rights in references] for index in range(most)]
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
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def word_f1(answer: str, reference: str) -> float:
    """The harmonic mean of precision and recall of the normalized answer's words."""
    words, right = normalized(answer).split(), normalized(reference).split()
    common = sum((Counter(words) & Counter(right)).values())
    return 2 * common / (len(words) + len(right)) if common else 0.0


ANSWER_METRICS: dict[str, Callable[[Answers, References], float]] = {
    "exact_match": partial(equal, str.strip),
    "accuracy": partial(equal, lambda text: " ".join(text.casefold().split())),  # for labels
    "squad_exact_match": partial(equal, normalized),
    "squad_f1": partial(mean_of_best, word_f1),
    "bleu": partial(of_corpus, BLEU),  # Papineni et al. 2002; 13a, exponential smoothing
    "chrf": partial(of_corpus, CHRF),  # Popović 2015: chrF2; 6 characters, no words
    **{kind: partial(rouge, kind) for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum")},
}
