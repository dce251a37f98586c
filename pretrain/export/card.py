"""The model card, README.md of an export: metadata for the Hugging Face Hub, how to load the model, and where the model
comes from. Unknown facts are left out, never guessed."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from data_pipeline.base.atomic import sha256
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import markdown, masked_values
from data_pipeline.corpus import Corpus, open_corpus
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.ids import Ids
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.trained import AVERAGE_OF, config_of_run, objective_of
from pretrain.export.tokenizer_files import marks
from pretrain.models import FAMILIES, ModelConfig, meta_model
from pretrain.models.state_dict_adapter import HFModel
from pretrain.run.metrics_file import read_metrics

_RESULTS = ("validation/", "text_to_text/", "lm_eval/")  # prefixes of the metrics of held-out texts
_SETTINGS = ("batch", "optimizer", "schedule", "precision")  # sections without names and paths of machines


@dataclass(frozen=True)
class Lineage:
    """Where a checkpoint comes from.

    Attributes:
        name: the run's name.
        objective: the name of the training objective; None: unknown.
        sources: the sources of the training corpora that still exist.
        sections: the card's sections on the run, in Markdown.
        starts_from: the last part of the path that `checkpoint.init_from` has; None: random weights, or unknown.
    """

    name: str | None = None
    objective: str | None = None
    sources: Sequence[Mapping[str, Any]] = ()
    sections: Sequence[str] = ()
    starts_from: str | None = None

    @property
    def origin(self) -> str:
        """What was done to the weights here, as far as is known."""
        if self.starts_from:
            return "trained"
        return "pretrained" if self.name else "exported"


def lineage(checkpoint: Path) -> Lineage:
    """The lineage of `checkpoint`, from its files and, as far as they exist, its run and corpora."""
    index, sections, config = checkpoint_index.read(checkpoint), list[str](), None
    objective = objective_of(checkpoint, index)
    if AVERAGE_OF in index.identity:
        sections.append(f"## Training\n\nThe weights are the mean of {index.identity[AVERAGE_OF]}.")
    elif index.step:  # an imported model has no steps
        sections.append(f"## Training\n\n{index.step:,} steps on {index.train_state.position:,} rows.")
    with suppress(UserError):  # of a run file that is no longer valid
        config = config_of_run(checkpoint)
    if config is None:
        return Lineage(objective=objective, sections=sections)
    trained_on = {one["corpus"] for one in index.identity.get("data", {}).get("train", [])}
    sources: list[Mapping[str, Any]] = []
    for entry, rows in zip(config.data.train, index.consumed, strict=False):
        with suppress(UserError):  # of a corpus that no longer exists, or is another one now
            if Path(entry.corpus).is_dir() and (corpus := open_corpus(entry.corpus)).fingerprint in trained_on:
                sources += corpus.manifest.config["sources"]
                sections.append(_training_data(corpus, rows))
    in_run = checkpoint.parent.name == "checkpoints"
    metrics = [row.metrics for row in read_metrics(checkpoint.parents[1]) if row.step <= index.step] if in_run else []
    last = {name: value for one in metrics for name, value in one.items() if name.startswith(_RESULTS)}
    if results := [[name, f"{value:.6g}"] for name, value in sorted(last.items()) if math.isfinite(value)]:
        table = markdown(["metric", "value"], results)
        sections.append("\n".join(["## Evaluation\n\nThe last values up to this checkpoint.\n", *table]))
    settings = {
        "run": {"seed": config.run.seed, "max_steps": config.run.max_steps},
        "model": index.model.model_dump(mode="json"),
        **config.model_dump(mode="json", include=set(_SETTINGS)),
    }
    if config.data.objective:
        settings["objective"] = config.data.objective.model_dump(mode="json")
    sections.append(f"## Settings\n\n```yaml\n{yaml.safe_dump(masked_values(settings), sort_keys=False)}```")
    init_from = config.checkpoint.init_from
    return Lineage(config.run.name, objective, sources, sections, Path(init_from).name if init_from else None)


def _training_data(corpus: Corpus, rows: int) -> str:
    lines = [f"## Training data: {corpus.name}\n\n{rows:,} rows read.\n"]
    for source in corpus.manifest.config["sources"]:
        labels = dict.fromkeys([source["name"], source["format"], source["language"]])
        lines.append(f"- {', '.join(filter(None, labels))}")
    digest = sha256(corpus.directory / "manifest.json")
    return "\n".join([*lines, f"- sha256 of the corpus's manifest: `{digest}`"])


def page(lineage: Lineage, config: ModelConfig, hf: HFModel, tokenizer: Tokenizer) -> str:
    """The card of an export. Its metadata name no licence: the model's owner chooses it."""
    repositories = {name for source in lineage.sources for name in source.get("commits", ())}
    datasets = sorted(name.removeprefix("datasets/") for name in repositories if name.startswith("datasets/"))
    metadata = ModelCardData(
        language=sorted({source["language"] for source in lineage.sources if source["language"]}) or None,
        datasets=datasets or None,
        library_name="transformers",
        tags=[hf.model_type, "encdec-pretrain"],
    )
    name, arguments = hf.class_name, '"DIRECTORY", trust_remote_code=True' if hf.code else '"DIRECTORY"'
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {lineage.name or config.family}",
        f"A model of the family `{config.family}` with {meta_model(config).num_parameters():,} parameters, "
        f"{lineage.origin} with encdec-pretrain.",
        *([f"Starts from: `{lineage.starts_from}`."] if lineage.starts_from else []),
        "## How to load it\n\ntransformers 5:",
        _with_ids(tokenizer, config, hf, lineage.objective, arguments)
        if isinstance(tokenizer.model, Ids)
        else f"```python\nfrom transformers import AutoTokenizer, {name}\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({arguments})\nmodel = {name}.from_pretrained({arguments})\n```",
        *lineage.sections,
    ]
    return "\n\n".join(parts) + "\n"


def _with_ids(tokenizer: Tokenizer, config: ModelConfig, hf: HFModel, objective: str | None, arguments: str) -> str:
    """How to load and call a model whose inputs are ids of documents, which have no text."""
    vocabulary, names = tokenizer.vocabulary, tokenizer.names
    begins, ends = marks(hf, objective)
    ids = [vocabulary.start] * begins + [*range(min(3, vocabulary.text[1]))] + [vocabulary.eos] * ends
    call = "model(input_ids).logits" if FAMILIES[config.family].generates is None else "model.generate(input_ids)"
    added = ", ".join(f"`{name}` {id_}" for id_, name in sorted(names.items()) if id_ not in vocabulary.sentinel_ids)
    sentinels = [f"`{names[id_]}` {id_}" for id_ in map(vocabulary.sentinel, range(vocabulary.sentinels))]
    masks = f" Masked spans are {sentinels[0]} to {sentinels[-1]}." if sentinels else ""
    return (
        f"```python\nimport torch\nfrom transformers import {hf.class_name}\n\n"
        f"model = {hf.class_name}.from_pretrained({arguments})\n"
        f"input_ids = torch.tensor([{ids}])\n{call}\n```\n\n"
        f"The model has no tokenizer: inputs and outputs are the ids of documents, from 0 to {vocabulary.text[1] - 1}. "
        f"Other ids: {added}.{masks}"
    )
