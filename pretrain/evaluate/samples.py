"""The hook `samples`: texts that the model writes."""

from collections.abc import Iterator, Sequence
from functools import partial

from data_pipeline.corpus import Corpus
from pretrain.config.evaluation import SamplesSettings
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.blanks import beginnings, blank_out, can_blank_out
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import Answer, answer_texts
from pretrain.evaluate.hook import EvalResult, Evaluation, Row
from pretrain.models import FAMILIES
from pretrain.models.model import Model


class Samples:
    """A table `samples` of what the model writes, at each evaluation for the same held-out sentences.

    An encoder-decoder fills masked spans; a model with mask tokens (BART) writes the whole sentence. A causal model
    continues the first half of a sentence. Decoding is greedy. Families that don't generate text have no samples.
    """

    def __init__(self, settings: SamplesSettings):
        self._settings = settings
        self._prompts: dict[str, list[tuple[str, str]]] = {}  # by corpus: (prompt, whole sentence)

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        rows: list[Row] = []
        with evaluation.whole_model() as model:
            for name, corpus in evaluation.held_out.corpora.items():
                trained = TrainedModel(model, evaluation.held_out.tokenizer, corpus.objective.name)
                prompts = self._corpus_prompts(name, corpus, model)
                written = evaluation.shared(prompts, partial(self._write, trained), str)
                rows += [
                    {"corpus": name, "given": blanks, "written": whole, "original": original}
                    for (blanks, original), whole in zip(prompts, written, strict=True)
                ]
        lines = [f"sample of {row['corpus']}: {row['written']}" for row in rows]
        return EvalResult(tables={"samples": rows}, lines=lines[:1], more_lines=lines[1:])

    def _write(self, trained: TrainedModel, pairs: Sequence[tuple[str, str]]) -> list[str]:
        settings = GenerationSettings(max_new_tokens=self._settings.max_new_tokens)
        written: Iterator[Answer] = answer_texts(trained, [prompt for prompt, _ in pairs], settings)
        return [one.whole for one in written]

    def _corpus_prompts(self, name: str, corpus: Corpus, model: Model) -> list[tuple[str, str]]:
        if name not in self._prompts:
            settings, generates = self._settings, FAMILIES[model.config.family].generates
            if generates == "answers" and can_blank_out(corpus.tokenizer):
                objective = corpus.objective.name
                self._prompts[name] = blank_out(corpus, corpus.tokenizer, objective, settings.number, settings.seed)
            elif generates == "continuations":
                self._prompts[name] = beginnings(corpus, settings.number)
            else:
                self._prompts[name] = []
        return self._prompts[name]
