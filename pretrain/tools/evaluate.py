"""`pretrain evaluate`: runs hooks and tasks on a checkpoint."""

import contextlib
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import torch
import yaml

from data_pipeline.base.atomic import strict_json, write_json
from data_pipeline.base.config_file import check
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.corpus import Corpus
from data_pipeline.corpus.tokenizer import meaning_of_ids
from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.batches import Batch
from data_pipeline.loading.stream import differences
from pretrain.config import RunConfig
from pretrain.config.evaluation import HOOKS, SUITES, HookSettings, clashes
from pretrain.config.run_config import CacheSection
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.trained import TrainedModel, config_of_run
from pretrain.engine.ranks import process_group
from pretrain.evaluate.generation.texts import first_ids_of_prompts
from pretrain.evaluate.hook import Collectives, EvalResult, Evaluation, ValidationData
from pretrain.evaluate.hook_runner import HookRunner
from pretrain.evaluate.lm_eval import LmEvalRequests, LmEvalSettings, run_tasks
from pretrain.evaluate.prompt_format import FORMS, PromptFormat
from pretrain.models import FAMILIES
from pretrain.models.model import Model
from pretrain.run.rank_environment import is_launched
from pretrain.run.world import World
from pretrain.training.prepare import objective_problems, opened_corpus

_HANG_SECONDS = 1800.0


@dataclass(frozen=True)
class Standalone:
    """A whole model on this rank, as hooks get it."""

    trained: TrainedModel

    @property
    def device(self) -> torch.device:
        return self.trained.device

    @property
    def module(self) -> Model:
        return self.trained.model

    def losses(self, batch: Batch) -> dict[str, torch.Tensor]:
        return self.trained.model(**{name: values.to(self.device) for name, values in batch.items()})

    @contextlib.contextmanager
    def whole(self) -> Iterator[Model]:
        yield self.trained.model


def selected_hooks(suite: str, names: Sequence[str], trained_with: Sequence[HookSettings]) -> list[HookSettings]:
    """The hooks with these `names`, or else the hooks of `suite`. A hook without settings has the run's, if any.

    A name may have settings, as in a run file: "{hook: samples, number: 8}". Raises UserError for
    an unknown name or a wrong setting.
    """
    hooks: list[HookSettings] = []
    for one in names or SUITES[suite]:
        try:
            read = yaml.safe_load(one)
        except yaml.YAMLError:
            read = one
        settings = read if isinstance(read, dict) else {"hook": read}
        if (name := str(settings.get("hook"))) not in HOOKS:
            raise UserError(f"--hook: expected one of {', '.join(HOOKS)}, got {one!r}")
        if HOOKS[name].in_training:
            raise UserError(f"--hook {name}: the hook measures training steps, and a checkpoint has none")
        of_run = [hook for hook in trained_with if hook.hook == name] if len(settings) == 1 else []
        hooks += of_run or [check(settings, HOOKS[name], f"--hook {name}")]
    return hooks


@dataclass(frozen=True)
class Session:
    """A checkpoint on this rank, and the config of its run, if the checkpoint has it."""

    trained: TrainedModel
    config: RunConfig | None
    world: World
    batch_size: int

    @property
    def cache(self) -> CacheSection:
        """The run's cache for blocks of remote corpora."""
        return self.config.data.cache if self.config else CacheSection()

    def held_out(self, corpora: Mapping[str, Corpus]) -> ValidationData:
        layout = BatchLayout(self.world.rank, self.world.size, self.batch_size, 1)
        skip_damage = self.config is not None and self.config.data.on_damage == "skip"
        return ValidationData(corpora, self.trained.tokenizer, skip_damage, layout)

    def evaluation(self, trained: TrainedModel) -> Evaluation:
        collectives = Collectives(None, self.trained.device, alone=self.world.size == 1)
        return Evaluation(Standalone(trained), self.held_out({}), 0, collectives)

    def prompt_format(self, form: str | None) -> PromptFormat:
        tokenizer, objective = self.trained.tokenizer, self.trained.objective
        found = PromptFormat.choose(self.trained.model.config, tokenizer.vocabulary, form, objective)
        goes_on = found.form == "continuation"
        return replace(found, begin=first_ids_of_prompts(tokenizer, objective)) if goes_on else found


@contextlib.contextmanager
def opened_checkpoint(checkpoint: Path, batch_size: int) -> Iterator[Session]:
    """Opens `checkpoint` on the ranks that a launcher started, or in this process without a process group."""
    config = config_of_run(checkpoint)
    alone = contextlib.nullcontext(World.on_this_node())
    with process_group(None, _HANG_SECONDS) if is_launched() else alone as world:
        trained = TrainedModel.open(checkpoint, together=world.size > 1).on_best_device()
        yield Session(trained, config, world, batch_size)


def evaluate(
    checkpoint: Path,
    corpora: Sequence[Path],
    suite: str = "fast",
    names: Sequence[str] = (),
    micro_batch: int = 8,
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Runs hooks on a checkpoint, on all ranks that a launcher started, and prints their results.

    `corpora` replace the validation corpora of the checkpoint's run. Tables and images go below `out`. Raises UserError
    if there is no corpus, or a corpus with another tokenizer, and FailedError at the end if a hook failed.
    """
    metrics: dict[str, float] = {}
    failed = False
    with opened_checkpoint(checkpoint, micro_batch) as session:
        hooks = selected_hooks(suite, names, session.config.evaluation if session.config else [])
        held_out = _corpora(corpora, session)
        objectives = {name: corpus.objective.full_name for name, corpus in held_out.items()}
        if not held_out and any(settings.needs_corpus for settings in hooks):
            raise UserError(f"{checkpoint}: no held-out corpus is known; give --corpus")
        if names and (lines := [f"--hook {one.hook}: {line}" for one in hooks for line in one.problems(objectives)]):
            raise UserError("\n".join(lines))
        if lines := [f"--hook {hooks[number].hook}: {line}" for number, line in clashes(hooks, objectives) if names]:
            raise UserError("\n".join(lines))
        hooks = [settings for settings in hooks if not settings.problems(objectives)]
        runner = HookRunner(hooks, session.held_out(held_out), out, resumes=False)
        step = checkpoint_index.read(checkpoint).step
        for result in runner.after(Standalone(session.trained), step, last=True):
            metrics |= result.metrics
            failed |= result.failed
            if session.world.rank == 0:
                _show(result, sys.stderr if as_json else sys.stdout)
        if session.world.rank == 0 and as_json:
            print(json.dumps(strict_json(metrics), indent=1))
    if failed:
        raise FailedError("some hooks failed; their lines above say why")


def _show(result: EvalResult, stream: TextIO) -> None:
    width = shutil.get_terminal_size().columns if stream.isatty() else math.inf
    for line in result.lines:
        print(line if len(line) <= width else textwrap.fill(line, int(width), subsequent_indent="    "), file=stream)
    for line in result.more_lines:
        print(line, file=stream, flush=True)
    for name, value in result.metrics.items():
        print(f"{name:45} {value:.6g}", file=stream, flush=True)


def evaluate_on_tasks(
    checkpoint: Path,
    settings: LmEvalSettings,
    form: str | None = None,
    batch_size: int = 8,
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Runs tasks of the lm-evaluation-harness on a checkpoint, on all ranks that a launcher started, and prints its
    table.

    `form`: the form of an encoder-decoder's prompts, a key of FORMS; None: as in training. All results go to
    `out`/lm_eval.json. Raises UserError for a model that can't be prompted in this form.
    """
    with opened_checkpoint(checkpoint, batch_size) as session:
        prompt_format, evaluation = session.prompt_format(form), session.evaluation(session.trained)
        requests = LmEvalRequests(session.trained.model, prompt_format, evaluation, batch_size)
        found, results = run_tasks(requests, settings)
        if session.world.rank > 0:
            return
        if prompt_format.form in FORMS:
            line = f"prompted as {prompt_format.form}: {FORMS[prompt_format.form]}"
            print(line, file=sys.stderr if as_json else sys.stdout)
        print(json.dumps(strict_json(found.metrics), indent=1) if as_json else "\n".join(found.lines), flush=True)
        if out is not None:  # last: the table stays on the terminal if `out` can't be written
            write_json(out / "lm_eval.json", strict_json(json.loads(json.dumps(results, default=str))))


def training_corpora(config: RunConfig | None) -> list[Corpus]:
    """The training corpora of a run that can be opened."""
    if config is None:
        return []
    found = []
    for entry in config.data.train:
        with contextlib.suppress(UserError):
            found.append(opened_corpus(entry.corpus, config.data.cache))
    return found


def _corpora(paths: Sequence[Path], session: Session) -> dict[str, Corpus]:
    """The validation corpora by name: those at `paths`, or the corpora of the run.

    A corpus at `paths` has the run's `data.objective` if the corpus's rows fit this objective. Otherwise the corpus has
    its own objective, and a line on stderr names both.
    """
    config, trained = session.config, session.trained
    found: dict[str, Corpus] = {}
    for path in paths:
        corpus = opened_corpus(str(path), session.cache)
        if other := found.get(corpus.name):
            both = f"{other.location} and {corpus.location} are both named {corpus.name!r}"
            raise UserError(f"--corpus: {both}; evaluate one after the other")
        as_trained = corpus.with_objective(config.data.objective if config else None)
        fits = not objective_problems("data.objective", [as_trained])
        if not fits and session.world.rank == 0:
            own, of_run = corpus.objective.full_name, as_trained.objective.full_name
            line = f"evaluated with its own objective, {own}: its rows don't fit the run's, {of_run}"
            print(f"{corpus.location}: {line}", file=sys.stderr)
        found[corpus.name] = as_trained if fits else corpus
    if config and not paths:
        for entry in config.data.validation:
            corpus = opened_corpus(entry.corpus, session.cache).with_objective(config.data.held_out_objective(entry))
            found[entry.name or corpus.name] = corpus
    family = trained.model.config.family
    for corpus in found.values():
        if unlike := differences(meaning_of_ids(trained.tokenizer), meaning_of_ids(corpus.tokenizer)):
            raise UserError(
                f"{corpus.location}: built with another tokenizer than the model's: {'; '.join(unlike)}; "
                f"`pretrain adapt CHECKPOINT OUT --tokenizer {corpus.location}` gives the model its vocabulary, and "
                "a run trains the new rows"
            )
        if corpus.objective.kind_of_batches not in FAMILIES[family].objectives:
            learns = ", ".join(FAMILIES[family].objectives)
            raise UserError(
                f"{corpus.location}: has {corpus.objective.name}, but models of the family {family} have {learns}"
            )
        if not corpus.rows("validation"):
            raise UserError(f"{corpus.location}: has no validation rows")
    return found
