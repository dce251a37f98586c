"""Reads the held-out text-to-text pairs that hooks answer, and keeps the answers within the budget."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

from data_pipeline.base.errors import DamagedInput, UserError
from data_pipeline.base.open_store import open_store
from data_pipeline.corpus import Corpus
from data_pipeline.corpus.documents import document_files
from data_pipeline.corpus.objectives.objective import Objective
from data_pipeline.corpus.objectives.text_to_text import InOneRow, TextToText
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.sources import formats
from data_pipeline.sources.record import Input, ReadStats
from pretrain.config.evaluation import PairsSettings
from pretrain.evaluate.generation.blanks import held_out_documents
from pretrain.evaluate.generation.texts import first_ids
from pretrain.evaluate.hook import Evaluation
from pretrain.models import FAMILIES, ModelConfig
from pretrain.run import watchdog

_AT_ONCE = 32  # items of a rank between two checks of the budget
Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Question:
    """A held-out input with its right answers and, if choices are ranked, its choices."""

    text: str
    references: Sequence[str]
    choices: Sequence[str] = ()


class Task(NamedTuple):
    """The held-out questions of a corpus or a file.

    Attributes:
        corpus: the corpus of the questions; None: a file.
        trained_on: the name of the objective that the model's inputs and answers begin as in; None: unknown.
    """

    name: str
    objective: TextToText
    questions: list[Question]
    corpus: Corpus | None
    trained_on: str | None

    def first_ids(self, config: ModelConfig, tokenizer: Tokenizer) -> list[int]:
        """The ids that inputs and answers of a model of `config` begin with."""
        return first_ids(tokenizer.vocabulary, FAMILIES[config.family], self.trained_on)

    def input_ids(self, texts: Iterable[str], tokenizer: Tokenizer, begin: Sequence[int]) -> list[list[int]]:
        """The ids of inputs, which begin with `begin` and end with EOS, cut to `inputs_length`."""
        most = self.objective.inputs_length - 1 - len(begin)
        return [[*begin, *ids[:most], tokenizer.vocabulary.eos] for ids in tokenizer.encode([*texts])]


def tasks(settings: PairsSettings, corpora: Mapping[str, Corpus]) -> list[Task]:
    """The questions of `settings.file`, or of each corpus of pairs that `settings` selects. Raises UserError for a copy
    of a corpus without documents, and for a file without pairs.

    For a file, the objective is that of the first corpus of pairs. Without such a corpus, the model was trained on the
    objective of the first corpus, if there is one.
    """
    if settings.file is not None:
        every = [corpus.objective for corpus in corpora.values()]
        of_pairs = [one for objective in every if (one := _of_pairs(objective))]
        trained_on = next((one.name for one in [*of_pairs, *every]), None)
        default = of_pairs[0] if of_pairs else TextToText()
        return [Task(settings.name, default, _file_questions(settings), None, trained_on)]
    found = []
    for name, corpus in corpora.items():
        objective = _of_pairs(corpus.objective)
        if settings.corpus in (None, name) and objective is not None:
            questions = list(islice(_corpus_questions(corpus), settings.rows))
            found.append(Task(name, objective, questions, corpus, objective.name))
    return found


def until_late(
    evaluation: Evaluation, items: Sequence[Item], work: Callable[[Sequence[Item]], Sequence[Found]]
) -> list[Found]:
    """What `work` finds for `items`, some of them at a time; once the budget is spent, for the items so far."""
    found: list[Found] = []
    step = _AT_ONCE * evaluation.held_out.layout.ranks
    for start in range(0, len(items), step):
        watchdog.alive()
        found += work(items[start : start + step])
        if evaluation.collectives.late:
            break
    return found


def _of_pairs(objective: Objective) -> TextToText | None:
    """The text-to-text objective of a corpus, also inside `in_one_row`; None: no such objective."""
    inner = objective.of if isinstance(objective, InOneRow) else objective
    return inner if isinstance(inner, TextToText) else None


def _corpus_questions(corpus: Corpus) -> Iterator[Question]:
    """The held-out pairs of `corpus`, from its documents, where texts aren't cut."""
    if not document_files(open_store(corpus.location)):
        raise UserError(f"{corpus.location}: this copy has no documents/, where the held-out pairs are")
    for document in held_out_documents(corpus, "text", "target"):
        yield Question(document.text, [document.target])


def _file_questions(settings: PairsSettings) -> list[Question]:
    """The pairs of a file. Raises UserError for a file without pairs, and for a damaged line or row."""
    stats = ReadStats()
    file = Input(str(settings.file), options={"prefix": settings.prefix})
    try:
        records = list(islice(formats.read("pairs", file, stats), settings.rows))
    except DamagedInput as error:
        raise UserError(str(error)) from None
    if stats.damage:
        position, reason = stats.damage[0]
        raise UserError(f"{settings.file}: {position}: {reason}")
    if not records:
        raise UserError(f"{settings.file}: has no pair; {stats.counters.read} lines or rows without input or target")
    return [Question(one.text, one.targets or [one.target], one.choices) for one in records]
