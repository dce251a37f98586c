"""The first corpus file and run file of a user: a few lines each, on top of files that ship."""

import json
import math
import re
from pathlib import Path

from data_pipeline.config import SourceConfig
from data_pipeline.execution.inputs import list_files
from data_pipeline.foundation import paths
from data_pipeline.foundation.config_file import Section, load
from data_pipeline.foundation.errors import UserError
from data_pipeline.sources import OPTIONS
from pretrain.models.families import AnyModelConfig

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_FORMATS = {  # by the end of a name, without the ending of its compression
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".xml": "wikipedia",
    ".wet": "wet",
    ".warc": "warc",
}
_COMPRESSED = re.compile(r"\.(gz|bz2|xz|zst)$")
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
_CORPUS = """\
# The corpus of {run}. `pretrain reference` shows every key.
extends: configs:corpora/{rows}.yaml
name: {name}
output: {output}
"""
_OWN = """\
sources:
  - {{format: {format}, path: {path}{options}}}   # add `language: en` if all of it is English
cleaning: {{profile: none}}       # c4, wikipedia: rules for pages as they were crawled or dumped
split: {{validation_fraction: 0.01}}
tokenizer: {{vocab_size: 32000}}  # pieces; fewer for less than 100 MB of text
"""
_DOCUMENTS = ", options: {sample_by: document}"
_PIECES = ", options: {{sample_by: document, max_document_bytes: {size}}}"
_OF_TEXT = (
    "# sample_by: `document` keeps a file in order; `paragraph`, `line`: each is a document, and they are shuffled\n"
)
_OF_PIECES = """\
# max_document_bytes: so few files are cut at blank lines, in order, so that some pieces can be held out
dedup: {documents: false}       # pieces that repeat each other stay
"""
_FEW_FILES, _PIECES_OF_FEW = 500, 1000  # of 500 documents, 1 % held out is none once in 150 times
_SMALLEST_PIECE = 256
_SAMPLES = """\
sources:                        # the text that ships; `launch init NAME --text PATH` takes your own
  - {{format: wikipedia, name: enwiki, language: en, path: "${{samples:}}/enwiki-*-pages-articles*.xml.bz2"}}
  - {{format: c4, name: c4, language: en, path: "${{samples:}}/c4-train.*.json.gz"}}
split: {{validation_fraction: 0.02}}
tokenizer: {{vocab_size: 8000}}
"""
_SHORTER = "rows: {{objective: {{length: {longest}}}}}   # the model has no positions for more\n"
_RUN = """\
# Trains {model} on {corpus}. `pretrain reference` shows every key.
extends: configs:models/{model}.yaml
run: {{name: {name}, directory: {directory}, seed: 0, max_steps: 10000}}
model: {{vocab_size: null{ids}}}   # as the corpus has
data:
  train: [{{corpus: {corpus}}}]
  validation: [{{corpus: {corpus}}}]
batch: {{global_batch_size: 128, micro_batch_size: auto}}
optimizer: {{name: adamw, learning_rate: 3.0e-4, betas: [0.9, 0.98], weight_decay: 0.1, gradient_clipping: 1.0}}
schedule: {{name: cosine, warmup_steps: 1000, final_learning_rate: 3.0e-5}}
precision: bf16
deepspeed: {{zero_optimization: {{stage: 1}}}}
checkpoint: {{every_steps: 1000, keep_last: 3}}
evaluation: [{{hook: validation_loss, every_steps: 500}}]
tracking: {{mlflow: {{uri: "sqlite:///runs/mlflow.db", experiment: {name}}}, log_every_steps: 50}}
"""


class _ModelFile(Section):
    model: AnyModelConfig


def write_first_files(
    name: str, model: str, text: str | None, text_format: str | None, corpus: str | None
) -> tuple[Path | None, Path]:
    """Writes NAME.corpus.yaml, unless there is a `corpus` already, and NAME.run.yaml into the current folder.

    `text` is a path, a glob or a URL of `text_format`, by default what the name's ending says; without it the corpus
    is made from the text that ships. Returns the two paths. Raises UserError, before anything is written, for a name
    that is no file name, an unknown model or format, and a file that exists.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"NAME: {name!r}: expected letters, digits, `.`, `_` and `-`, since files are named after it")
    formats = [known for known in OPTIONS if known != "pairs"]  # these need an objective of their own
    if text_format is not None and text_format not in formats:
        raise UserError(f"--format: {text_format!r}; expected one of {', '.join(formats)}")
    if text and corpus:
        raise UserError("--text and --corpus: a run has its text from one of them; give only one")
    try:
        config = load(paths.config(f"configs:models/{model}.yaml"), [], _ModelFile).model
    except ValueError as error:
        raise UserError(f"--model: {error}") from None
    run_file, corpus_file = Path(f"{name}.run.yaml"), Path(f"{name}.corpus.yaml")
    directory = corpus or f"corpora/{name}"
    ids = ", pad_id: 0, eos_id: 1" if "pad_id" in config.model_fields_set else ""
    run = _RUN.format(
        model=model, name=_quoted(name), directory=_quoted(f"runs/{name}"), corpus=_quoted(directory), ids=ids
    )
    contents = {run_file: run}
    if corpus is None:
        rows = _ROWS[config.family]
        contents[corpus_file] = _CORPUS.format(run=run_file, rows=rows, name=_quoted(name), output=_quoted(directory))
        if text:
            kind = text_format or _format_of(text)
            options, meaning = _of_text(text) if kind == "text" else ("", "")
            contents[corpus_file] += meaning + _OWN.format(format=kind, path=_quoted(text), options=options)
        else:
            contents[corpus_file] += _SAMPLES.format()
        if (longest := config.longest_sequence or math.inf) < _ROW_LENGTH.get(rows, 512):
            contents[corpus_file] += _SHORTER.format(longest=longest)
    for path in contents:
        if path.exists():
            raise UserError(f"{path}: exists already; choose another NAME")
    for path, content in contents.items():
        with path.open("x") as file:
            file.write(content)
    return (corpus_file if corpus is None else None), run_file


def _of_text(path: str) -> tuple[str, str]:
    """The options of plain text, and comments that say what they mean."""
    try:
        files = list_files(SourceConfig(format="text", path=path))
    except UserError:  # it isn't there yet
        files = []
    if not 0 < len(files) < _FEW_FILES:
        return _DOCUMENTS, _OF_TEXT
    size = max(_SMALLEST_PIECE, sum(file.bytes for file in files) // _PIECES_OF_FEW)
    return _PIECES.format(size=size), _OF_TEXT + _OF_PIECES


def _quoted(text: str) -> str:
    """`text` as YAML reads it back: as it stands if it is plain."""
    return text if re.fullmatch(r"[A-Za-z][\w./-]*", text) else json.dumps(text, ensure_ascii=False)


def _format_of(text: str) -> str:
    ending = Path(_COMPRESSED.sub("", text)).suffix
    if ending not in _FORMATS:
        raise UserError(f"--text: {text}: the name doesn't say what format it has; give --format")
    return _FORMATS[ending]
