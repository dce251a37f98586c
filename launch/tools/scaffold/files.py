"""Writes the first corpus file and run file of a user, by the templates beside this, on top of files that ship."""

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

import data_pipeline
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import counted, duration
from data_pipeline.sources.formats import OPTIONS
from launch.tools.scaffold.machine import MICRO_BATCH, FirstRun, Machine, model_named, run_of_an_hour, with_vocabulary
from launch.tools.scaffold.text import Source, sample_of, sources_of
from pretrain.models import outline

_TEMPLATES = Path(__file__).with_name("templates")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_ROWS = {  # by family, the shipped corpus file whose rows, tokens and lengths the first one takes
    "bart": "c4-bart",
    "encoder_only": "c4-bert",
    **dict.fromkeys(("decoder_only", "autoregressive", "double_decoder"), "c4-causal"),
}
_OTHER_ROWS = "c4-published"
_ROW_LENGTH = {"c4-causal": 1024}
_TARGETS = {_OTHER_ROWS: 114, "c4-bert": 77}  # predicted tokens of a row; else as many as it has
_SENTINELS, _LARGEST_VOCABULARY = 100, 32_000
_TOKENS_PER_ROW, _BYTES_PER_TOKEN = 568, 4  # T5's; English with a vocabulary of a few thousand
_LANGUAGE_HINT = "# add `language: en` if all of it is English"
_SHIPPED_HINT = "# the text that ships; `launch init NAME --text PATH` takes your own"
_SAMPLES = Path(data_pipeline.__file__).with_name("samples")
_SHIPPED = [  # the text that ships
    Source("wikipedia", f"{_SAMPLES}/enwiki-*-pages-articles*.xml.bz2", keys={"name": "enwiki", "language": "en"}),
    Source("c4", f"{_SAMPLES}/c4-train.*.json.gz", keys={"name": "c4", "language": "en"}),
]
_TEXT_COMMENT = (
    "# sample_by: `document` keeps a file in order; `paragraph`, `line`: each is a document, and they are shuffled\n"
)
_PARTS_COMMENT = """\
# split: the end of the last of these few files is held out; max_document_bytes cuts them at blank lines, in order
dedup: {documents: false}       # parts that repeat each other stay
"""
_ENOUGH_FILES, _PARTS = 20, 1000  # of fewer files the last parts are held out, of more some files
_SMALLEST_PART, _LARGEST_PART = 256, 8 << 20
_SHORTER = "rows: {{objective: {{length: {longest}}}}}   # the model has no positions for more\n"
_TEXTBOOK = """\
optimizer: {{name: adamw, learning_rate: {rate}, betas: [0.9, 0.98], weight_decay: 0.1, gradient_clipping: 1.0}}
schedule: {{name: cosine, warmup_steps: {warmup}, final_learning_rate: {last_rate}}}"""
# The speedrun's recipe: docs/results/speedrun.md. Models with muP take the rates of its width.
_RECORD = """\
optimizer: {{name: muon, learning_rate: 1.0e-2, adamw_learning_rate: 2.0e-2, newton_schulz_dtype: {precision}}}
schedule: {{name: linear, warmup_steps: {warmup}, final_learning_rate: 0.0}}"""
_CURRICULUM = """\
  curriculum:                 # half of each row first: more to predict, and more to look for in the input
    - until_step: {until}
      objective: {{name: span_corruption, inputs_length: {inputs}, noise_density: 0.5, mean_span_length: 5.0}}
"""
_INPUT_USE = "\n  - {{hook: input_use, every_steps: {evaluate}, rows: 256}}"
_SHOWN = 9_000_000  # parameters
_UNTRIED_SIZE = (
    "recipe: shown up to 9 M parameters (docs/results/babylm.md), on enwik8 up to 1.5 M; untried at this model's size"
)
_UNTRIED_ON_GPUS = "GPU: the time assumes 31 % MFU, which nobody has measured with this recipe"
_LONG_SPANS_INPUTS = 342  # with long spans, of the 568 tokens of a row; T5's have 512
_NAMED_STEPS, _NAMED_BATCH = 10_000, 128  # of a model that the user names
_SECONDS_TO_LOG = 10.0
_RATES = {"t5-v1.1-1m": "3.0e-3", "t5-v1.1-5m": "2.0e-3", "t5-v1.1-15m": "1.0e-3"}  # smaller models take larger ones


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
        config = model_named(model) if model else None
    except ValueError as error:
        raise UserError(f"--model: {error}") from None
    run_file, corpus_file = Path(f"{name}.run.yaml"), Path(f"{name}.corpus.yaml")
    for path in [run_file] if corpus else [run_file, corpus_file]:
        if path.exists():
            raise UserError(f"{path}: exists already; choose another NAME")
    given = _Text(*(sources_of(text, text_format) if text else ([] if corpus else _SHIPPED, [])))
    rows = _ROWS.get(config.family if config else "", _OTHER_ROWS)
    row_length = _ROW_LENGTH.get(rows, 512)
    longest = config.longest_sequence if config else None
    inputs = min(row_length, longest or row_length)
    lengths = inputs, min(inputs, _TARGETS.get(rows, inputs))
    machine, sample = Machine.this(), given.sample
    vocabulary = sample.vocabulary(_LARGEST_VOCABULARY) if sample else _LARGEST_VOCABULARY
    if model and config:
        seconds = _NAMED_BATCH * machine.seconds_of_row(config, lengths)
        first_run = FirstRun(model, config, _NAMED_STEPS, _NAMED_BATCH, seconds)
    else:
        text_rows = sample.bytes / _BYTES_PER_TOKEN / _TOKENS_PER_ROW if sample else math.inf
        first_run = run_of_an_hour(machine, vocabulary, _SENTINELS, lengths, text_rows)
    first_run = first_run.measured(machine, lengths)
    directory = corpus or f"corpora/{name}"
    contents = {run_file: _run_file(name, directory, first_run, machine, long_spans=not corpus)}
    if not corpus:
        models = min(_LARGEST_VOCABULARY, (model_named(first_run.model).vocab_size or math.inf) - _SENTINELS)
        contents[corpus_file] = _filled(
            "corpus",
            run=run_file,
            rows=rows,
            name=_flow(name),
            output=_flow(directory),
            comments=given.comments,
            hint=_LANGUAGE_HINT if text else _SHIPPED_HINT,
            sources="\n".join(given.sources),
            by="by: position, " if given.parts else "",
            held_out=given.held_out,
            vocab_size=int(min(vocabulary, models)),
            why="the text can fill" if vocabulary < models else "the model has",
        )
        if longest and longest < row_length:
            contents[corpus_file] += _SHORTER.format(longest=longest)
    for path, content in contents.items():
        with path.open("x") as file:
            file.write(content)
    return [
        *(given.lines if text else []),
        f"machine: {machine}",
        *first_run.promise(),
        *_untried(first_run, machine),
        f"wrote {'' if corpus else f'{corpus_file} and '}{run_file}. Next:",
        f"  data-pipeline {f'show {shlex.quote(corpus)}' if corpus else f'build {corpus_file}'}",
        f"  launch local {run_file}",
    ]


def _untried(first_run: FirstRun, machine: Machine) -> list[str]:
    """What of the speedrun's recipe nobody has measured at this size, or on this device."""
    if not first_run.config.mup:
        return []
    largest = outline(with_vocabulary(first_run.config, _LARGEST_VOCABULARY, _SENTINELS))
    reasons = {_UNTRIED_SIZE: largest.num_parameters() > _SHOWN, _UNTRIED_ON_GPUS: machine.gpus}
    return [reason for reason, applies in reasons.items() if applies]


class _Text:
    """The sources of a corpus as lines of its file, a sample of them if they exist, and lines and comments about them.

    The few files of plain text are cut into `parts` documents, of which the last are held out; 0: none is cut.
    """

    def __init__(self, found: list[Source], lines: list[str]):
        self.sample, self.lines = sample_of(found), lines
        self.sources: list[str] = []
        self.comments, self.parts = "", 0
        for source in found:
            files = source.files() if self.sample else []
            size = sum(file.bytes for file in files)
            if source.format == "text":
                options: dict[str, Any] = {"sample_by": "document"}
                self.comments += _TEXT_COMMENT
                if 0 < len(files) < _ENOUGH_FILES:
                    part = min(_LARGEST_PART, max(_SMALLEST_PART, size // _PARTS))
                    options["max_document_bytes"], self.parts = part, max(1, size // part)
                    self.comments += _PARTS_COMMENT
                source = replace(source, options=options)
            own = {"format": source.format, **source.keys, "path": source.path, "options": source.options}
            line = _flow({key: value for key, value in own.items() if value})
            self.sources.append(f"  - {line.replace(f'{_SAMPLES}/', '${samples:}/')}")
            if files:
                what = source.format + (f" in {source.options['text']!r}" if "text" in source.options else "")
                self.lines.append(f"text: {counted(len(files), 'file')}, {size / 1e6:,.1f} MB, format {what}")
        has_splits = any("split" in source.keys for source in found)
        self.held_out = 0 if has_splits else self.sample.held_out(self.parts) if self.sample else 0.01


def _run_file(name: str, corpus: str, first_run: FirstRun, machine: Machine, long_spans: bool) -> str:
    """`long_spans`: whether rows have the length that the curriculum is for."""
    steps, rows = first_run.steps, _ROWS.get(first_run.config.family, _OTHER_ROWS)
    warmup = max(1, steps // (10 if steps == _NAMED_STEPS else 20)) if steps > 1 else 0
    evaluate = max(1, steps // 20)
    input_use = _INPUT_USE.format(evaluate=evaluate) if rows in ("c4-published", "c4-bart") else ""
    rate = _RATES.get(first_run.model, "3.0e-4")
    optimizer, curriculum = _TEXTBOOK.format(rate=rate, warmup=warmup, last_rate=f"{float(rate) / 10:.1e}"), ""
    if first_run.config.mup:
        optimizer = _RECORD.format(precision=machine.precision, warmup=warmup)
        until = max(1, 2 * steps // 3)
        curriculum = _CURRICULUM.format(until=until, inputs=_LONG_SPANS_INPUTS) if long_spans else ""
    return _filled(
        "run",
        model=first_run.model,
        time=duration(steps * first_run.seconds),
        machine=machine.name,
        name=_flow(name),
        directory=_flow(f"runs/{name}"),
        corpus=_flow(corpus),
        steps=steps,
        ids=", pad_id: 0, eos_id: 1" if "pad_id" in first_run.config.model_fields_set else "",
        workers=2 if machine.gpus else 0,
        batch=first_run.batch,
        micro_batch="auto" if machine.gpus else min(MICRO_BATCH, first_run.batch),
        curriculum=curriculum,
        optimizer=optimizer,
        precision=machine.precision,
        save=max(1, steps // 10),
        evaluate=evaluate,
        input_use=input_use,
        log=max(1, min(50, int(_SECONDS_TO_LOG / first_run.seconds))),
    )


def _filled(template: str, **values: object) -> str:
    return Template((_TEMPLATES / f"{template}.yaml").read_text()).substitute(values)


def _flow(value: Any) -> str:
    """`value` as YAML reads it back, in one line; strings without quotes if they are plain."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    is_plain = not isinstance(value, str) or re.fullmatch(r"[A-Za-z][\w./-]*", value)
    return str(value) if is_plain else json.dumps(value, ensure_ascii=False)
