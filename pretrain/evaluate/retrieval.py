"""The hook `retrieval`: beam search over the allowed outputs, compared with the targets of held-out inputs."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data_pipeline.base.open_store import open_store
from data_pipeline.corpus.documents import all_documents
from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain.config.evaluation import RetrievalSettings
from pretrain.evaluate.generation.allowed import AllowedOutputs
from pretrain.evaluate.generation.decoding import search
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import before_eos, padded
from pretrain.evaluate.held_out_pairs import Task, tasks, until_late
from pretrain.evaluate.hook import EvalResult, Evaluation, Row
from pretrain.models import FAMILIES, ModelConfig
from pretrain.models.model import Model


@dataclass(frozen=True)
class Query:
    """An input and its relevant outputs."""

    text: str
    relevant: Sequence[str]


@dataclass(frozen=True)
class Catalogue:
    """The queries of a corpus or a file, and the outputs to find.

    Attributes:
        unknown: the number of queries without a relevant output among the allowed ones.
    """

    task: Task
    allowed: AllowedOutputs
    queries: list[Query]
    unknown: int


class Retrieval:
    """Metrics `retrieval/NAME/recall_at_K` and `ndcg_at_K` of each held-out corpus of pairs, and a table of outputs.

    Rows with equal inputs are one query, whose targets are all relevant. Inputs are cut to `inputs_length`, as in
    training. Once the budget is spent, the metrics cover the queries so far.
    """

    def __init__(self, settings: RetrievalSettings):
        self._settings = settings
        self._catalogues: list[Catalogue] | None = None

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        metrics: dict[str, float] = {}
        tables: dict[str, list[Row]] = {}
        lines: list[str] = []
        tokenizer = evaluation.held_out.tokenizer
        if self._catalogues is None:
            config = evaluation.model.module.config
            found_tasks = tasks(self._settings, evaluation.held_out.corpora)
            self._catalogues = [self._catalogue(task, tokenizer, config) for task in found_tasks]
        with evaluation.whole_model() as model:
            for one in self._catalogues:
                retriever = _Retriever(model, tokenizer, one, self._settings)
                shared = partial(evaluation.shared, work=retriever.found, kind=list[str])
                found: list[list[str]] = until_late(evaluation, one.queries, shared)
                name, values = one.task.name, self._metrics(one.queries, found)
                metrics |= {f"retrieval/{name}/{metric}": value for metric, value in values.items()}
                tables[f"retrieval/{name}"] = [
                    {"input": query.text, "found": " | ".join(outputs[:3]), "reference": " | ".join(query.relevant)}
                    for query, outputs in zip(one.queries[: self._settings.shown], found, strict=False)
                ]
                metrics_text = ", ".join(f"{metric} {value:.4g}" for metric, value in values.items())
                lines.append(f"{name}: {metrics_text} of {len(found):,} queries among {one.allowed.number:,} outputs")
                if one.unknown:
                    lines.append(f"warning: {name}: the allowed outputs lack all targets of {one.unknown:,} queries")
                if evaluation.collectives.late:
                    break
        return EvalResult(metrics, tables, lines=lines)

    def _catalogue(self, task: Task, tokenizer: Tokenizer, config: ModelConfig) -> Catalogue:
        begin = task.first_ids(config, tokenizer)
        if self._settings.allowed is not None:
            allowed = AllowedOutputs.read(Path(self._settings.allowed), tokenizer, begin)
        elif task.corpus is not None:
            documents = all_documents(open_store(task.corpus.location), "target")
            allowed = AllowedOutputs(sorted({document.target for document in documents}), tokenizer, begin)
        else:
            targets = {reference for question in task.questions for reference in question.references}
            allowed = AllowedOutputs(sorted(targets), tokenizer, begin)
        by_text: dict[str, dict[str, bool]] = {}  # for each input: its targets, and whether they are allowed
        for question in task.questions:
            targets_of = by_text.setdefault(question.text, {})
            for reference, ids in zip(question.references, tokenizer.encode(question.references), strict=True):
                output = allowed.output([*begin, *ids, tokenizer.vocabulary.eos])
                targets_of[reference if output is None else output] = output is not None
        unknown = sum(not any(known.values()) for known in by_text.values())
        return Catalogue(task, allowed, [Query(text, list(known)) for text, known in by_text.items()], unknown)

    def _metrics(self, queries: Sequence[Query], found: Sequence[Sequence[str]]) -> dict[str, float]:
        values = {}
        for name, metric in (("recall", recall), ("ndcg", ndcg)):
            for k in self._settings.at:
                scores = [metric(outputs, query.relevant, k) for query, outputs in zip(queries, found, strict=False)]
                values[f"{name}_at_{k}"] = sum(scores) / len(scores)
        return values


class _Retriever:
    """Finds the outputs for queries with a model."""

    def __init__(self, model: Model, tokenizer: Tokenizer, catalogue: Catalogue, settings: RetrievalSettings):
        self._model, self._tokenizer, self._allowed = model, tokenizer, catalogue.allowed
        self._task = catalogue.task
        self._causal = FAMILIES[model.config.family].generates == "continuations"
        self._number = min(max(settings.at), catalogue.allowed.number)
        self._settings = GenerationSettings(
            max_new_tokens=catalogue.allowed.trie.longest,
            num_beams=settings.num_beams,
            num_return_sequences=self._number,
            length_penalty=settings.length_penalty,
        )

    def found(self, queries: Sequence[Query]) -> list[list[str]]:
        """The outputs for each query, the best first."""
        if not queries:
            return []
        vocabulary = self._tokenizer.vocabulary
        begin = self._task.first_ids(self._model.config, self._tokenizer)
        inputs = self._task.input_ids((query.text for query in queries), self._tokenizer, begin)
        ids, mask = padded(inputs, vocabulary.pad, self._causal, next(self._model.parameters()).device)
        texts = search(self._model, ids, mask, self._settings, allowed=self._allowed.trie).tokens.tolist()
        return [[self._output(tokens) for tokens in beams] for beams in texts]

    def _output(self, tokens: Sequence[int]) -> str:
        vocabulary = self._tokenizer.vocabulary
        output = self._allowed.output([*before_eos(tokens, vocabulary), vocabulary.eos])
        assert output is not None  # the search allows no other
        return output


def recall(found: Sequence[str], relevant: Collection[str], k: int) -> float:
    """The share of the `relevant` outputs among the first `k` of `found`."""
    return len({*found[:k]} & {*relevant}) / len(relevant)


def ndcg(found: Sequence[str], relevant: Collection[str], k: int) -> float:
    """The normalized discounted cumulative gain of the first `k` of `found` (Järvelin and Kekäläinen 2002), with gain 1
    for a relevant output: Σ 1 / log₂(rank + 1), divided by the sum of the best order."""
    gains = [1 / math.log2(rank + 1) for rank in range(1, k + 1)]
    gained = sum(gain for gain, output in zip(gains, found, strict=False) if output in relevant)
    return gained / sum(gains[: len(relevant)])
