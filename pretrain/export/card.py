"""The model card, README.md of an export: metadata for the Hugging Face Hub, how to load the model, and where the model
comes from. Unknown facts are left out, never guessed."""

import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from data_pipeline.base.atomic import sha256
from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import markdown, masked_values
from data_pipeline.corpus import Corpus, open_corpus
from pretrain.config import RunConfig
from pretrain.engine.checkpoint import CONFIG
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.trained import AVERAGE_OF
from pretrain.models import FAMILIES, ModelConfig, meta_model
from pretrain.models.state_dict_adapter import HFModel
from pretrain.run.metrics_file import read_metrics

_RESULTS = ("validation/", "text_to_text/", "lm_eval/")  # prefixes of the metrics of held-out texts
_SETTINGS = ("batch", "optimizer", "schedule", "precision")  # sections without names and paths of machines
# The licence of the texts (not of the model), as far as a source's format tells.
_OF_WIKIPEDIA = "CC BY-SA 4.0 and GFDL (Wikipedia; dumps of before June 2009: GFDL)"
LICENCES = {
    **dict.fromkeys(("wikipedia", "wikiextractor"), _OF_WIKIPEDIA),
    **dict.fromkeys(("wet", "warc"), "Common Crawl's terms of use"),
    "c4": "ODC-BY 1.0, and Common Crawl's terms of use",
}


@dataclass(frozen=True)
class Lineage:
    """Where a checkpoint comes from. An imported model has no steps and no rows.

    Attributes:
        name: the run's name.
        facts: the rows of the card's first table.
        corpora: the training corpora that still exist, with the number of rows read.
        results: the last metrics of held-out texts before the checkpoint, by name.
        settings: the run's settings that shape the model, with defaults.
        objective: the name of the training objective; None: unknown.
    """

    name: str | None = None
    facts: dict[str, str] = field(default_factory=dict)
    corpora: list[tuple[Corpus, int]] = field(default_factory=list)
    results: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    objective: str | None = None


def lineage(checkpoint: Path) -> Lineage:
    """The lineage of `checkpoint`, from its files and, as far as they exist, its run and corpora."""
    index = checkpoint_index.read(checkpoint)
    facts = {"its weights": f"the mean of {index.identity[AVERAGE_OF]}"} if AVERAGE_OF in index.identity else {}
    if index.step:
        facts |= {"steps": f"{index.step:,}", "rows read": f"{index.train_state.position:,}"}
    config = None
    with suppress(UserError):  # of a run file that is no longer valid
        config = load(checkpoint / CONFIG, [], RunConfig) if (checkpoint / CONFIG).exists() else None
    if config is None:
        return Lineage(facts=facts)
    trained_on = {one["corpus"] for one in index.identity.get("data", {}).get("train", [])}
    corpora = []
    for entry, rows in zip(config.data.train, index.consumed, strict=False):
        with suppress(UserError):  # of a corpus that no longer exists, or is another one now
            if Path(entry.corpus).is_dir() and (corpus := open_corpus(entry.corpus)).fingerprint in trained_on:
                corpora.append((corpus, rows))
    objectives = [config.data.objective, *(corpus.objective for corpus, _ in corpora)]
    settings = {
        "run": {"seed": config.run.seed, "max_steps": config.run.max_steps},
        "model": index.model.model_dump(mode="json"),
        **config.model_dump(mode="json", include=set(_SETTINGS)),
        "objective": config.data.objective and config.data.objective.model_dump(mode="json"),
    }
    return Lineage(
        name=config.run.name,
        facts=facts,
        corpora=corpora,
        results=_results(checkpoint, index.step),
        settings=masked_values({name: values for name, values in settings.items() if values}),
        objective=next((one.name for one in objectives if one is not None), None),
    )


def _results(checkpoint: Path, step: int) -> dict[str, float]:
    """The last metrics of held-out texts up to `step`."""
    if checkpoint.parent.name != "checkpoints":
        return {}
    rows = [row.metrics for row in read_metrics(checkpoint.parent.parent) if row.step <= step]
    found = {name: value for metrics in rows for name, value in metrics.items() if name.startswith(_RESULTS)}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def page(lineage: Lineage, config: ModelConfig, hf: HFModel) -> str:
    """The card of an export."""
    name, arguments = hf.class_name, '"DIRECTORY", trust_remote_code=True' if hf.code else '"DIRECTORY"'
    facts = {"parameters": f"{meta_model(config).num_parameters():,}", **lineage.facts}
    parts = [
        f"---\n{_metadata(lineage, config, hf)}---",
        f"# {lineage.name or config.family}",
        f"A model of the family `{config.family}`, pretrained with encdec-pretrain.",
        _table(["", ""], [list(fact) for fact in facts.items()]),
        "## How to load it",
        f"transformers 5:\n\n```python\nfrom transformers import AutoTokenizer, {name}\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({arguments})\nmodel = {name}.from_pretrained({arguments})\n```",
    ]
    for corpus, rows in lineage.corpora:
        parts += [f"## Training data: {corpus.name}", _corpus(corpus, rows)]
    if lineage.results:
        parts += ["## Evaluation", "On held-out texts, the last values up to this checkpoint."]
        results = [[name, f"{value:.6g}"] for name, value in sorted(lineage.results.items())]
        parts.append(_table(["metric", "value"], results))
    if lineage.settings:
        parts += ["## Settings", f"```yaml\n{yaml.safe_dump(lineage.settings, sort_keys=False)}```"]
    return "\n\n".join(parts) + "\n"


def _metadata(lineage: Lineage, config: ModelConfig, hf: HFModel) -> str:
    """YAML for the Hub. It names no licence: the model's owner chooses it."""
    sources = [source for corpus, _ in lineage.corpora for source in corpus.manifest.config["sources"]]
    repositories = {name for source in sources for name in source.get("commits", ())}
    tasks = {"continuations": "text-generation", None: "fill-mask"}  # the Hub has no task for answers
    values = {
        "language": sorted({source["language"] for source in sources if source["language"]}),
        "datasets": sorted(name.removeprefix("datasets/") for name in repositories if name.startswith("datasets/")),
        "library_name": "transformers",
        "pipeline_tag": tasks.get(FAMILIES[config.family].generates),
        "tags": [hf.model_type, "encdec-pretrain"],
    }
    return yaml.safe_dump({name: value for name, value in values.items() if value}, sort_keys=False)


def _corpus(corpus: Corpus, rows: int) -> str:
    facts = [["rows read", f"{rows:,}"], ["sha256 of its manifest", f"`{sha256(corpus.directory / 'manifest.json')}`"]]
    sources = [
        [one["name"] or one["format"], one["format"], one["language"] or "", LICENCES.get(one["format"], "not known")]
        for one in corpus.manifest.config["sources"]
    ]
    header = ["source", "format", "language", "licence of the texts"]
    return f"{_table(['', ''], facts)}\n\n{_table(header, sources)}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(markdown(header, [[cell.replace("|", "\\|") for cell in row] for row in rows], numbers=False))
