"""The model card: README.md of an export, with the metadata that the Hugging Face Hub reads, and where a model comes
from: its run, corpora and losses. What is unknown is omitted, never guessed."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from data_pipeline import report as corpus_report
from data_pipeline.corpus import Corpus, open_corpus
from data_pipeline.foundation.atomic import sha256
from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.formatting import markdown, masked_values
from data_pipeline.foundation.json_file import read_valid_json
from data_pipeline.objectives.objective import Objective
from pretrain.config import RunConfig
from pretrain.engine.checkpoint import CONFIG
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.trained import AVERAGE_OF
from pretrain.models import FAMILIES, ModelConfig, outline
from pretrain.models.flops import Sizes, count_flops
from pretrain.models.state_dict_adapter import HFModel
from pretrain.run.metrics_file import read_metrics

TRANSFORMERS, CTRANSLATE2 = "transformers", "ctranslate2"  # engines that an export is for
_RESULTS = ("validation/", "text_to_text/", "lm_eval/")  # metrics of held-out texts, among those of a run
_SETTINGS = ("model", "batch", "optimizer", "schedule", "precision")  # without names and paths of the machines
_MOST_INPUTS = 20
# What is known of a source's licence by its format; it is that of the texts, not of the model.
_OF_WIKIPEDIA = "CC BY-SA 4.0 and GFDL (Wikipedia; dumps of before June 2009: GFDL)"
LICENCES = {
    **dict.fromkeys(("wikipedia", "wikiextractor"), _OF_WIKIPEDIA),
    **dict.fromkeys(("wet", "warc"), "Common Crawl's terms of use"),
    "c4": "ODC-BY 1.0, and Common Crawl's terms of use",
}


@dataclass(frozen=True)
class TrainingCorpus:
    """A training corpus, the `rows` of it that the model has read, their tokens, and their FLOPs at full length."""

    corpus: Corpus
    rows: int
    tokens: float
    flops: float


@dataclass(frozen=True)
class Lineage:
    """Where a checkpoint comes from. An imported model has no steps and no rows.

    - `average_of`: the checkpoints whose mean it is, if it is one.
    - `rows`: rows read.
    - `missing_corpora`: the number of training corpora that aren't there any more.
    - `curve`: (step, train/loss). `results`: metrics of held-out texts up to the checkpoint, by name.
    - `settings`: those of the run that shape the model, with defaults.
    - `objective`: the name of what it has learnt at last; None if that isn't known.
    """

    name: str | None = None
    average_of: str | None = None
    step: int = 0
    rows: int = 0
    corpora: list[TrainingCorpus] = field(default_factory=list)
    missing_corpora: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)
    results: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    objective: str | None = None


def lineage(checkpoint: Path) -> Lineage:
    """Where `checkpoint` comes from: from its files, and from its run and corpora if they are there."""
    index = checkpoint_index.read(checkpoint)
    config = _run_file(checkpoint)
    known = Lineage(average_of=index.identity.get(AVERAGE_OF), step=index.step, rows=index.train_state.position)
    if config is None:
        return replace(known, missing_corpora=len(index.consumed))
    consumed = zip(config.data.train, index.consumed, strict=False)
    corpora = [_training_corpus(entry.corpus, rows, index, config.data.objective) for entry, rows in consumed]
    curve, results = _measured(checkpoint, index.step)
    settings = {
        "run": {"seed": config.run.seed, "max_steps": config.run.max_steps},
        **config.model_dump(mode="json", include=set(_SETTINGS)),
        "model": index.model.model_dump(mode="json"),
        "objective": config.data.objective and config.data.objective.model_dump(mode="json"),
        "curriculum": [one.model_dump(mode="json") for one in config.data.curriculum],
        "wrapper": index.identity.get("wrapper"),
    }
    known_corpora = [one for one in corpora if one is not None]
    objectives = [config.data.objective, *(one.corpus.objective for one in known_corpora)]
    return replace(
        known,
        name=config.run.name,
        corpora=known_corpora,
        missing_corpora=corpora.count(None),
        curve=curve,
        results=results,
        settings=masked_values({name: values for name, values in settings.items() if values}),
        objective=next((one.name for one in objectives if one is not None), None),
    )


def _run_file(checkpoint: Path) -> RunConfig | None:
    """The run file of the checkpoint; None for an import, and for one that today's settings don't fit."""
    with suppress(UserError):
        return load(checkpoint / CONFIG, [], RunConfig) if (checkpoint / CONFIG).exists() else None
    return None


def _training_corpus(
    location: str, rows: int, index: checkpoint_index.Index, objective: Objective | None
) -> TrainingCorpus | None:
    """The corpus in a local directory, if it is still the one that the checkpoint was trained on."""
    corpus = None
    with suppress(UserError):
        corpus = open_corpus(location) if Path(location).is_dir() else None
    trained_on = {one["corpus"] for one in index.identity.get("data", {}).get("train", [])}
    if corpus is None or corpus.fingerprint not in trained_on:
        return None
    inputs, targets = (objective or corpus.objective).shape
    of_row = count_flops(outline(index.model), Sizes.of_example(inputs, targets))
    split = corpus.manifest.splits["train"]
    return TrainingCorpus(corpus, rows, rows * split.tokens / split.rows, rows * of_row)


def _measured(checkpoint: Path, step: int) -> tuple[list[tuple[int, float]], dict[str, float]]:
    """The curve of the loss, and the last results of held-out texts, up to `step`."""
    if checkpoint.parent.name != "checkpoints":
        return [], {}
    curve: list[tuple[int, float]] = []
    results: dict[str, float] = {}
    for row in read_metrics(checkpoint.parent.parent):
        if row.step > step:
            break
        if "train/loss" in row.metrics:
            curve.append((row.step, row.metrics["train/loss"]))
        results |= {name: value for name, value in row.metrics.items() if name.startswith(_RESULTS)}
    return curve, {name: value for name, value in results.items() if math.isfinite(value)}


def page(lineage: Lineage, config: ModelConfig, hf: HFModel, engine: str, encoder_only: bool) -> str:
    """The card of an export for `engine`; what `lineage` doesn't know is left out."""
    parts = [
        f"---\n{_metadata(lineage, config, hf, encoder_only)}---",
        f"# {lineage.name or config.family}",
        _summary(lineage, config, encoder_only),
        "## How to load it",
        *_loading(hf, engine, encoder_only, config),
    ]
    if lineage.corpora or lineage.missing_corpora:
        parts += ["## Training data", *_data(lineage)]
    if len(lineage.curve) > 1:
        ends = [f"{loss:.4f} at step {step:,}" for step, loss in (lineage.curve[0], lineage.curve[-1])]
        parts += ["## Training loss", f"In nats per target token: {', '.join(ends)}."]
    if lineage.results:
        rows = [[name, f"{value:.6g}"] for name, value in sorted(lineage.results.items())]
        parts += ["## Evaluation", "On held-out texts, the last values up to this checkpoint."]
        parts.append(_table(["metric", "value"], rows))
    if lineage.settings:
        settings = yaml.safe_dump(lineage.settings, sort_keys=False)
        parts += ["## Settings", f"The seed is {lineage.settings['run']['seed']}.", f"```yaml\n{settings}```"]
    return "\n\n".join(parts) + "\n"


def _metadata(lineage: Lineage, config: ModelConfig, hf: HFModel, encoder_only: bool) -> str:
    """YAML for the Hub. It names no licence: the licence of the model is its owner's to choose."""
    sources = [source for one in lineage.corpora for source in one.corpus.manifest.config["sources"]]
    languages = sorted({source["language"] for source in sources if source["language"]})
    repositories = {name for source in sources for name in source.get("commits", ())}
    datasets = sorted(name.removeprefix("datasets/") for name in repositories if name.startswith("datasets/"))
    tasks = {"continuations": "text-generation", None: "fill-mask"}  # the Hub has no task of this name for answers
    values = {
        "language": languages,
        "datasets": datasets,
        "library_name": "transformers",
        "pipeline_tag": "feature-extraction" if encoder_only else tasks.get(FAMILIES[config.family].generates),
        "tags": [hf.model_type, "encdec-pretrain"],
    }
    return yaml.safe_dump({name: value for name, value in values.items() if value}, sort_keys=False)


def _summary(lineage: Lineage, config: ModelConfig, encoder_only: bool) -> str:
    what = "The encoder of a model" if encoder_only else "A model"
    fact = f"{what} of the family `{config.family}`, pretrained with encdec-pretrain."
    rows = [["parameters of the whole model", f"{outline(config).num_parameters():,}"]]
    if lineage.average_of:
        rows.append(["its weights", f"the mean of {lineage.average_of}"])
    if lineage.step:
        rows += [["steps", f"{lineage.step:,}"], ["rows read", f"{lineage.rows:,}"]]
    if lineage.corpora and not lineage.missing_corpora:
        flops = sum(one.flops for one in lineage.corpora)
        rows.append(["tokens of text read", f"{sum(one.tokens for one in lineage.corpora):,.0f}"])
        rows.append(["FLOPs of training, with rows at full length", f"{flops:.3g}"])
    return f"{fact}\n\n{_table(['', ''], rows)}"


def _loading(hf: HFModel, engine: str, encoder_only: bool, config: ModelConfig) -> list[str]:
    path = hf.encoder.class_name if encoder_only and hf.encoder else hf.class_name
    module, _, name = path.rpartition(".")
    arguments = '"DIRECTORY", trust_remote_code=True' if hf.code else '"DIRECTORY"'
    imports = f"AutoTokenizer\nfrom {module} import {name}" if module else f"AutoTokenizer, {name}"
    loads = f"tokenizer = AutoTokenizer.from_pretrained({arguments})\nmodel = {name}.from_pretrained({arguments})"
    parts = [f"transformers 5:\n\n```python\nfrom transformers import {imports}\n\n{loads}\n```"]
    if hf.ctranslate2 and not encoder_only:
        # see t5_hf.for_ctranslate2, and export.py for the rows that pad the vocabulary
        as_is = getattr(config, "scale_outputs", True) and config.padded_vocab_size == config.vocab_size
        command = "```sh\nct2-transformers-converter --model DIRECTORY --output_dir CONVERTED\n```"
        again = "CTranslate2 doesn't read this export right: export it again with `--for ctranslate2`."
        parts.append(f"CTranslate2:\n\n{command}" if as_is or engine == CTRANSLATE2 else again)
    return parts


def _data(lineage: Lineage) -> list[str]:
    parts = [part for one in lineage.corpora for part in _corpus(one)]
    if missing := lineage.missing_corpora:
        other = "another" if parts else "its"
        parts.append(f"Of {other} training data nothing more is known: {missing} corpora were missing at the export.")
    return parts


def _corpus(trained_on: TrainingCorpus) -> list[str]:
    corpus, manifest = trained_on.corpus, trained_on.corpus.manifest
    report = read_valid_json(corpus.directory / corpus_report.FILE, corpus_report.Report)
    rows = [["sha256 of its manifest", f"`{sha256(corpus.directory / 'manifest.json')}`"]]
    rows.append(["rows read", f"{trained_on.rows:,}"])
    if report:
        rows.append(["documents", f"{report.documents.kept:,} of {report.documents.read:,} kept"])
    sources = [
        [one["name"] or one["format"], one["format"], one["language"] or "", LICENCES.get(one["format"], "not known")]
        for one in manifest.config["sources"]
    ]
    parts = [f"### {corpus.name}", _table(["", ""], rows)]
    parts.append(_table(["source", "format", "language", "licence of the texts"], sources))
    inputs: list[list[str]] = []
    with suppress(FailedError):  # a copy for training may be without this file
        inputs = [[one.source, one.file, f"{one.bytes:,}", f"`{one.sha256}`"] for one in corpus.lineage().inputs]
    if inputs:
        parts.append(_table(["source", "file", "bytes", "sha256"], inputs[:_MOST_INPUTS]))
    if len(inputs) > _MOST_INPUTS:
        parts.append(f"and {len(inputs) - _MOST_INPUTS:,} more files, which the corpus's lineage.parquet lists.")
    kinds = {"documents": report.documents.dropped, "lines": report.lines.dropped} if report else {}
    dropped = [
        [kind, rule, f"{count:,}"]
        for kind, counts in kinds.items()
        for rule, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    if dropped:
        parts.append(_table(["dropped", "rule", "number"], dropped))
    return parts


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(markdown(header, [[cell.replace("|", "\\|") for cell in row] for row in rows], numbers=False))
