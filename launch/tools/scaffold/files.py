"""Writes a first corpus file and run file. Both extend files that ship."""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import data_pipeline
from data_pipeline.base import paths
from data_pipeline.base.atomic import write_together
from data_pipeline.base.config_file import load
from data_pipeline.base.errors import StoreError, UserError
from data_pipeline.base.formatting import counted, duration
from data_pipeline.base.progress import set_activity
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.objectives.denoising import Denoising
from data_pipeline.corpus.objectives.masked_lm import MaskedLM
from data_pipeline.corpus.objectives.objective import Objective
from data_pipeline.corpus.objectives.span_corruption import SpanCorruption
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.sources.formats import FORMATS
from launch.tools.scaffold.machine import TOKENS_PER_PARAMETER, FirstRun, Machine, model_named, run_within
from launch.tools.scaffold.text import PART, SampleBy, sample_of, source_of
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
# by the model's family, the shipped corpus file that the first corpus file extends; of other families, T5's
_CORPORA = {"bart": "c4-bart", "decoder_only": "c4-causal", "encoder_only": "c4-bert"}


class _Recipe(NamedTuple):
    """What a kind of documents is trained with.

    Attributes:
        models: the models to choose from, smallest first.
        corpora: as `_CORPORA`.
    """

    models: Sequence[str]
    corpora: dict[str, str]


# by the kind of documents (`Tokens.what`); all others have the first of SERIES
_RECIPES = {
    "proteins": _Recipe([f"bart-{size}" for size in ("2.4m", "7.9m", "28m", "107m")], {"bart": "proteins-prott5"}),
    "SMILES": _Recipe(SERIES["t5gemma2"], dict.fromkeys(("t5gemma2", "t5gemma", "t5"), "molecules")),
}
# by the family of models with muP: Muon's rates, and the steps of which one is warm-up
_MUON = {
    "t5gemma2": ({"learning_rate": 0.01, "adamw_learning_rate": 0.02}, 20),  # docs/results/speedrun.md
    "bart": ({"learning_rate": 0.003, "adamw_learning_rate": 0.003}, 100),  # docs/results/proteins.md
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


@dataclass(frozen=True)
class Corpus:
    """The corpus of the run, which is finished or is built from a text.

    Attributes:
        rows: number of rows of the text.
        vocabulary: tokens, with sentinels.
        pad, eos: the ids of these tokens.
        models: the models to choose from, smallest first.
        settings: the keys of its file; None: the corpus is finished.
        lines: what was found in the text.
    """

    location: str
    objective: Objective
    rows: float
    vocabulary: int
    pad: int
    eos: int
    models: Sequence[str]
    settings: dict[str, Any] | None = None
    lines: Sequence[str] = ()


def write_first_files(
    name: str,
    text: str | None,
    text_format: str | None,
    sample_by: SampleBy | None,
    corpus: str | None,
    model: str | None,
    hours: float,
) -> list[str]:
    """Writes NAME.run.yaml and, unless a finished corpus is given, NAME.corpus.yaml into the current folder.

    `text`: a path, glob or URL; None: pages of C4 that ship. `model`: a file of configs/models, or a key of SERIES,
    whose largest model is taken that this machine can train; None: the models of the documents' recipe, else the first
    of SERIES. `hours`: the maximum duration of training with its evaluations. Returns lines that say what was chosen
    and why, and the next commands.

    Raises UserError, before anything is written, for a wrong name, an unknown model or format, text that no reader can
    read, and a file that exists.
    """
    run_file, corpus_file = Path(f"{name}.run.yaml"), Path(f"{name}.corpus.yaml")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UserError(f"NAME: {name!r}: expected letters, digits, `.`, `_` and `-`, since files are named after it")
    for path in [run_file] if corpus else [run_file, corpus_file]:
        if path.exists():
            raise UserError(f"{path}: exists already; choose another NAME")
    data = _finished(corpus.rstrip("/"), model) if corpus else _from_text(name, text, text_format, sample_by, model)
    set_activity("choosing the model and its steps")
    machine, (inputs, targets) = Machine.this(), data.objective.shape
    if isinstance(data.objective, MaskedLM):  # the head computes only the tokens that are predicted
        targets = math.ceil(data.objective.mask_ratio * inputs)
    run = run_within(hours, data.models, machine, data.vocabulary, (inputs, targets), data.rows)
    settings, time = _run_settings(name, data, run, machine), duration(3600 * run.hours)
    header = _RUN_HEADER.format(model=run.model, corpus=data.location, time=time, machine=machine.name)
    contents = {run_file: header + _yaml(settings)}
    if data.settings:
        if "kind" not in (tokenizer := data.settings["tokenizer"]):  # trained, as large as the model takes
            tokenizer = {"vocab_size": run.vocabulary - tokenizer["sentinels"], **tokenizer}
        contents[corpus_file] = _CORPUS_HEADER.format(name=name) + _yaml({**data.settings, "tokenizer": tokenizer})
    write_together({path: content.encode() for path, content in contents.items()})
    read = f"the run reads {run.tokens_per_parameter:.2g} tokens a parameter ({TOKENS_PER_PARAMETER} are usual)"
    recipe = "half of each row is masked for two thirds of the steps, so that the decoder learns to read its input"
    return [
        *data.lines,
        f"machine: {machine}",
        f"model: {run.model}; {read}; --model {', '.join(SERIES)}, or a file of configs/models",
        f"objective: {data.objective.name}, rows of {data.objective.raw_length:,} tokens",
        f"optimizer: {settings['optimizer']['name']}{f'; {recipe}' if 'curriculum' in settings['data'] else ''}",
        f"steps: {run.steps:,} of {counted(run.batch, 'row')}: about {time} with evaluations; --hours",
        f"wrote {f'{corpus_file} and ' if data.settings else ''}{run_file}. Next:",
        f"  data-pipeline {f'build {corpus_file}' if data.settings else f'show {shlex.quote(data.location)}'}",
        f"  launch local {run_file}",
    ]


def _models(model: str | None, objective: Objective | None) -> Sequence[str]:
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
    if objective and config.longest_sequence and max(objective.shape) > config.longest_sequence:
        raise UserError(f"--corpus: has rows of {max(objective.shape)} tokens, more than {names[0]} takes")
    return names


def _learns(config: ModelConfig, objective: Objective) -> bool:
    return objective.kind_of_batches in FAMILIES[config.family].objectives


def _finished(location: str, model: str | None) -> Corpus:
    """The corpus that the user gives. Raises UserError if it isn't there, holds nothing out, or doesn't fit `model`."""
    try:
        corpus = open_corpus(location)
    except UserError as error:
        raise type(error)(f"--corpus: {error}") from None
    if not corpus.rows("validation"):
        raise UserError(f"--corpus: {location}: has no held-out rows; build it with a larger split.validation_fraction")
    known, models = corpus.tokenizer.vocabulary, _models(model, corpus.objective)
    return Corpus(location, corpus.objective, corpus.rows("train"), known.size, known.pad, known.eos, models)


def _from_text(
    name: str, text: str | None, text_format: str | None, sample_by: SampleBy | None, model: str | None
) -> Corpus:
    """The corpus that is built from the files at `text`. Raises UserError for an unknown `model`, and for text that no
    reader can read."""
    formats = [name for name, known in FORMATS.items() if not known.pairs]  # pairs need another objective
    if text_format not in (None, *formats):
        raise UserError(f"--format: {text_format!r}; expected one of {', '.join(formats)}")
    try:
        source, files, lines = source_of(text or _SHIPPED_TEXT, text_format, sample_by)
        sample = sample_of(source, files)
        tokens = tokens_of(source, files, sample.texts, _LARGEST_VOCABULARY)
        held_out = sample.held_out()
    except StoreError:
        raise
    except UserError as error:
        reason = str(error).removeprefix("file://")
        raise UserError(reason if reason.startswith("--") else f"--text: {reason}") from None
    recipe = _RECIPES.get(tokens.what) if tokens else None
    models = recipe.models if recipe and model is None else _models(model, None)
    config = model_named(models[0])
    corpora = _CORPORA | (recipe.corpora if recipe else {})
    extended = f"configs:corpora/{corpora.get(config.family, 'c4-published')}.yaml"
    shipped = load(paths.config(extended), [], CorpusConfig)
    objective = _fitted(shipped.rows.objective, config.longest_sequence, tokens)
    special, sentinels = shipped.tokenizer.special_tokens, max(shipped.tokenizer.sentinels, objective.sentinels)
    tokenizer: dict[str, Any] = {"sentinels": sentinels}
    rows: dict[str, Any] = {} if shipped.rows.objective == objective else {"objective": objective.model_dump()}
    if tokens:
        tokenizer = {**keys_of(tokens.tokenizer), **({"special_tokens": special} if special else {}), **tokenizer}
        if tokens.is_row and "complete_documents" in objective.packings:
            rows["packing"] = "complete_documents"
        known = Tokenizer(tokens.model, special, sentinels).vocabulary
        if problems := objective.problems(known):
            raise UserError(f"--model: {objective.name}: {problems[0]}, for {tokens.what}")
        size, pad, eos = known.size, known.pad, known.eos
        rows_of_text = sample.documents * (1.0 if tokens.is_row else tokens.lengths.mean() / objective.raw_length)
    else:
        size, pad, eos = sample.vocabulary(_LARGEST_VOCABULARY) + sentinels, 0, 1
        rows_of_text = sample.bytes / _BYTES_PER_TOKEN / objective.raw_length
    if text and any("${" in one for one in ([source.path] if isinstance(source.path, str) else source.path)):
        raise UserError(f"--text: {text}: `${{` begins an interpolation in the corpus file; rename the file or folder")
    path = source.path.replace(_SAMPLES, "${samples:}/") if isinstance(source.path, str) else source.path
    options = {"options": source.options} if source.options else {}
    is_cut, whole_files = PART in source.options, source.options.get("sample_by") == "document"
    settings = {
        "extends": extended,
        "name": name,
        "output": f"corpora/{name}",
        "sources": [{"format": source.format, "path": path, **options}],
        "cleaning": {"profile": "none"},
        "dedup": {**({"urls": None} if source.format == "text" else {}), "documents": not is_cut},
        "split": {
            "by": "position" if is_cut else "files" if whole_files else "hash",
            "validation_fraction": held_out,
        },
        "tokenizer": tokenizer,
        **({"rows": rows} if rows else {}),
    }
    lines = [*lines, *sample.shown(), *(tokens.shown(sample.cut_at) if tokens else [])]
    return Corpus(f"corpora/{name}", objective, rows_of_text, size, pad, eos, models, settings, lines)


def _fitted(objective: Objective, longest: int | None, tokens: Tokens | None) -> Objective:
    """`objective`, with rows of at most `longest` tokens; of what is no prose, with rows that take a document, and
    without what needs sentences."""
    if tokens and isinstance(objective, Denoising):
        objective = objective.model_copy(update={"permute_sentence_ratio": 0.0})
    if tokens and tokens.is_row:
        lengths = range(tokens.row, tokens.row + 8)
        objective = next(filter(None, map(objective.for_rows_of, lengths)), objective)
    if longest and max(objective.shape) > longest:
        objective = type(objective).model_validate({**objective.model_dump(), "length": longest})
    return objective


def _run_settings(name: str, data: Corpus, run: FirstRun, machine: Machine) -> dict[str, Any]:
    """The keys of a run file."""
    config, steps = run.config, run.steps
    of_data: dict[str, Any] = {"train": [{"corpus": data.location}], "validation": [{"corpus": data.location}]}
    if config.mup:  # which transfers the rates to other widths
        rates, of_warmup = _MUON[config.family]
        optimizer: dict[str, Any] = {"name": "muon", **rates, "newton_schulz_dtype": machine.precision}
        schedule: dict[str, Any] = {"name": "linear", "warmup_steps": steps // of_warmup, "final_learning_rate": 0.0}
        long_spans = _LONG_SPANS.for_rows_of(data.objective.raw_length)
        if data.settings and data.objective.name == "span_corruption" and long_spans:
            of_data["curriculum"] = [{"until_step": max(1, 2 * steps // 3), "objective": long_spans.model_dump()}]
    else:
        rate = _RATES.get(run.model, 3e-4)
        regularization = {"weight_decay": 0.1, "gradient_clipping": 1.0}
        optimizer = {"name": "adamw", "learning_rate": rate, "betas": [0.9, 0.98], **regularization}
        schedule = {"name": "cosine", "warmup_steps": steps // 10, "final_learning_rate": round(rate / 10, 8)}
    of_data["workers"] = 2 if machine.gpus else 0
    every, rows = run.evaluations
    reads_inputs = not InputUseSettings().problems({name: data.objective.full_name})
    measured = ["validation_loss", *(["input_use"] if reads_inputs else [])]
    hooks: list[dict[str, Any]] = [{"hook": hook, "every_steps": every, "rows": rows} for hook in measured]
    if FAMILIES[config.family].generates is not None:
        hooks.append({"hook": "samples", "every_steps": min(2 * every, max(every, steps // 4)), "number": 4})
    hours = float(f"{run.steps * run.seconds / 3600:.3g}")
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
        "tracking": {
            "mlflow": {"experiment": name},
            "log_every_steps": max(1, min(50, int(_SECONDS_TO_LOG / run.seconds))),
        },
    }


def _yaml(settings: dict[str, Any]) -> str:
    """`settings` as YAML, in which innermost lists and mappings take one line."""
    return yaml.safe_dump(settings, default_flow_style=None, width=120, allow_unicode=True, sort_keys=False)
