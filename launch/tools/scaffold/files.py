"""Writes the first corpus file and run file of a user, by the templates beside this, on top of files that ship."""

import math
import re
import shlex
from pathlib import Path
from string import Template
from typing import Any

import yaml

import data_pipeline
from data_pipeline.config import CorpusConfig, SourceConfig
from data_pipeline.foundation import paths
from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.objectives.masked_lm import MaskedLM
from data_pipeline.objectives.objective import Objective
from data_pipeline.sources.formats import OPTIONS
from launch.tools.scaffold.machine import SIZES, FirstRun, Machine, model_named, run_of_an_hour
from launch.tools.scaffold.text import PART, cut, sample_of, sources_of
from pretrain.config.models import ModelConfig

_TEMPLATES = Path(__file__).with_name("templates")
_SAMPLES = Path(data_pipeline.__file__).with_name("samples")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_ROWS = {  # by family, the shipped corpus file whose rows and tokens the first one takes
    "bart": "c4-bart",
    "encoder_only": "c4-bert",
    **dict.fromkeys(("decoder_only", "autoregressive", "double_decoder"), "c4-causal"),
}
_OTHER_ROWS = "c4-published"
_SHIPPED = "configs:corpora/wikipedia-c4-small.yaml"  # has the text that ships
_SENTINELS, _LARGEST_VOCABULARY = 100, 32_000
_BYTES_PER_TOKEN = 4  # English with a vocabulary of a few thousand
_SHORTER = "rows: {{objective: {{length: {longest}}}}}   # the model has no positions for more\n"
_TEXTBOOK = """\
optimizer: {{name: adamw, learning_rate: {rate:.1e}, betas: [0.9, 0.98], weight_decay: 0.1, gradient_clipping: 1.0}}
schedule: {{name: cosine, warmup_steps: {warmup}, final_learning_rate: {last_rate:.1e}}}"""
_RATES = {"t5-v1.1-1m": 3e-3, "t5-v1.1-5m": 2e-3, "t5-v1.1-15m": 1e-3}  # smaller models take larger ones
# The speedrun's recipe: docs/results/speedrun.md. Models with muP take the rates of its width.
_RECORD = """\
optimizer: {{name: muon, learning_rate: 1.0e-2, adamw_learning_rate: 2.0e-2, newton_schulz_dtype: {precision}}}
schedule: {{name: linear, warmup_steps: {warmup}, final_learning_rate: 0.0}}"""
_CURRICULUM = """\
  curriculum:                 # half of each row first: more to predict, and more to look for in the input
    - until_step: {until}
      objective: {{name: span_corruption, inputs_length: 342, noise_density: 0.5, mean_span_length: 5.0}}
"""
_INPUT_USE = "\n  - {{hook: input_use, every_steps: {evaluate}, rows: 256}}"
_NAMED_STEPS, _NAMED_BATCH = 10_000, 128  # of a model that the user names
_MICRO_BATCH = 8  # rows on a CPU
_SECONDS_TO_LOG = 10.0


def write_first_files(
    name: str, model: str | None, text: str | None, text_format: str | None, corpus: str | None
) -> list[str]:
    """Writes NAME.corpus.yaml, unless there is a `corpus` already, and NAME.run.yaml into the current folder.

    Returns lines that say what they were made for, and the next commands. `text` is a path, a glob or a URL of
    `text_format`, by default what its names and first bytes say; without it the corpus is made from the text that
    ships. Without a `model`, model and steps are those for which this machine takes an hour. Raises UserError, before
    anything is written, for a name that is no file name, an unknown model or format, text that no reader reads, and a
    file that exists.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"NAME: {name!r}: expected letters, digits, `.`, `_` and `-`, since files are named after it")
    formats = [known for known in OPTIONS if known != "pairs"]  # these need an objective of their own
    if text_format is not None and text_format not in formats:
        raise UserError(f"--format: {text_format!r}; expected one of {', '.join(formats)}")
    if text and corpus:
        raise UserError("--text and --corpus: a run has its text from one of them; give only one")
    try:
        config = model_named(model or SIZES[0])
    except ValueError as error:
        raise UserError(f"--model: {error}") from None
    run_file, corpus_file = Path(f"{name}.run.yaml"), Path(f"{name}.corpus.yaml")
    for path in [run_file] if corpus else [run_file, corpus_file]:
        if path.exists():
            raise UserError(f"{path}: exists already; choose another NAME")
    sources, lines = sources_of(text, text_format) if text else ([] if corpus else _shipped(), [])
    sources, found = cut(sources)
    sample, machine, objective = sample_of(sources), Machine.this(), _objective(config)
    vocabulary = sample.vocabulary(_LARGEST_VOCABULARY) if sample else _LARGEST_VOCABULARY
    lengths = objective.shape
    if isinstance(objective, MaskedLM):  # the head's FLOPs are those of the tokens that are predicted
        lengths = lengths[0], math.ceil(objective.mask_ratio * lengths[0])
    if model:
        seconds = _NAMED_BATCH * machine.seconds_of_row(config, lengths)
        first_run = FirstRun(model, config, _NAMED_STEPS, _NAMED_BATCH, seconds)
    else:
        text_rows = sample.bytes / _BYTES_PER_TOKEN / objective.raw_length if sample else math.inf
        first_run = run_of_an_hour(machine, vocabulary, _SENTINELS, lengths, text_rows)
    directory = corpus or f"corpora/{name}"
    contents = {run_file: _run_file(name, directory, first_run, machine, long_spans=not corpus)}
    if not corpus:
        is_cut = any(PART in source.options for source in sources)
        is_divided = any(source.split for source in sources)
        contents[corpus_file] = _filled(
            "corpus",
            run=run_file,
            rows=_ROWS.get(config.family, _OTHER_ROWS),
            name=name,
            sources="\n".join(f"  - {_flow(_as_written(source))}" for source in sources),
            dedup=_flow(not is_cut),
            by="position" if is_cut else "hash",
            held_out=0 if is_divided else sample.held_out() if sample else 0.01,
            vocab_size=min(vocabulary, (first_run.config.vocab_size or math.inf) - _SENTINELS),
        )
        if objective.shape[0] == config.longest_sequence:
            contents[corpus_file] += _SHORTER.format(longest=config.longest_sequence)
    for path, content in contents.items():
        with path.open("x") as file:
            file.write(content)
    return [
        *lines,
        *(found if text else []),
        *(sample.shown() if text and sample else []),
        f"machine: {machine}",
        f"model: {first_run}",
        f"wrote {'' if corpus else f'{corpus_file} and '}{run_file}. Next:",
        f"  data-pipeline {f'show {shlex.quote(corpus)}' if corpus else f'build {corpus_file}'}",
        f"  launch local {run_file}",
    ]


def _shipped() -> list[SourceConfig]:
    return load(paths.config(_SHIPPED), [], CorpusConfig).sources


def _objective(config: ModelConfig) -> Objective:
    """What rows are for, in the corpus of this model; they are no longer than the model has positions."""
    corpus_file = paths.config(f"configs:corpora/{_ROWS.get(config.family, _OTHER_ROWS)}.yaml")
    objective = load(corpus_file, [], CorpusConfig).rows.objective
    if config.longest_sequence and config.longest_sequence < objective.shape[0]:
        return objective.model_copy(update={"length": config.longest_sequence})
    return objective


def _as_written(source: SourceConfig) -> dict[str, Any]:
    """The keys of a source in the corpus file. A name that is the format's is left out."""
    without = {"name"} if source.name == source.format else None
    keys = source.model_dump(exclude_unset=True, exclude=without)
    if isinstance(source.path, str):
        keys["path"] = source.path.replace(f"{_SAMPLES}/", "${samples:}/")
    return keys


def _run_file(name: str, corpus: str, first_run: FirstRun, machine: Machine, long_spans: bool) -> str:
    """`long_spans`: whether rows have the length that the curriculum is for."""
    config, steps, curriculum = first_run.config, first_run.steps, ""
    if config.mup:
        optimizer = _RECORD.format(precision=machine.precision, warmup=steps // 20)
        if long_spans:
            curriculum = _CURRICULUM.format(until=max(1, 2 * steps // 3))
    else:
        rate = _RATES.get(first_run.model, 3e-4)
        optimizer = _TEXTBOOK.format(rate=rate, warmup=steps // 10, last_rate=rate / 10)
    reads_inputs = _ROWS.get(config.family, _OTHER_ROWS) in ("c4-published", "c4-bart")
    return _filled(
        "run",
        model=first_run.model,
        time=first_run.time,
        machine=machine.name,
        name=name,
        corpus=_flow(corpus),
        steps=steps,
        ids=", pad_id: 0, eos_id: 1" if "pad_id" in config.model_fields_set else "",
        workers=2 if machine.gpus else 0,
        batch=first_run.batch,
        micro_batch="auto" if machine.gpus else min(_MICRO_BATCH, first_run.batch),
        curriculum=curriculum,
        optimizer=optimizer,
        precision=machine.precision,
        save=_part(steps, 10),
        evaluate=_part(steps, 20),
        input_use=_INPUT_USE.format(evaluate=_part(steps, 20)) if reads_inputs else "",
        log=max(1, min(50, int(_SECONDS_TO_LOG / first_run.seconds))),
    )


def _part(steps: int, parts: int) -> int:
    return max(1, steps // parts)


def _filled(template: str, **values: object) -> str:
    return Template((_TEMPLATES / f"{template}.yaml").read_text()).substitute(values)


def _flow(value: Any) -> str:
    """`value` as YAML reads it back, in one line."""
    listed = yaml.safe_dump([value], default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False)
    return listed.removeprefix("[").removesuffix("]\n")
