"""The first corpus file and run file of a user: a few lines each, on top of files that ship."""

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import data_pipeline
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import counted, duration
from data_pipeline.sources import OPTIONS
from launch.tools.scaffold.machine import Course, Machine, an_hour, as_named, model_named
from launch.tools.scaffold.text import Sample, Source, sample_of, sources_of

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_ROWS = {  # by family, the shipped corpus file whose rows, tokens and lengths the first one takes
    "t5": "c4-published",
    "vanilla": "c4-published",
    "modern": "c4-published",
    "t5gemma": "c4-published",
    "t5gemma2": "c4-published",
    "bart": "c4-bart",
    "encoder_only": "c4-bert",
    "decoder_only": "c4-causal",
    "autoregressive": "c4-causal",
    "double_decoder": "c4-causal",
}
_ROW_LENGTH = {"c4-causal": 1024}
_TARGETS = {"c4-published": 114, "c4-bert": 77}  # predicted tokens of a row; else as many as it has
_SENTINELS, _MOST_PIECES = 100, 32_000
_TOKENS_OF_ROW, _BYTES_OF_TOKEN = 568, 4  # T5's; English with a few thousand pieces
_CORPUS = """\
# The corpus of {run}. `pretrain reference` shows every key.
extends: configs:corpora/{rows}.yaml
name: {name}
output: {output}
{comments}sources:                        {of_sources}
{sources}
cleaning: {{profile: none}}       # c4, wikipedia: rules for pages as they were crawled or dumped
split: {{validation_fraction: {held_out}}}
tokenizer: {{vocab_size: {pieces}}}   # pieces, as many as {why}
"""
_OWN = "# add `language: en` if all of it is English"
_SHIPS = "# the text that ships; `launch init NAME --text PATH` takes your own"
_SAMPLES = {  # by format
    "wikipedia": 'name: enwiki, language: en, path: "${samples:}/enwiki-*-pages-articles*.xml.bz2"',
    "c4": 'name: c4, language: en, path: "${samples:}/c4-train.*.json.gz"',
}
_OF_TEXT = (
    "# sample_by: `document` keeps a file in order; `paragraph`, `line`: each is a document, and they are shuffled\n"
)
_OF_PIECES = """\
# max_document_bytes: so few files are cut at blank lines, in order, so that some pieces can be held out
dedup: {documents: false}       # pieces that repeat each other stay
"""
_FEW_FILES, _PIECES_OF_FEW = 500, 1000  # of 500 documents, 1 % held out is none once in 150 times
_SMALLEST_PIECE = 256
_SHORTER = "rows: {{objective: {{length: {longest}}}}}   # the model has no positions for more\n"
_RUN = """\
# Trains {model} on {corpus}{time}. `pretrain reference` shows every key.
extends: configs:models/{model}.yaml
run: {{name: {name}, directory: {directory}, seed: 0, max_steps: {steps}}}
model: {{vocab_size: null{ids}}}   # as the corpus has
data:
  train: [{{corpus: {corpus}}}]
  validation: [{{corpus: {corpus}}}]
  workers: {workers}
batch: {{global_batch_size: {batch}, micro_batch_size: {micro_batch}}}
optimizer: {{name: adamw, learning_rate: {rate}, betas: [0.9, 0.98], weight_decay: 0.1, gradient_clipping: 1.0}}
schedule: {{name: cosine, warmup_steps: {warmup}, final_learning_rate: {last_rate}}}
precision: {precision}
deepspeed: {{zero_optimization: {{stage: 1}}}}
checkpoint: {{every_steps: {save}, keep_last: 3}}
evaluation: [{{hook: validation_loss, every_steps: {evaluate}, rows: 256}}]
tracking: {{mlflow: {{uri: "sqlite:///runs/mlflow.db", experiment: {name}}}, log_every_steps: {log}}}
"""
_NAMED_STEPS, _NAMED_BATCH = 10_000, 128  # of a model that the user names
_SECONDS_TO_LOG = 10.0
_RATES = {"t5-v1.1-1m": "3.0e-3", "t5-v1.1-5m": "2.0e-3", "t5-v1.1-15m": "1.0e-3"}  # smaller models take larger ones


@dataclass(frozen=True)
class Written:
    """The files, and lines that say what they were made for."""

    corpus_file: Path | None
    run_file: Path
    lines: list[str]


def write_first_files(
    name: str, model: str | None, text: str | None, text_format: str | None, corpus: str | None
) -> Written:
    """Writes NAME.corpus.yaml, unless there is a `corpus` already, and NAME.run.yaml into the current folder.

    `text` is a path, a glob or a URL of `text_format`, by default what its names and first bytes say; without it the
    corpus is made from the text that ships. Without a `model`, model and steps are those for which this machine takes
    an hour. Raises UserError, before anything is written, for a name that is no file name, an unknown model or format,
    text that no reader reads, and a file that exists.
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
    run_file, corpus_file = Path(f"{name}.run.yaml"), None if corpus else Path(f"{name}.corpus.yaml")
    for path in (run_file, corpus_file):
        if path and path.exists():
            raise UserError(f"{path}: exists already; choose another NAME")
    found = _Text([], None, []) if corpus else _own(text, text_format) if text else _shipped()
    rows = _ROWS[config.family if config else "t5"]
    shorter = config.longest_sequence if config else None
    inputs = int(min(_ROW_LENGTH.get(rows, 512), shorter or math.inf))
    lengths = inputs, min(inputs, _TARGETS.get(rows, inputs))
    machine, possible = Machine.this(), found.sample.pieces(_MOST_PIECES) if found.sample else _MOST_PIECES
    if model and config:
        course = as_named(machine, model, config, _NAMED_STEPS, _NAMED_BATCH, lengths)
    else:
        there = found.sample.bytes / _BYTES_OF_TOKEN / _TOKENS_OF_ROW if found.sample else math.inf
        course = an_hour(machine, possible, _SENTINELS, lengths, there)
    directory = corpus or f"corpora/{name}"
    contents = {run_file: _run_file(name, directory, course, machine)}
    if corpus_file:
        of_model = min(_MOST_PIECES, (model_named(course.model).vocab_size or math.inf) - _SENTINELS)
        contents[corpus_file] = _CORPUS.format(
            run=run_file,
            rows=rows,
            name=_quoted(name),
            output=_quoted(directory),
            comments=found.comments,
            of_sources=_OWN if text else _SHIPS,
            sources="\n".join(_listed(source, shipped=not text) for source in found.sources),
            held_out=found.held_out,
            pieces=int(min(possible, of_model)),
            why="the text can fill" if possible < of_model else "the model has",
        )
        if shorter and shorter < _ROW_LENGTH.get(rows, 512):
            contents[corpus_file] += _SHORTER.format(longest=shorter)
    for path, content in contents.items():
        with path.open("x") as file:
            file.write(content)
    seconds = duration(course.steps * course.seconds)
    lines = [
        *found.lines,
        f"machine: {machine}",
        f"model: {course.model}, {course.steps:,} steps of {course.batch} rows: about {seconds}",
    ]
    return Written(corpus_file, run_file, lines)


@dataclass(frozen=True)
class _Text:
    """The sources of a corpus, a sample of them if they are there, and lines and comments about them."""

    sources: list[Source]
    sample: Sample | None
    lines: list[str]
    comments: str = ""
    pieces: int = 0
    """Into how many documents plain text is cut; 0: it isn't."""

    @property
    def held_out(self) -> float:
        if any(source.split for source in self.sources):
            return 0
        if self.sample is None:
            return 0.01
        if self.pieces:
            return replace(self.sample, documents=max(self.pieces, self.sample.documents), identities=[]).held_out
        return self.sample.held_out


def _shipped() -> _Text:
    folder = Path(data_pipeline.__file__).with_name("samples")
    sources = [
        Source("wikipedia", f"{folder}/enwiki-*-pages-articles*.xml.bz2"),
        Source("c4", f"{folder}/c4-train.*.json.gz"),
    ]
    return _Text(sources, sample_of(sources), [])


def _own(text: str, text_format: str | None) -> _Text:
    found, lines = sources_of(text, text_format)
    sample = sample_of(found)
    sources, comments, pieces = [], "", 0
    for source in found:
        files = source.files() if sample else []
        if source.format == "text":
            size = sum(file.bytes for file in files)
            piece = max(_SMALLEST_PIECE, size // _PIECES_OF_FEW) if 0 < len(files) < _FEW_FILES else 0
            options = {"sample_by": "document", **({"max_document_bytes": piece} if piece else {})}
            source = replace(source, options=options)
            comments += _OF_TEXT + (_OF_PIECES if piece else "")
            pieces = size // piece if piece else 0
        sources.append(source)
        if files:
            column = f" in {source.options['text']!r}" if "text" in source.options else ""
            megabytes = sum(file.bytes for file in files) / 1e6
            lines.append(f"text: {counted(len(files), 'file')}, {megabytes:,.1f} MB, format {source.format}{column}")
    return _Text(sources, sample, lines, comments, pieces)


def _listed(source: Source, shipped: bool) -> str:
    if shipped:
        return f"  - {{format: {source.format}, {_SAMPLES[source.format]}}}"
    paths = [source.path] if isinstance(source.path, str) else source.path
    path = _quoted(paths[0]) if len(paths) == 1 else f"[{', '.join(map(_quoted, paths))}]"
    options = ", ".join(
        f"{key}: {_quoted(value) if isinstance(value, str) else value}" for key, value in source.options.items()
    )
    more = f", name: {source.split}, split: {source.split}" if source.split else ""
    return f"  - {{format: {source.format}, path: {path}{more}{f', options: {{{options}}}' if options else ''}}}"


def _run_file(name: str, corpus: str, course: Course, machine: Machine) -> str:
    steps = course.steps
    rate = _RATES.get(course.model, "3.0e-4")
    return _RUN.format(
        model=course.model,
        time=f": about {duration(steps * course.seconds)} on {machine.name}",
        name=_quoted(name),
        directory=_quoted(f"runs/{name}"),
        corpus=_quoted(corpus),
        steps=steps,
        ids=", pad_id: 0, eos_id: 1" if "pad_id" in course.config.model_fields_set else "",
        workers=2 if machine.gpus else 0,
        batch=course.batch,
        micro_batch="auto" if machine.gpus else min(8, course.batch),
        rate=rate,
        last_rate=f"{float(rate) / 10:.1e}",
        warmup=max(1, steps // (10 if steps == _NAMED_STEPS else 20)) if steps > 1 else 0,
        precision=machine.precision,
        save=max(1, steps // 10),
        evaluate=max(1, steps // 20),
        log=max(1, min(50, int(_SECONDS_TO_LOG / course.seconds))),
    )


def _quoted(text: str) -> str:
    """`text` as YAML reads it back: as it stands if it is plain."""
    return text if re.fullmatch(r"[A-Za-z][\w./-]*", text) else json.dumps(text, ensure_ascii=False)
