"""The scores of minimal pairs by a checkpoint, beside their controls."""

import json
import sys
from pathlib import Path

import torch

from data_pipeline.base.atomic import write_json
from examples.minimal_pairs import pairs as minimal_pairs
from examples.minimal_pairs.pairs import Accuracies, Score, SentencePrompts
from pretrain import models
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.prompt_format import PromptScores
from pretrain.tools.evaluate import opened_checkpoint, training_corpora


def score_checkpoint(
    checkpoint: Path,
    directory: Path,
    form: str | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Scores the minimal pairs in `directory` by a checkpoint and prints a table of groups × scores, with controls.

    On several ranks if a launcher started them. `form`: the form of an encoder-decoder's prompts; None: that of its
    training. `limit`: the most pairs of each paradigm. Accuracies of all paradigms go to `out`/minimal_pairs.json.
    Raises UserError for wrong pairs, and for a model that can't be prompted so.
    """
    pairs = minimal_pairs.read_pairs(directory, limit)
    with opened_checkpoint(checkpoint, batch_size) as session:
        trained, prompt_format = session.trained, session.prompt_format(form)
        tokenizer, prompts = trained.tokenizer, SentencePrompts(prompt_format)
        torch.manual_seed(0)
        untrained = TrainedModel(models.build(trained.model.config).eval(), tokenizer).on_best_device()
        scores: dict[str, Score] = {}
        for name, score, one in [*((name, name, trained) for name in prompts.scores), ("random", "", untrained)]:
            likelihoods = PromptScores(prompt_format, session.evaluation(one), batch_size)
            scores[name] = minimal_pairs.model_score(score or prompts.scores[0], prompts, tokenizer, likelihoods)
        if corpora := training_corpora(session.config):
            scores["unigram"] = minimal_pairs.unigram_score(corpora, tokenizer)
        found = {}
        for name, by in scores.items():
            found[name] = minimal_pairs.accuracies(pairs, by)
            if session.rank == 0:
                print(f"{name}: {100 * found[name].of_paradigms:.1f} %", file=sys.stderr, flush=True)
        if session.rank == 0:
            _show(found, out, as_json)


def _show(found: dict[str, Accuracies], out: Path | None, as_json: bool) -> None:
    if out is not None:
        whole = {name: {"by_group": one.by_group, "by_paradigm": one.by_paradigm} for name, one in found.items()}
        write_json(out / "minimal_pairs.json", whole)
    metrics = {f"minimal_pairs/{name}/mean_of_groups": one.of_groups for name, one in found.items()}
    metrics |= {f"minimal_pairs/{name}/mean_of_paradigms": one.of_paradigms for name, one in found.items()}
    print(json.dumps(metrics, indent=1) if as_json else "\n".join(minimal_pairs.lines(found)), flush=True)
