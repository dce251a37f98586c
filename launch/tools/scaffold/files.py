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

import data_pipeline
from data_pipeline.base import paths
from data_pipeline.base.atomic import write_together
from data_pipeline.base.config_file import load
from data_pipeline.base.errors import StoreError, UserError
from data_pipeline.base.formatting import counted, duration
from data_pipeline.base.progress import set_activity
from data_pipeline.config import CorpusConfig, SourceConfig
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.objectives.denoising import Denoising
from data_pipeline.corpus.objectives.masked_lm import MaskedLM
from data_pipeline.corpus.objectives.objective import Objective
from data_pipeline.corpus.objectives.span_corruption import SpanCorruption
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.sources.formats import FORMATS
from launch.tools.scaffold.machine import EVALUATED, TOKENS_PER_PARAMETER, FirstRun, Machine, model_named, run_within
from launch.tools.scaffold.text import PART, Sample, SampleBy, sample_of, source_of
from launch.tools.scaffold.tokens import Tokens, keys_of, tokens_of
from pretrain.config.evaluation import InputUseSettings
from pretrain.config.model_config import ModelConfig
from pretrain.models import FAMILIES

SERIES = {  # by the name for users: shipped models, smallest first
    "t5gemma2": [f"t5gemma2-{size}" for size in ("1.2m", "4.5m", "15m", "58m", "214m", "828m", "2.8b")],
    "t5": [f"t5-v1.1-{size}" for size in ("1m", "5m", "15m", "small", "base", "large", "xl", "xxl")],
    "bart": ["bart-base", "bart-large"],
    "t5gemma": [f"t5gemma-{size}" for size in ("s", "b", "l", "xl")],
    "autoregressive": ["autoregressive-small", "autoregressive-yan2024"],
    "gpt2": ["gpt2-small", "gpt2-medium"],
    "bert": ["bert-base", "bert-large"],
}
_SAMPLES = f"{Path(data_pipeline.__file__).with_name('samples')}/"
_SHIPPED_TEXT = f"{_SAMPLES}c4-train.*.json.gz"
_CORPORA = {  # by objective, the shipped corpus file that the first corpus file extends
    **dict.fromkeys(("span_corruption", "iid_denoising", "prefix_lm", "full_lm"), "c4-published"),
    "ul2": "c4-ul2",
    "denoising": "c4-bart",
    **dict.fromkeys(("causal_lm", "causal_infilling"), "c4-causal"),
    "masked_lm": "c4-bert",
}
_LARGEST_VOCABULARY = 32_000
_BYTES_PER_TOKEN = 4  # English with a vocabulary of a few thousand
_RATES = {"t5-v1.1-1m": 3e-3, "t5-v1.1-5m": 2e-3, "t5-v1.1-15m": 1e-3}  # small models need larger rates
_LONG_SPANS = SpanCorruption(noise_density=0.5, mean_span_length=5.0)
_MICRO_BATCH = 8  # rows on a CPU
_SECONDS_TO_LOG = 10.0
_CORPUS_HEADER = """\
# The corpus of {name}.run.yaml. Every key: docs/reference/settings.md.
# sources: `sample_by: document` keeps a file of text in order, and cuts one of more than max_document_bytes at blank
#   lines; with `paragraph` or `line`, each of these is a document, and they are shuffled.
# cleaning: the profiles c4 and wikipedia have rules for pages as they were crawled or dumped.
# split: by hash: documents by chance; files: files by chance; position: the end of the source.
"""
_RUN_HEADER = """\
# Trains {model} on {corpus}: about {time} on {machine}. Every key: docs/reference/settings.md.
# model: `vocab_size: null` is the corpus's.
"""
_WRAPPED = textwrap.TextWrapper(80, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)


@dataclass(frozen=True)
class Corpus:
    """The corpus of the run, which is finished or is built from a text.

    Attributes:
        rows: number of rows of the text.
        vocabulary: tokens, without sentinels.
        pad, eos: the ids of these tokens.
        settings: the keys of its file; None: the corpus is finished.
        lines: what was found in the text.
    """

    location: str
    objective: Objective
    rows: float
    vocabulary: int
    sentinels: int
    pad: int
    eos: int
    settings: dict[str, Any] | None = None
    lines: Sequence[str] = ()


def write_first_files(
    name: str,
    text: str | None,
    text_format: str | None,
    sample_by: SampleBy | None,
    corpus: str | None,
    model: str | None,
    objective: str | None,
    hours: float,
) -> list[str]:
    """Writes NAME.run.yaml and, unless a finished corpus is given, NAME.corpus.yaml into the current folder.

    `text`: a path, glob or URL; None: pages of C4 that ship. `model`: a file of configs/models, or a key of SERIES,
    whose largest model is taken that this machine can train. `hours`: the maximum duration of training with its
    evaluations. Returns lines that say what was chosen and why, the alternatives, and the next commands.

    Raises UserError, before anything is written, for a wrong name, an unknown model, objective or format, text that no
    reader can read, and a file that exists.
    """
    run_file, corpus_file = Path(f"{name}.run.yaml"), Path(f"{name}.corpus.yaml")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UserError(f"NAME: {name!r}: expected letters, digits, `.`, `_` and `-`, since files are named after it")
    for path in [run_file] if corpus else [run_file, corpus_file]:
        if path.exists():
            raise UserError(f"{path}: exists already; choose another NAME")
    if objective and objective not in _CORPORA:
        raise UserError(f"--objective: {objective!r}; expected one of {', '.join(_CORPORA)}")
    data = _finished(corpus.rstrip("/")) if corpus else None
    names = _models(model, data.objective if data else _objective(objective) if objective else None)
    config = model_named(names[0])
    if data is None:
        task = _fitted(_objective(objective or _objectives(config)[0]), config.longest_sequence)
        data = _from_text(name, text, text_format, sample_by, task)
    elif config.longest_sequence and max(data.objective.shape) > config.longest_sequence:
        raise UserError(
            f"--corpus: {corpus}: has rows of {max(data.objective.shape)} tokens, more than {names[0]} takes"
        )
    set_activity("measuring this machine")
    machine, (inputs, targets) = Machine.this(), data.objective.shape
    if isinstance(data.objective, MaskedLM):  # the head computes only the tokens that are predicted
        targets = math.ceil(data.objective.mask_ratio * inputs)
    set_activity("choosing the model and its steps")
    vocabulary = data.vocabulary + data.sentinels
    run = run_within(hours / (1 + EVALUATED), names, machine, vocabulary, (inputs, targets), data.rows)
    settings, seconds = _run_settings(name, data, run, machine)
    time = duration(run.steps * run.seconds + seconds)
    header = _RUN_HEADER.format(model=run.model, corpus=data.location, time=time, machine=machine.name)
    contents = {run_file: header + _yaml(settings)}
    if data.settings:
        of_corpus = dict(data.settings)
        if "kind" not in of_corpus["tokenizer"]:  # a trained vocabulary may be smaller, for a model with its own size
            vocab_size = min(data.vocabulary, (run.config.vocab_size or math.inf) - data.sentinels)
            of_corpus["tokenizer"] = {"vocab_size": vocab_size, "sentinels": data.sentinels}
        contents[corpus_file] = _CORPUS_HEADER.format(name=name) + _yaml(of_corpus)
    write_together({path: content.encode() for path, content in contents.items()})
    choices = [f"machine: {machine}", *_choices(run, data, time, settings)]
    return [
        *data.lines,
        *(line for choice in choices for line in _WRAPPED.wrap(choice)),
        f"wrote {f'{corpus_file} and ' if data.settings else ''}{run_file}. Next:",
        f"  data-pipeline {f'build {corpus_file}' if data.settings else f'show {shlex.quote(data.location)}'}",
        f"  launch local {run_file}",
    ]


def _models(model: str | None, objective: Objective | None) -> list[str]:
    """The models to choose from: of a series, or the one that is named; without `model`, of the first series that
    learns the `objective`. Raises UserError for an unknown model, and for one that doesn't learn the objective."""
    learn = [one for one in SERIES if objective is None or _learns(model_named(SERIES[one][0]), objective)]
    model = model or [*learn, *SERIES][0]
    names = SERIES.get(model, [model])
    try:
        config = model_named(names[0])
    except ValueError:
        raise UserError(f"--model: {model!r}; expected a file of configs/models, or {', '.join(SERIES)}") from None
    if objective and not _learns(config, objective):
        raise UserError(f"--model: {names[0]} doesn't learn {objective.name}; expected one of {', '.join(learn)}")
    return names


def _learns(config: ModelConfig, objective: Objective) -> bool:
    return objective.kind_of_batches in FAMILIES[config.family].objectives


def _objectives(config: ModelConfig) -> list[str]:
    """The objectives with which the model can learn from plain text, its own first."""
    known = [one for one in FAMILIES[config.family].objectives if one in _CORPORA]
    return sorted(known, key=lambda one: (config.family, one) != ("bart", "denoising"))


def _shipped(objective: str, *changes: str) -> CorpusConfig:
    """The shipped corpus file of an objective, with `changes`."""
    return load(paths.config(f"configs:corpora/{_CORPORA[objective]}.yaml"), changes, CorpusConfig)


def _objective(name: str) -> Objective:
    """The objective of this name in its shipped corpus file, or else with its defaults."""
    found = _shipped(name).rows.objective
    return found if found.name == name else _shipped(name, f"rows.objective={{name: {name}}}").rows.objective


def _fitted(objective: Objective, most: int | None) -> Objective:
    """`objective`, with rows of at most `most` tokens."""
    if most is None or max(objective.shape) <= most:
        return objective
    return type(objective).model_validate({**objective.model_dump(), "length": most})


def _finished(location: str) -> Corpus:
    """The corpus that the user gives. Raises UserError if it isn't there, or holds nothing out."""
    try:
        corpus = open_corpus(location)
    except UserError as error:
        raise type(error)(f"--corpus: {error}") from None
    if not corpus.rows("validation"):
        raise UserError(f"--corpus: {location}: has no held-out rows; build it with a larger split.validation_fraction")
    sentinels, vocabulary = corpus.tokenizer.sentinels, corpus.tokenizer.vocabulary
    own = corpus.tokenizer.size - sentinels
    rows = corpus.rows("train")
    return Corpus(location, corpus.objective, rows, own, sentinels, vocabulary.pad, vocabulary.eos)


def _from_text(
    name: str, text: str | None, text_format: str | None, sample_by: SampleBy | None, objective: Objective
) -> Corpus:
    """The corpus that is built from the files at `text`. Raises UserError for text that no reader can read."""
    formats = [name for name, known in FORMATS.items() if not known.pairs]  # pairs need another objective
    if text_format not in (None, *formats):
        raise UserError(f"--format: {text_format!r}; expected one of {', '.join(formats)}")
    try:
        source, files, lines = source_of(text or _SHIPPED_TEXT, text_format, sample_by)
        sample, damage = sample_of(source, files)
        tokens = tokens_of(source, files, sample.texts, _LARGEST_VOCABULARY)
        objective = objective if tokens is None else _for_tokens(objective, tokens)
        settings = _corpus_settings(name, objective, source, sample, tokens)
    except StoreError:
        raise
    except UserError as error:
        reason = str(error).removeprefix("file://")
        raise UserError(reason if reason.startswith("--") else f"--text: {reason}") from None
    about = tokens.shown(sample.cut_at) if tokens else []
    lines = [*lines, *sample.shown(), *damage, *(line for one in about for line in _WRAPPED.wrap(one))]
    sentinels = settings["tokenizer"]["sentinels"]
    if tokens is None:
        rows = sample.bytes / _BYTES_PER_TOKEN / objective.raw_length
        vocabulary = sample.vocabulary(_LARGEST_VOCABULARY)
        return Corpus(f"corpora/{name}", objective, rows, vocabulary, sentinels, 0, 1, settings, lines)
    known = Tokenizer(tokens.model, settings["tokenizer"].get("special_tokens", ()), sentinels).vocabulary
    if problems := objective.problems(known):
        raise UserError(f"--objective: {objective.name}: {problems[0]}, for {tokens.what}")
    rows = sample.documents * (1.0 if tokens.is_row else tokens.lengths.mean() / objective.raw_length)
    own = known.size - sentinels
    return Corpus(f"corpora/{name}", objective, rows, own, sentinels, known.pad, known.eos, settings, lines)


def _for_tokens(objective: Objective, tokens: Tokens) -> Objective:
    """`objective` with rows that take a document, and without what needs sentences."""
    if isinstance(objective, Denoising):
        objective = objective.model_copy(update={"permute_sentence_ratio": 0.0})
    if not tokens.is_row:
        return objective
    lengths = range(tokens.row, tokens.row + 8)
    return next(filter(None, map(objective.for_rows_of, lengths)), objective)


def _corpus_settings(
    name: str, objective: Objective, source: SourceConfig, sample: Sample, tokens: Tokens | None
) -> dict[str, Any]:
    """The keys of a corpus file, without a vocabulary for text. Raises UserError for too little text."""
    shipped = _shipped(objective.name)
    rows: dict[str, Any] = {} if shipped.rows.objective == objective else {"objective": objective.model_dump()}
    tokenizer: dict[str, Any] = {"sentinels": max(shipped.tokenizer.sentinels, objective.sentinels)}
    if tokens:
        special = {"special_tokens": shipped.tokenizer.special_tokens} if shipped.tokenizer.special_tokens else {}
        tokenizer = {**keys_of(tokens.tokenizer), **special, **tokenizer}
        if tokens.is_row and "complete_documents" in objective.packings:
            rows |= {"packing": "complete_documents"}
        rows |= {"apply_at": "load"}
    is_cut, whole_files = PART in source.options, source.options.get("sample_by") == "document"
    path = source.path.replace(_SAMPLES, "${samples:}/") if isinstance(source.path, str) else source.path
    options = {"options": source.options} if source.options else {}
    return {
        "extends": f"configs:corpora/{_CORPORA[objective.name]}.yaml",
        "name": name,
        "output": f"corpora/{name}",
        "sources": [{"format": source.format, "path": path, **options}],
        "cleaning": {"profile": "none"},
        "dedup": {**({"urls": None} if source.format == "text" else {}), "documents": not is_cut},
        "split": {
            "by": "position" if is_cut else "files" if whole_files else "hash",
            "validation_fraction": sample.held_out(),
        },
        "tokenizer": tokenizer,
        **({"rows": rows} if rows else {}),
    }


def _choices(run: FirstRun, data: Corpus, time: str, settings: dict[str, Any]) -> list[str]:
    """What was chosen, and the alternatives."""
    read = f"the run reads {run.tokens_per_parameter:.2g} tokens a parameter ({TOKENS_PER_PARAMETER} are usual)"
    choices = [f"model: {run.model}; {read}. Others: --model {', '.join(SERIES)}, or a file of configs/models; --hours"]
    if data.settings:
        others = [one for one in _objectives(run.config) if one != data.objective.name]
        objective = f"objective: {data.objective.name}, rows of {data.objective.raw_length:,} tokens"
        choices.append(f"{objective}. Others: --objective {', '.join(others)}" if others else objective)
    choices.append(f"optimizer: {settings['optimizer']['name']} (docs/results/speedrun.md)")
    for stage in settings["data"].get("curriculum", []):
        why = "so that the decoder learns sooner to read its input; leave out data.curriculum for T5's 15 % throughout"
        choices.append(f"curriculum: half of each row is masked until step {stage['until_step']:,}, {why}")
    estimated = "estimated from the model's FLOPs and the speed of this machine when nothing else runs on it"
    steps = f"steps: {run.steps:,} of {counted(run.batch, 'row')}: about {time} with evaluations, {estimated}"
    return [*choices, steps]


def _run_settings(name: str, data: Corpus, run: FirstRun, machine: Machine) -> tuple[dict[str, Any], float]:
    """The keys of a run file, and the seconds that evaluations take."""
    config, steps = run.config, run.steps
    of_data: dict[str, Any] = {"train": [{"corpus": data.location}], "validation": [{"corpus": data.location}]}
    if config.mup:  # the speedrun's recipe (docs/results/speedrun.md), whose rates muP transfers to other widths
        rates = {"learning_rate": 0.01, "adamw_learning_rate": 0.02}
        optimizer: dict[str, Any] = {"name": "muon", **rates, "newton_schulz_dtype": machine.precision}
        schedule: dict[str, Any] = {"name": "linear", "warmup_steps": steps // 20, "final_learning_rate": 0.0}
        long_spans = _LONG_SPANS.for_rows_of(data.objective.raw_length)
        if data.settings and data.objective.name == "span_corruption" and long_spans:
            of_data["curriculum"] = [{"until_step": max(1, 2 * steps // 3), "objective": long_spans.model_dump()}]
    else:
        rate = _RATES.get(run.model, 3e-4)
        regularization = {"weight_decay": 0.1, "gradient_clipping": 1.0}
        optimizer = {"name": "adamw", "learning_rate": rate, "betas": [0.9, 0.98], **regularization}
        schedule = {"name": "cosine", "warmup_steps": steps // 10, "final_learning_rate": round(rate / 10, 8)}
    of_data["workers"] = 2 if machine.gpus else 0
    reads_inputs = not InputUseSettings().problems({name: data.objective.full_name})
    # input_use passes a row with its input, with another row's and without one
    every, rows, seconds = run.evaluations(passes=4 if reads_inputs else 1)
    measured = ["validation_loss", *(["input_use"] if reads_inputs else [])]
    hooks: list[dict[str, Any]] = [{"hook": hook, "every_steps": every, "rows": rows} for hook in measured]
    if FAMILIES[config.family].generates is not None:
        hooks.append({"hook": "samples", "every_steps": min(2 * every, max(every, steps // 4)), "number": 4})
    hours = float(f"{steps * run.seconds / 3600:.3g}")
    log_every = max(1, min(50, int(_SECONDS_TO_LOG / run.seconds)))
    return {
        "extends": f"configs:models/{run.model}.yaml",
        "run": {"name": name, "directory": f"runs/{name}", "seed": 0, "max_steps": steps, "expected_hours": hours},
        "model": {
            "vocab_size": None,
            **({"pad_id": data.pad, "eos_id": data.eos} if "pad_id" in config.model_fields_set else {}),
        },
        "data": of_data,
        "batch": {
            "global_batch_size": run.batch,
            "micro_batch_size": "auto" if machine.gpus else min(_MICRO_BATCH, run.batch),
        },
        "optimizer": optimizer,
        "schedule": schedule,
        "precision": machine.precision,
        "deepspeed": {"zero_optimization": {"stage": 1}},
        "checkpoint": {"every_steps": every, "keep_last": 3},
        "evaluation": hooks,
        "tracking": {"mlflow": {"experiment": name}, "log_every_steps": log_every},
    }, seconds


def _yaml(settings: dict[str, Any]) -> str:
    """`settings` as YAML, in which innermost lists and mappings take one line."""
    return yaml.safe_dump(settings, default_flow_style=None, width=120, allow_unicode=True, sort_keys=False)
