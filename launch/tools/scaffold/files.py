"""Writes a first corpus file and run file. Both extend files that ship."""

import math
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

import data_pipeline
from data_pipeline.base import paths
from data_pipeline.base.atomic import write_together
from data_pipeline.base.config_file import load, problems
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import counted, duration
from data_pipeline.base.progress import set_activity
from data_pipeline.config import CorpusConfig, SourceConfig
from data_pipeline.corpus import Corpus, open_corpus
from data_pipeline.corpus.objectives.masked_lm import MaskedLM
from data_pipeline.corpus.objectives.objective import Objective
from data_pipeline.corpus.objectives.span_corruption import SpanCorruption
from data_pipeline.sources.formats import OPTIONS
from launch.tools.scaffold.machine import (
    DEFAULT,
    MOST_EVALUATED,
    SERIES,
    TOKENS_PER_PARAMETER,
    Evaluations,
    FirstRun,
    Machine,
    model_named,
    models_of,
    run_within,
)
from launch.tools.scaffold.text import PART, Sample, SampleBy, cut, sample_of, sources_of
from pretrain.config.evaluation import InputUseSettings
from pretrain.config.model_config import ModelConfig
from pretrain.models import FAMILIES

_SHIPPED_TEXT = Path(data_pipeline.__file__).with_name("samples")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_CORPORA = {  # by objective, the shipped corpus file that the first corpus file extends
    **dict.fromkeys(("span_corruption", "iid_denoising", "prefix_lm", "full_lm"), "c4-published"),
    "ul2": "c4-ul2",
    "denoising": "c4-bart",
    **dict.fromkeys(("causal_lm", "causal_infilling"), "c4-causal"),
    "masked_lm": "c4-bert",
}
_OBJECTIVES = {"bart": "denoising"}  # of a family, if it isn't the first that the family accepts
_SHIPPED = "configs:corpora/wikipedia-c4-small.yaml"  # the corpus of the text that ships
_SENTINELS, _LARGEST_VOCABULARY = 100, 32_000
_BYTES_PER_TOKEN = 4  # English with a vocabulary of a few thousand
_RATES = {"t5-v1.1-1m": 3e-3, "t5-v1.1-5m": 2e-3, "t5-v1.1-15m": 1e-3}  # small models need larger rates
_LONG_SPANS = SpanCorruption(noise_density=0.5, mean_span_length=5.0)
_TIMES_SAMPLED = 5
_PASSES_OF_INPUT_USE = 3  # with a row's input, with another row's and without one
_A_DOCUMENT_A_ROW = "complete_documents"
_MICRO_BATCH = 8  # rows on a CPU
_SECONDS_TO_LOG = 10.0
_CORPUS_HEADER = """\
# The corpus of {run}. Every key: docs/reference/settings.md.
# sources: `sample_by: document` keeps a file of text in order, and cuts one of more than max_document_bytes at blank
#   lines; with `paragraph` or `line`, each of these is a document, and they are shuffled. Add `language: en` to a
#   source if all of it is English.
# cleaning: the profiles c4 and wikipedia have rules for pages as they were crawled or dumped.
# split: by hash: documents by chance; files: files by chance, with this share of the bytes; position: the end of each
#   source.
# tokenizer: as many tokens as the text can fill, and the model has.
"""
_RUN_HEADER = """\
# Trains {model} on {corpus}: about {time} on {machine}. Every key: docs/reference/settings.md.
# model: `vocab_size: null` is the corpus's.
"""
_CURRICULUM_HEADER = """\
# curriculum: half of each row is masked first: more to predict, and more to look for in the input.
"""
_WRAPPED = textwrap.TextWrapper(80, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)


@dataclass(frozen=True)
class Wanted:
    """The user's choices for a training run. None: `launch init` chooses.

    Attributes:
        text: a path, glob or URL; None: the text that ships.
        text_format: the format of `text`.
        corpus: a finished corpus instead of text.
        model: a file of configs/models.
        family: a key of SERIES, if there is no `model`.
        size: a size of the family.
        objective: the objective of the corpus that is built.
        hours: the maximum duration of training and its evaluations.
        sample_by: what becomes a document of plain text: a file, a paragraph or a line.
        inputs_length: the objective's `inputs_length` or `length`.
        packing: how documents become rows.
    """

    name: str
    text: str | None = None
    text_format: str | None = None
    corpus: str | None = None
    model: str | None = None
    family: str | None = None
    size: str | None = None
    objective: str | None = None
    hours: float = 1.0
    sample_by: SampleBy | None = None
    inputs_length: int | None = None
    packing: str | None = None


def write_first_files(wanted: Wanted) -> list[str]:
    """Writes NAME.run.yaml and, unless a finished corpus is given, NAME.corpus.yaml into the current folder.

    Returns lines that say what was chosen and why, the alternatives, and the next commands. Without a size, the model
    is the largest that this machine can train in `hours`. Raises UserError, before anything is written, for a wrong
    name, an unknown model or format, text that no reader can read, and a file that exists.
    """
    name, text, corpus = wanted.name, wanted.text, wanted.corpus.rstrip("/") if wanted.corpus else None
    run_file, corpus_file = Path(f"{name}.run.yaml"), Path(f"{name}.corpus.yaml")
    _refuse(wanted, [run_file] if corpus else [run_file, corpus_file])
    finished = _finished(corpus) if corpus else None
    family = wanted.family or ([*_families_for(finished.objective), DEFAULT][0] if finished else DEFAULT)
    names = (wanted.model,) if wanted.model else models_of(family, wanted.size)
    try:
        config = model_named(names[0])
    except ValueError as error:
        raise UserError(f"--model: {error}") from None
    objective = _own_objective(finished, config) if finished else _objective(config, wanted)
    shipped = [] if text or corpus else load(paths.config(_SHIPPED), [], CorpusConfig).sources
    sources, lines = sources_of(text, wanted.text_format) if text else (shipped, [])
    sources, found = cut([] if finished else sources, wanted.sample_by)
    sample = sample_of(sources)
    set_activity("measuring this machine")
    machine = Machine.this()
    vocabulary = sample.vocabulary(_LARGEST_VOCABULARY) if sample else _LARGEST_VOCABULARY
    long_spans = None
    if objective.name == "span_corruption" and not finished:
        long_spans = _LONG_SPANS.for_rows_of(objective.raw_length)
    sentinels = max(_SENTINELS, objective.sentinels, long_spans.sentinels if long_spans else 0)
    if finished:
        sentinels = finished.tokenizer.sentinels
        vocabulary = finished.tokenizer.size - sentinels
    set_activity("choosing the model and its steps")
    hours, (lengths, text_rows) = (
        wanted.hours / (1 + MOST_EVALUATED),
        _rows(objective, finished, sample, wanted.packing),
    )
    first_run = run_within(hours, names, machine, vocabulary, sentinels, lengths, text_rows)
    reads_inputs = not InputUseSettings().problems({name: objective.full_name})
    evaluations = Evaluations.of(first_run, 1 + _PASSES_OF_INPUT_USE * reads_inputs)
    time = duration(first_run.steps * first_run.seconds + evaluations.seconds)
    location = corpus or f"corpora/{name}"
    settings = _run_settings(name, location, first_run, evaluations, machine, reads_inputs, long_spans)
    header = _RUN_HEADER.format(model=first_run.model, corpus=location, time=time, machine=machine.name)
    header += _CURRICULUM_HEADER if "curriculum" in settings["data"] else ""
    contents = {run_file: header + _yaml(settings)}
    if not corpus:
        tokens = min(vocabulary, (first_run.config.vocab_size or math.inf) - sentinels), sentinels
        settings = _corpus_settings(name, objective, sources, sample, tokens, wanted.packing)
        contents[corpus_file] = _CORPUS_HEADER.format(run=run_file) + _yaml(settings)
    write_together({path: content.encode() for path, content in contents.items()})
    choices = [
        f"machine: {machine}",
        _chosen_model(wanted, family, first_run),
        *([] if corpus else [_chosen_objective(config, objective)]),
        *([f"tokenizer: {lost}"] if text and sample and (lost := sample.lost_in_t5()) else []),
        *_chosen_recipe(first_run, long_spans),
        f"steps: {first_run.steps:,} of {counted(first_run.batch, 'row')}: about {time}, of which evaluations take "
        f"{duration(evaluations.seconds)}, estimated from the model's FLOPs and the speed of this machine when nothing "
        "else runs on it",
    ]
    return [
        *lines,
        *(found if text else []),
        *(sample.shown() if text and sample else []),
        *(line for choice in choices for line in _WRAPPED.wrap(choice)),
        f"wrote {'' if corpus else f'{corpus_file} and '}{run_file}. Next:",
        f"  data-pipeline {f'show {shlex.quote(corpus)}' if corpus else f'build {corpus_file}'}",
        f"  launch local {run_file}",
    ]


def _refuse(wanted: Wanted, files: list[Path]) -> None:
    """Raises UserError for choices that contradict each other, and for `files` that exist."""
    name, formats = wanted.name, [known for known in OPTIONS if known != "pairs"]  # pairs need another objective
    contradictions: dict[str, object] = {
        f"NAME: {name!r}: expected letters, digits, `.`, `_` and `-`, since files are named after it": (
            not _NAME.fullmatch(name)
        ),
        f"--format: {wanted.text_format!r}; expected one of {', '.join(formats)}": (
            wanted.text_format not in (None, *formats)
        ),
        "--text and --corpus: a run has its text from one of them; give only one": wanted.text and wanted.corpus,
        "--model: names a family and a size already; leave out --family and --size": (
            wanted.model and (wanted.family or wanted.size)
        ),
    }
    has = "a finished corpus has one; set `data.objective` in the run file instead"
    for option in ("objective", "inputs_length", "packing"):
        contradictions[f"--{option.replace('_', '-')}: {has}"] = wanted.corpus and getattr(wanted, option)
    contradictions |= {f"{path}: exists already; choose another NAME": path.exists() for path in files}
    for said, holds in contradictions.items():
        if holds:
            raise UserError(said)


def _rows(
    objective: Objective, finished: Corpus | None, sample: Sample | None, packing: str | None
) -> tuple[tuple[int, int], float]:
    """The lengths of a row's inputs and targets on average, and the number of rows of the text, infinite if unknown."""
    inputs, targets = objective.shape
    if isinstance(objective, MaskedLM):  # the head computes only the tokens that are predicted
        targets = math.ceil(objective.mask_ratio * inputs)
    if finished:
        return (inputs, targets), finished.rows("train")
    if sample is None:
        return (inputs, targets), math.inf
    rows = sample.bytes / _BYTES_PER_TOKEN / objective.raw_length
    if packing != _A_DOCUMENT_A_ROW:
        return (inputs, targets), rows
    filled = min(1.0, rows / sample.documents)  # of a row
    return (math.ceil(filled * inputs), math.ceil(filled * targets)), sample.documents


def _corpus_settings(
    name: str,
    objective: Objective,
    sources: Sequence[SourceConfig],
    sample: Sample | None,
    tokens: tuple[float, int],
    packing: str | None,
) -> dict[str, Any]:
    """The keys of a corpus file. `tokens`: numbers of tokens to train, and of sentinels."""
    is_cut = any(PART in source.options for source in sources)
    is_divided = any(source.split for source in sources)
    are_texts = all(source.format == "text" for source in sources)  # which have no URLs
    whole_files = all(source.options.get("sample_by") == "document" for source in sources)
    file, shipped = _corpus_for(objective.name), _shipped(objective.name)
    changed = {key: value for key, value in objective.model_dump().items() if value != getattr(shipped, key)}
    if objective.name != file.rows.objective.name:
        changed = {"name": objective.name, **changed}
    rows = {**({"packing": packing} if packing else {}), **({"objective": changed} if changed else {})}
    vocab_size, sentinels = tokens
    return {
        "extends": f"configs:corpora/{_CORPORA[objective.name]}.yaml",
        "name": name,
        "output": f"corpora/{name}",
        "sources": [_as_written(source) for source in sources],
        "cleaning": {"profile": "none"},
        "dedup": {**({"urls": None} if are_texts else {}), "documents": not is_cut},
        "split": {
            "by": "position" if is_cut else "files" if whole_files else "hash",
            "validation_fraction": 0 if is_divided else sample.held_out() if sample else 0.01,
        },
        "tokenizer": {
            "vocab_size": int(vocab_size),
            **({"sentinels": sentinels} if sentinels > file.tokenizer.sentinels else {}),
        },
        **({"rows": rows} if rows else {}),
    }


def _chosen_model(wanted: Wanted, series: str, first_run: FirstRun) -> str:
    """A line that says which model was chosen and why, and what the alternatives are."""
    read = f"{first_run.tokens_per_parameter:.2g} tokens a parameter"
    if wanted.model or wanted.size:
        return f"model: {first_run.model}; the run reads {read} ({TOKENS_PER_PARAMETER} are usual)"
    hours = f"{wanted.hours:g} {'hour' if wanted.hours == 1 else 'hours'}"
    if first_run.model == models_of(series)[0]:
        why = f"the smallest {series}; the run reads {read} ({TOKENS_PER_PARAMETER} are usual)"
    else:
        why = f"the largest {series} that reads {TOKENS_PER_PARAMETER} tokens a parameter in {hours} on this machine"
    families = [] if wanted.family else [f"--family {', '.join(one for one in SERIES if one != series)}"]
    others = [*families, f"--size {', '.join(SERIES[series][1])}", "--hours"]
    return f"model: {first_run.model}, {why}. Others: {'; '.join(others)}"


def _chosen_objective(config: ModelConfig, objective: Objective) -> str:
    others = [one for one in _objectives(config) if one != objective.name]
    said = f"objective: {objective.name}, rows of {objective.raw_length:,} tokens"
    return f"{said}. Others: --objective {', '.join(others)}" if others else said


def _objectives(config: ModelConfig) -> list[str]:
    """The objectives with which the model can learn from plain text."""
    return [one for one in FAMILIES[config.family].objectives if one in _CORPORA]


def _objective(config: ModelConfig, wanted: Wanted) -> Objective:
    """The objective of the model's corpus: the user's, or the family's. Its rows fit into the model's positions.

    Raises UserError for an objective that the family doesn't learn, and for a length or packing that it hasn't.
    """
    name, known = wanted.objective, _objectives(config)
    if name and name not in known:
        raise UserError(f"--objective: {config.family} doesn't learn {name!r}; expected one of {', '.join(known)}")
    objective = _shipped(name or _OBJECTIVES.get(config.family, known[0]))
    if wanted.packing and wanted.packing not in objective.packings:
        raise UserError(f"--packing: {objective.name} needs {' or '.join(objective.packings)}, not {wanted.packing}")
    most, length = config.longest_sequence, wanted.inputs_length
    if length is None:
        return _of_length(objective, most) if most and most < objective.shape[0] else objective
    if most and length > most:
        raise UserError(f"--inputs-length: {length}, but the model takes {most} tokens at most")
    return _of_length(objective, length)


def _of_length(objective: Objective, length: int) -> Objective:
    """`objective` with inputs of `length` tokens. Raises UserError, which names --inputs-length, if it has none."""
    key = next((key for key in ("length", "inputs_length") if key in type(objective).model_fields), None)
    if key is None:
        raise UserError(f"--inputs-length: {objective.name} has lengths of its own; set rows.objective")
    try:
        return type(objective).model_validate({**objective.model_dump(), key: length})
    except ValidationError as error:
        reason = "; ".join(problems(error, type(objective)))
        raise UserError(f"--inputs-length: {length}: {reason}") from None


def _finished(location: str) -> Corpus:
    """The corpus that the user gives. Raises UserError if it isn't there, or holds nothing out."""
    try:
        corpus = open_corpus(location)
    except UserError as error:
        raise type(error)(f"--corpus: {error}") from None
    if not corpus.rows("validation"):
        raise UserError(f"--corpus: {location}: has no held-out rows; build it with a larger split.validation_fraction")
    return corpus


def _families_for(objective: Objective) -> list[str]:
    """The series whose models learn `objective`."""
    return [series for series in SERIES if _learns(model_named(models_of(series)[0]), objective)]


def _learns(config: ModelConfig, objective: Objective) -> bool:
    return objective.kind_of_batches in FAMILIES[config.family].objectives


def _own_objective(corpus: Corpus, config: ModelConfig) -> Objective:
    """The objective of a finished corpus. Raises UserError if the model can't learn it."""
    objective, most, longest = corpus.objective, config.longest_sequence, max(corpus.objective.shape)
    problem = ""
    if not _learns(config, objective):
        able = ", ".join(_families_for(objective))
        way_out = f"give --family {able}" if able else "no family of `launch init` does"
        problem = f"has {objective.name}, which {config.family} doesn't learn; {way_out}"
    elif most and most < longest:
        problem = f"has rows of {longest} tokens, and the model takes {most} at most"
    if problem:
        raise UserError(f"--corpus: {corpus.location}: {problem}")
    return objective


def _corpus_for(objective: str, changes: Sequence[str] = ()) -> CorpusConfig:
    """The shipped corpus file of an objective, with `changes`."""
    return load(paths.config(f"configs:corpora/{_CORPORA[objective]}.yaml"), changes, CorpusConfig)


def _shipped(name: str) -> Objective:
    """The objective of this name in its shipped corpus file, or else with its defaults."""
    found = _corpus_for(name).rows.objective
    return found if found.name == name else _corpus_for(name, [f"rows.objective={{name: {name}}}"]).rows.objective


def _as_written(source: SourceConfig) -> dict[str, Any]:
    """The keys of a source in the corpus file; its name is left out if it is the format's."""
    without = {"name"} if source.name == source.format else None
    keys = source.model_dump(exclude_unset=True, exclude=without)
    if isinstance(source.path, str):
        keys["path"] = source.path.replace(f"{_SHIPPED_TEXT}/", "${samples:}/")
    return keys


def _chosen_recipe(first_run: FirstRun, long_spans: Objective | None) -> list[str]:
    """Lines that say which optimizer and curriculum were chosen, and why."""
    if not first_run.config.mup:
        why = "the usual choice; t5gemma2's models come with Muon, which learns faster here"
        return [f"optimizer: adamw, {why} (docs/results/speedrun.md)"]
    said = ["optimizer: muon with muP, which learns fastest in docs/results/speedrun.md. Other: adamw, as in T5's runs"]
    if long_spans:
        why = "so that the decoder learns sooner to read its input; leave out data.curriculum for T5's 15 % throughout"
        said.append(f"curriculum: half of each row is masked until step {_curriculum_end(first_run):,}, {why}")
    return said


def _curriculum_end(first_run: FirstRun) -> int:
    return max(1, 2 * first_run.steps // 3)


def _run_settings(
    name: str,
    corpus: str,
    first_run: FirstRun,
    evaluations: Evaluations,
    machine: Machine,
    reads_inputs: bool,
    long_spans: Objective | None,
) -> dict[str, Any]:
    """The keys of a run file.

    `reads_inputs`: whether `input_use` measures the model. `long_spans`: the curriculum's first objective; None: no
    curriculum suits the rows.
    """
    config, steps, rate = first_run.config, first_run.steps, _RATES.get(first_run.model, 3e-4)
    data: dict[str, Any] = {"train": [{"corpus": corpus}], "validation": [{"corpus": corpus}]}
    if config.mup:  # the speedrun's recipe (docs/results/speedrun.md), whose rates muP transfers to other widths
        rates = {"learning_rate": 0.01, "adamw_learning_rate": 0.02}
        optimizer: dict[str, Any] = {"name": "muon", **rates, "newton_schulz_dtype": machine.precision}
        schedule: dict[str, Any] = {"name": "linear", "warmup_steps": steps // 20, "final_learning_rate": 0.0}
        if long_spans:
            data["curriculum"] = [{"until_step": _curriculum_end(first_run), "objective": long_spans.model_dump()}]
    else:
        regularization = {"weight_decay": 0.1, "gradient_clipping": 1.0}
        optimizer = {"name": "adamw", "learning_rate": rate, "betas": [0.9, 0.98], **regularization}
        schedule = {"name": "cosine", "warmup_steps": steps // 10, "final_learning_rate": round(rate / 10, 8)}
    data["workers"] = 2 if machine.gpus else 0
    every = {"every_steps": evaluations.every_steps, "rows": evaluations.rows}
    hooks: list[dict[str, Any]] = [{"hook": "validation_loss", **every}]
    if reads_inputs:
        hooks.append({"hook": "input_use", **every})
    if FAMILIES[config.family].generates is not None:
        hooks.append({"hook": "samples", "every_steps": max(1, steps // _TIMES_SAMPLED), "number": 4})
    hours = float(f"{steps * first_run.seconds / 3600:.3g}")
    return {
        "extends": f"configs:models/{first_run.model}.yaml",
        "run": {"name": name, "directory": f"runs/{name}", "seed": 0, "max_steps": steps, "expected_hours": hours},
        "model": {"vocab_size": None, **({"pad_id": 0, "eos_id": 1} if "pad_id" in config.model_fields_set else {})},
        "data": data,
        "batch": {
            "global_batch_size": first_run.batch,
            "micro_batch_size": "auto" if machine.gpus else min(_MICRO_BATCH, first_run.batch),
        },
        "optimizer": optimizer,
        "schedule": schedule,
        "precision": machine.precision,
        "deepspeed": {"zero_optimization": {"stage": 1}},
        "checkpoint": {"every_steps": max(1, steps // 10), "keep_last": 3},
        "evaluation": hooks,
        "tracking": {
            "mlflow": {"experiment": name},
            "log_every_steps": max(1, min(50, int(_SECONDS_TO_LOG / first_run.seconds))),
        },
    }


def _yaml(settings: dict[str, Any]) -> str:
    """`settings` as YAML, in which innermost lists and mappings take one line."""
    return yaml.safe_dump(settings, default_flow_style=None, width=120, allow_unicode=True, sort_keys=False)
