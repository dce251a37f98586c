"""The model card, README.md of an export: metadata for the Hugging Face Hub, how to load the model, and its lineage
(run, corpora, losses). Unknown facts are left out, never guessed."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from data_pipeline.base.atomic import sha256
from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import markdown, masked_values
from data_pipeline.base.json_file import read_valid_json
from data_pipeline.corpus import Corpus, open_corpus
from data_pipeline.corpus.objectives.objective import Objective
from data_pipeline.stages import report as corpus_report
from pretrain.config import RunConfig
from pretrain.engine.checkpoint import CONFIG
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.trained import AVERAGE_OF
from pretrain.models import FAMILIES, ModelConfig, outline
from pretrain.models.flops import Sizes, count_flops
from pretrain.models.state_dict_adapter import HFModel
from pretrain.run.metrics_file import read_metrics

TRANSFORMERS, CTRANSLATE2 = "transformers", "ctranslate2"  # engines that an export is for
_RESULTS = ("validation/", "text_to_text/", "lm_eval/")  # prefixes of the metrics of held-out texts
_SETTINGS = ("model", "batch", "optimizer", "schedule", "precision")  # sections without names and paths of machines
# The licence of the texts (not of the model), as far as a source's format tells.
_OF_WIKIPEDIA = "CC BY-SA 4.0 and GFDL (Wikipedia; dumps of before June 2009: GFDL)"
LICENCES = {
    **dict.fromkeys(("wikipedia", "wikiextractor"), _OF_WIKIPEDIA),
    **dict.fromkeys(("wet", "warc"), "Common Crawl's terms of use"),
    "c4": "ODC-BY 1.0, and Common Crawl's terms of use",
}


@dataclass(frozen=True)
class TrainingCorpus:
    """A training corpus: the number of rows that the model has read, their tokens, and their FLOPs at full length."""

    corpus: Corpus
    rows: int
    tokens: float
    flops: float


@dataclass(frozen=True)
class Lineage:
    """Where a checkpoint comes from. An imported model has no steps and no rows.

    Attributes:
        name: the run's name.
        average_of: the checkpoints whose mean the checkpoint is. None: it is no mean.
        step: number of training steps.
        rows: number of rows read.
        corpora: the training corpora.
        missing_corpora: number of training corpora that no longer exist.
        curve: pairs (step, train/loss).
        results: the last metrics of held-out texts before the checkpoint, by name.
        settings: the run's settings that shape the model, with defaults.
        objective: the name of the training objective; None: unknown.
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
    """The lineage of `checkpoint`, from its files and, as far as they exist, its run and corpora."""
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
    """The run file of a checkpoint; None for an import, and for a run file that is no longer valid."""
    with suppress(UserError):
        return load(checkpoint / CONFIG, [], RunConfig) if (checkpoint / CONFIG).exists() else None
    return None


def _training_corpus(
    location: str, rows: int, index: checkpoint_index.Index, objective: Objective | None
) -> TrainingCorpus | None:
    """The corpus in a local directory; None: it isn't the corpus that the checkpoint was trained on."""
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
    """The loss curve, and the last metrics of held-out texts, up to `step`."""
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


def page(lineage: Lineage, config: ModelConfig, hf: HFModel, engine: str) -> str:
    """The card of an export for `engine`."""
    parts = [
        f"---\n{_metadata(lineage, config, hf)}---",
        f"# {lineage.name or config.family}",
        _summary(lineage, config),
        "## How to load it",
        *_loading(hf, engine, config),
    ]
    if lineage.corpora or lineage.missing_corpora:
        parts += ["## Training data", *(part for one in lineage.corpora for part in _corpus(one))]
    if missing := lineage.missing_corpora:
        other = "another" if lineage.corpora else "its"
        parts.append(f"Of {other} training data nothing more is known: {missing} corpora were missing at the export.")
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


def _metadata(lineage: Lineage, config: ModelConfig, hf: HFModel) -> str:
    """YAML for the Hub. It names no licence: the model's owner chooses it."""
    sources = [source for one in lineage.corpora for source in one.corpus.manifest.config["sources"]]
    languages = sorted({source["language"] for source in sources if source["language"]})
    repositories = {name for source in sources for name in source.get("commits", ())}
    datasets = sorted(name.removeprefix("datasets/") for name in repositories if name.startswith("datasets/"))
    tasks = {"continuations": "text-generation", None: "fill-mask"}  # the Hub has no task for answers
    values = {
        "language": languages,
        "datasets": datasets,
        "library_name": "transformers",
        "pipeline_tag": tasks.get(FAMILIES[config.family].generates),
        "tags": [hf.model_type, "encdec-pretrain"],
    }
    return yaml.safe_dump({name: value for name, value in values.items() if value}, sort_keys=False)


def _summary(lineage: Lineage, config: ModelConfig) -> str:
    fact = f"A model of the family `{config.family}`, pretrained with encdec-pretrain."
    rows = [["parameters", f"{outline(config).num_parameters():,}"]]
    if lineage.average_of:
        rows.append(["its weights", f"the mean of {lineage.average_of}"])
    if lineage.step:
        rows += [["steps", f"{lineage.step:,}"], ["rows read", f"{lineage.rows:,}"]]
    if lineage.corpora and not lineage.missing_corpora:
        flops = sum(one.flops for one in lineage.corpora)
        rows.append(["tokens of text read", f"{sum(one.tokens for one in lineage.corpora):,.0f}"])
        rows.append(["FLOPs of training, with rows at full length", f"{flops:.3g}"])
    return f"{fact}\n\n{_table(['', ''], rows)}"


def _loading(hf: HFModel, engine: str, config: ModelConfig) -> list[str]:
    name, arguments = hf.class_name, '"DIRECTORY", trust_remote_code=True' if hf.code else '"DIRECTORY"'
    loads = f"tokenizer = AutoTokenizer.from_pretrained({arguments})\nmodel = {name}.from_pretrained({arguments})"
    parts = [f"transformers 5:\n\n```python\nfrom transformers import AutoTokenizer, {name}\n\n{loads}\n```"]
    if hf.ctranslate2:
        # see t5_hf.for_ctranslate2, and export.py for the rows that pad the vocabulary
        as_is = getattr(config, "scale_outputs", True) and config.padded_vocab_size == config.vocab_size
        command = "```sh\nct2-transformers-converter --model DIRECTORY --output_dir CONVERTED\n```"
        again = "CTranslate2 doesn't read this export right: export it again with `--for ctranslate2`."
        parts.append(f"CTranslate2:\n\n{command}" if as_is or engine == CTRANSLATE2 else again)
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
    header = ["source", "format", "language", "licence of the texts"]
    return [f"### {corpus.name}", _table(["", ""], rows), _table(header, sources)]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(markdown(header, [[cell.replace("|", "\\|") for cell in row] for row in rows], numbers=False))
