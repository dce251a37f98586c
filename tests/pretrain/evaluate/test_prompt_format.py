"""Prompts are scored in batches, and each batch is a sign of life."""

from data_pipeline.corpus import open_corpus
from pretrain.evaluate.prompt_format import PromptFormat, PromptScores
from pretrain.run import watchdog
from tests.support.small_evaluations import T5, evaluation_of


def test_each_batch_of_prompts_is_a_sign_of_life(small_corpus, monkeypatch):
    """Of ten prompts, four at a time; else the watchdog would end a run that scores many prompts."""
    tokenizer = open_corpus(small_corpus).tokenizer
    model, evaluation = evaluation_of(T5, tokenizer)
    prompt_format = PromptFormat.choose(model.config, tokenizer.vocabulary, "answer", None)
    signs: list[bool] = []
    monkeypatch.setattr(watchdog, "alive", lambda: signs.append(True))
    PromptScores(prompt_format, evaluation, 4)([prompt_format.prompt([5], [6, 7])] * 10)
    assert len(signs) == 3
