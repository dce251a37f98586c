"""Resolves and checks a run file before training: its corpora, vocabulary, batch sizes and checkpoint."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.corpus import Corpus, open_corpus
from data_pipeline.corpus.objectives.objective import Objective
from data_pipeline.corpus.tokenizer import load as load_tokenizer
from data_pipeline.corpus.tokenizer import meaning_of_ids
from data_pipeline.loading.stream import Mixture, Stream, differences, rates
from pretrain import models
from pretrain.config.batch import BatchPlan
from pretrain.config.evaluation import clashes
from pretrain.config.model_config import ModelConfig
from pretrain.config.models import Gemma
from pretrain.config.optimizers.optimizer import NO_DECAY_OF_VECTORS
from pretrain.config.run_config import CacheSection, RunConfig
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.index import checkpoint_in
from pretrain.run import status
from pretrain.run.train_state import TrainState, after_rewinds
from pretrain.run.world import World

_OF_WEIGHTS = re.compile(r"data\.train\.\d+\.weight")


@dataclass(frozen=True)
class PreparedRun:
    """A checked run file, with the corpora, the model and the checkpoint that the file names."""

    config: RunConfig
    training: list[Corpus]
    validation: dict[str, Corpus]  # by the name of the corpus in metrics
    model: ModelConfig  # with the vocabulary of the corpus
    world: World
    resume: Path | None  # the checkpoint that the run resumes from
    directory: Path
    initial_weights: Path | None  # the checkpoint whose weights a new run starts with; None: random weights
    train_state: TrainState  # the progress that this process resumes from
    stream: Stream  # the training rows in their order
    identity: checkpoint_index.Identity  # the settings that may not change over the life of a run
    finished: bool  # True if the run has taken its last step and recorded it

    def stream_from(self, state: TrainState) -> Stream:
        """The training rows in their order, for steps from `state` on. A stage of the curriculum ends with a step, so
        its last row depends on the position of `state`."""
        return _stream(self.config, self.training, state)

    @property
    def lengths(self) -> tuple[int, int]:
        """The greatest lengths of inputs and targets that the objectives of the run allow."""
        first = [stage.objective.shape for stage in self.config.data.curriculum]
        shapes = [*first, *(corpus.objective.shape for corpus in self.training)]
        return max(inputs for inputs, _ in shapes), max(targets for _, targets in shapes)

    @property
    def nothing_left(self) -> str:
        """The message for a user who starts a finished run again."""
        done = f"{self.train_state.step} of {self.config.run.max_steps} steps"
        return f"{self.directory} is finished: {done}. Next: pretrain export {self.directory} OUT"

    @property
    def origin(self) -> checkpoint_index.Origin:
        """The facts about this run that each of its checkpoints records."""
        return checkpoint_index.Origin(
            run=self.directory,
            world=self.world,
            zero_stage=self.config.zero_stage,
            identity=self.identity,
            config_fingerprint=fingerprint(self.config.model_dump()),
            tokenizer=self.training[0].tokenizer,
            mixture=self.stream.mixture,
            settings=self.config.checkpoint,
            resumed=self.train_state.step if self.resume else None,
            objective=self.training[0].objective.kind_of_batches,
        )

    @property
    def shares(self) -> list[tuple[str, float]]:
        """Each training corpus's name, which others may have too, and its share of the rows."""
        weights = self.stream.weights
        return [(corpus.name, weight / sum(weights)) for corpus, weight in zip(self.training, weights, strict=True)]

    def tokens(self, position: int) -> float:
        """Corpus tokens in the run's first `position` rows. A row counts with the mean length of its corpus's rows."""
        rows = self.stream.mixture.consumed(position)
        splits = [corpus.manifest.splits["train"] for corpus in self.training]
        return sum(taken * split.tokens / split.rows for taken, split in zip(rows, splits, strict=True))

    @property
    def plan(self) -> BatchPlan:
        """How this rank divides its rows."""
        return BatchPlan(self.config.batch, self.world.size, self.world.rank)

    @property
    def warnings(self) -> list[str]:
        """Settings that work, but are probably a mistake."""
        config, rows = self.config, self.config.batch.global_batch_size
        steps, consumed = config.run.max_steps, self.stream.mixture.consumed
        found = []
        of_corpora = zip(self.training, consumed(rows), consumed(rows * steps), strict=True)
        for number, (corpus, in_step, in_run) in enumerate(of_corpora):
            if in_step > corpus.rows("train"):
                found.append(
                    f"data.train.{number}: {corpus.location} has {corpus.rows('train')} rows, but a step takes "
                    f"{in_step} of them (batch.global_batch_size), so some rows appear more than once in a step"
                )
            if not in_run:
                found.append(
                    f"data.train.{number}: {corpus.location} has so small a share that none of its rows is among "
                    f"the {rows * steps:,} rows of this run"
                )
        sizes = sorted({rows, *(ramp.global_batch_size for ramp in config.batch.ramp_up)})
        smallest, share = sizes[0] // self.world.size, self.plan.share
        if share < smallest and not isinstance(config.batch.micro_batch_size, int):
            found.append(
                f"batch.ramp_up: no micro-batch has more than {share} rows, since that is the largest number that "
                f"divides a rank's rows of every step; with batches that are multiples of {sizes[0]:,} it is {smallest}"
            )
        if config.schedule.warmup_steps >= steps and getattr(config.schedule, "warmup", "linear") != "constant":
            found.append(
                f"schedule.warmup_steps: {config.schedule.warmup_steps:,}, but run.max_steps is {steps:,}, so the run "
                "ends inside its warm-up; a twentieth of the steps is usual"
            )
        objectives = [corpus.objective for corpus in self.training]
        objectives += [stage.objective for stage in config.data.curriculum]
        have_prefixes = any(one.kind_of_batches == "in_one_row" for one in objectives)
        if getattr(self.model, "prefix_attention", "causal") == "bidirectional" and not have_prefixes:
            found.append(
                "model.prefix_attention: bidirectional, but only rows of the objective in_one_row have a prefix, so "
                "the model learns with causal attention alone, and prompts are read in both directions"
            )
        return found


def prepare(config: RunConfig, world: World, resume: Path | None = None, of_devices: Sequence[str] = ()) -> PreparedRun:
    """Opens and checks everything that `config` names, and checks that the run may resume from `resume`.

    Raises UserError with all problems, one line each. `of_devices`: further problems, which join them.
    """
    data = config.data
    training = [opened_corpus(entry.corpus, data.cache).with_objective(data.objective) for entry in data.train]
    validation = [
        opened_corpus(entry.corpus, data.cache).with_objective(data.held_out_objective(entry))
        for entry in data.validation
    ]
    stages = [[corpus.with_objective(stage.objective) for corpus in training] for stage in data.curriculum]
    in_stages = [corpus for corpora in stages for corpus in corpora]
    names = [entry.name or corpus.name for entry, corpus in zip(data.validation, validation, strict=True)]
    model, id_problems = with_tokenizer_ids(config.model, training[0])
    problems = [
        *BatchPlan(config.batch, world.size).problems(),
        *of_devices,
        *_corpus_problems("train", training),
        *_corpus_problems("validation", validation),
        *_name_problems(names, validation),
        *_tokenizer_differences(training, validation),
        *objective_problems("data.objective", training),
        *id_problems,
        *_row_problems(config, model, [*in_stages, *training, *validation]),
        *_optimizer_problems(config, model),
    ]
    for number, corpora in enumerate(stages):
        problems += objective_problems(f"data.curriculum.{number}.objective", corpora, cut=True)
    for number, (entry, corpus) in enumerate(zip(data.validation, validation, strict=True)):
        problems += objective_problems(f"data.validation.{number}.objective", [corpus] if entry.objective else [])
    held_out = {name: corpus.objective.full_name for name, corpus in zip(names, validation, strict=True)}
    for number, hook in enumerate(config.evaluation):
        problems += [f"evaluation.{number}.{problem}" for problem in hook.problems(held_out)]
    problems += [f"evaluation.{number}.{line}" for number, line in clashes(config.evaluation, held_out)]
    wrapper_problems = config.wrapper.problems(model, [*training, *in_stages]) if config.wrapper else []
    problems += wrapper_problems
    if resume is not None and not wrapper_problems:
        problems += _differences_from_resumed(checkpoint_index.read(resume), config, model, training)
    elif resume is None and config.checkpoint.init_from is not None:
        problems += _differences_from_init(model, Path(config.checkpoint.init_from), training[0])
    if problems:
        raise UserError("\n".join(problems))
    directory, init_from = Path(config.run.directory), config.checkpoint.init_from
    train_state = state_of(directory, resume) if resume else TrainState.new()
    return PreparedRun(
        config=config,
        training=training,
        validation=dict(zip(names, validation, strict=True)),
        model=model,
        world=world,
        resume=resume,
        directory=directory,
        initial_weights=checkpoint_in(Path(init_from)) if init_from and resume is None else None,
        train_state=train_state,
        stream=_stream(config, training, TrainState.new()),
        identity=identity(config, model, training),
        finished=train_state.step >= config.run.max_steps and status.read(directory).state == "finished",
    )


def state_of(run: Path, checkpoint: Path) -> TrainState:
    """The state that a run resumes from with a checkpoint: after the rows of a spike if it was rewound to there."""
    return after_rewinds(run, checkpoint_index.read(checkpoint).train_state)


def opened_corpus(location: str, cache: CacheSection) -> Corpus:
    """The corpus at `location`, with the cache of a run. Raises UserError if there is none."""
    directory = Path(cache.directory) if cache.directory else None
    return open_corpus(location, directory, int(cache.gigabytes * 1e9), cache.wait_seconds)


def identity(config: RunConfig, model: ModelConfig, training: list[Corpus]) -> checkpoint_index.Identity:
    """The settings that may not change over the life of a run, under their keys in a run file."""
    data, weights = config.data, _weights_in_rows(config, training)
    return {
        "run.seed": config.run.seed,
        "model": model.model_dump(),
        **{f"optimizer.{key}": value for key, value in config.optimizer.identity().items()},
        "wrapper": config.wrapper.identity() if config.wrapper else None,
        "tokenizer_sha256": training[0].manifest.tokenizer.sha256,
        "data": {
            "train": [
                {"corpus": corpus.fingerprint, "weight": weight}
                for corpus, weight in zip(training, weights, strict=True)
            ],
            **data.model_dump(mode="json", include={"objective", "curriculum", "lanes"}),
        },
    }


def _differences_from_resumed(
    saved: checkpoint_index.Index, config: RunConfig, model: ModelConfig, training: list[Corpus]
) -> list[str]:
    """How this run differs from the run that saved the checkpoint, one line for each key."""
    if problems := saved.differences(identity(config, model, training)):
        by = " (by data.mixing)" if config.data.mixing else ""
        return [_OF_WEIGHTS.sub(rf"\g<0>{by}", line) for line in problems]
    problem = Mixture(_weights_in_rows(config, training)).miscount(saved.consumed, saved.train_state.position)
    found = f"the checkpoint of step {saved.step} is inconsistent: {problem}; {checkpoint_index.ANOTHER_RUN}"
    return [found] if problem else []


def _stream(config: RunConfig, training: list[Corpus], state: TrainState) -> Stream:
    """The training rows for steps from `state` on. Each stage of the curriculum ends after its `until_step`."""
    data, rows_before = config.data, config.batch.rows_before
    stages = [(max(stage.until_step, state.step), stage.objective) for stage in data.curriculum]
    return Stream(
        training,
        _weights_in_rows(config, training),
        config.run.seed,
        data.lanes,
        data.on_damage,
        data.packing_ratio,
        tuple((state.position + rows_before(end) - rows_before(state.step), objective) for end, objective in stages),
    )


def _weights_in_rows(config: RunConfig, training: list[Corpus]) -> list[float]:
    """The weight of each corpus in the mixture, in rows."""
    data = config.data
    weights = [entry.weight for entry in data.train]
    if data.mixing is None:
        return weights
    rows = [max(1, corpus.manifest.splits["train"].rows) for corpus in training]
    return rates(rows, weights, data.mixing.limit, data.mixing.temperature)


def _optimizer_problems(config: RunConfig, model: ModelConfig) -> list[str]:
    if config.optimizer.groups == [NO_DECAY_OF_VECTORS] and config.optimizer.freeze is None:
        return []
    from pretrain.engine.optimizers import groups  # PyTorch takes 2 s, and the launcher does without where it can

    return groups.problems(models.meta_model(model), config.optimizer)


def with_tokenizer_ids(model: ModelConfig, corpus: Corpus) -> tuple[ModelConfig, list[str]]:
    """Returns `model` with the size and the special ids of the corpus's tokenizer, and any contradictions."""
    described = corpus.tokenizer.describe()
    ids = {"vocab_size": described.size, "pad_id": described.pad, "eos_id": described.eos}
    if isinstance(model, Gemma) and (model.bos_id is not None or "bos_id" not in model.model_fields_set):
        ids["bos_id"] = corpus.tokenizer.vocabulary.start
    problems = [
        f"model.{name}: {own}, but {corpus.location}'s tokenizer has {value}"
        for name, value in ids.items()
        if name in model.model_fields_set and (own := getattr(model, name)) not in (None, value)
    ]
    return model.model_copy(update=ids), problems


def _differences_from_init(model: ModelConfig, path: Path, corpus: Corpus) -> list[str]:
    """How the model and its tokenizer differ from those in `path`, one line for each key."""
    try:
        checkpoint = checkpoint_in(path)
        saved = checkpoint_index.read(checkpoint).model
        tokenizer = load_tokenizer(checkpoint)
    except (UserError, FailedError) as error:
        return [f"checkpoint.init_from: {error}"]
    if saved.family != model.family:
        return [f"checkpoint.init_from: {path}: family is {saved.family!r} there, {model.family!r} here"]
    found = differences(_weight_settings(saved), _weight_settings(model))
    if unlike := differences(meaning_of_ids(tokenizer), meaning_of_ids(corpus.tokenizer)):
        found.append(
            f"built with another tokenizer than {corpus.location}: {'; '.join(unlike)}; `pretrain adapt {path} OUT "
            f"--tokenizer {corpus.location}` gives the model the corpus's vocabulary"
        )
    return [f"checkpoint.init_from: {path}: {line}" for line in found]


def _weight_settings(model: ModelConfig) -> dict[str, object]:
    """`architecture` with the number of embedding rows in place of `pad_vocab_to_multiple_of`, since several multiples
    give the same number."""
    settings = model.architecture()
    del settings["pad_vocab_to_multiple_of"]
    return {**settings, "rows of the embedding matrix": model.padded_vocab_size}


def _corpus_problems(split: str, corpora: list[Corpus]) -> list[str]:
    """Corpora without rows, and corpora listed twice with one objective, whose rows would come twice at a time."""
    contents = [(corpus.fingerprint, corpus.objective) for corpus in corpora]
    problems = [f"data.{split}: {corpus.location} has no {split} rows" for corpus in corpora if not corpus.rows(split)]
    return problems + [
        f"data.{split}.{number}: {corpus.location} is the same corpus as data.{split}.{before}; leave one out"
        for number, corpus in enumerate(corpora)
        if (before := contents.index(contents[number])) != number
    ]


def _name_problems(names: list[str], validation: list[Corpus]) -> list[str]:
    """Validation corpora that differ, or whose objectives differ, and that have the same name in metrics."""
    contents = [(corpus.fingerprint, corpus.objective) for corpus in validation]
    return [
        f"data.validation.{number}: named {name!r} like data.validation.{names.index(name)}; "
        f"set another name as data.validation.{number}.name"
        for number, name in enumerate(names)
        if names.index(name) != number and contents[number] != contents[names.index(name)]
    ]


def _tokenizer_differences(training: list[Corpus], validation: list[Corpus]) -> list[str]:
    first, *others = [*training, *validation]
    return [
        f"{corpus.location}: built with another tokenizer than {first.location}: {'; '.join(found)}"
        for corpus in others
        if (found := differences(meaning_of_ids(first.tokenizer), meaning_of_ids(corpus.tokenizer)))
    ]


def objective_problems(key: str, corpora: list[Corpus], cut: bool = False) -> list[str]:
    """Corpora whose rows don't fit the objective at `key`, which replaces the corpus's own. `cut`: rows may be cut
    to its length."""
    problems = []
    for corpus in corpora:
        objective, rows = corpus.other_objective, corpus.manifest.rows
        if objective is None:
            continue
        if rows.apply_at == "build":
            problems.append(f"{corpus.location} was built with apply_at: build; its objective can't change")
        elif rows.packing not in (packings := objective.as_cut.packings):
            found = f"but {corpus.location} was built with {rows.packing}"
            problems.append(f"{objective.full_name} needs rows.packing {' or '.join(packings)}, {found}")
        elif objective.raw_length != rows.raw_length and not (
            cut and not objective.columns and rows.raw_length % objective.raw_length == 0
        ):
            needs = f"rows of {objective.raw_length} tokens, but {corpus.location} has rows of {rows.raw_length}"
            problems.append(f"needs {needs}; {_way_out(key, objective, corpus)}")
        elif objective.columns and objective.as_cut != rows.objective:
            problems.append(f"{objective.name} needs rows cut for it with the same settings")
        else:
            problems += objective.problems(corpus.tokenizer.vocabulary)
    return [f"{key}: {problem}" for problem in problems]


def _way_out(key: str, objective: Objective, corpus: Corpus) -> str:
    """How to make an objective and a corpus fit that have rows of different lengths."""
    rows = corpus.manifest.rows
    fitted = objective.for_rows_of(rows.raw_length)
    if fitted and (not fitted.columns or fitted.as_cut == rows.objective):
        return f"with {key}='{_flow(fitted)}' it fits"
    # null first, or keys of the corpus file's own objective would stay
    changes = f"rows.objective=null rows.objective='{_flow(objective.as_cut)}'"
    return f"build rows for it: data-pipeline build the corpus file with {changes} and another `output`"


def _flow(objective: Objective) -> str:
    """An objective as YAML in one line, with the keys that were set."""
    settings = {"name": objective.name, **objective.model_dump(mode="json", exclude_unset=True)}
    return yaml.safe_dump(settings, default_flow_style=True, width=float("inf"), sort_keys=False).strip()


def _row_problems(config: RunConfig, model: ModelConfig, corpora: list[Corpus]) -> list[str]:
    """Corpora whose rows the model can't take because of their kind or length."""
    problems = []
    for corpus in corpora:
        objective = corpus.objective
        fitting = models.FAMILIES[model.family].objectives
        inputs, targets = objective.shape
        if objective.kind_of_batches not in fitting:
            found = f"{corpus.location} has {objective.name}"
            problems.append(f"model.family: {model.family} learns from {', '.join(fitting)}, but {found}")
        elif model.longest_sequence is not None and max(inputs, targets) > model.longest_sequence:
            found = f"{corpus.location} gives up to {inputs} inputs and {targets} targets"
            problems.append(f"model: takes sequences of {model.longest_sequence} tokens at most, but {found}")
    return list(dict.fromkeys(problems))  # once each: a corpus may serve both training and validation
