"""The model card: README.md of an export, with the metadata that the Hugging Face Hub reads."""

from collections.abc import Sequence

import yaml

from data_pipeline import report as corpus_report
from data_pipeline.foundation.atomic import sha256
from data_pipeline.foundation.json_file import read_valid_json
from data_pipeline.foundation.tables import markdown
from pretrain.huggingface.conversion import Conversion
from pretrain.huggingface.lineage import Lineage, TrainingCorpus
from pretrain.huggingface.rewriting import CTRANSLATE2, LLAMA_CPP, TRANSFORMERS
from pretrain.huggingface.text_plot import plot
from pretrain.models import FAMILIES, ModelConfig, outline

_MOST_INPUTS = 20
# What is known of a source's licence by its format; it is that of the texts, not of the model.
LICENCES = {
    "wikipedia": "CC BY-SA 4.0 and GFDL (Wikipedia; dumps of before June 2009: GFDL)",
    "wikiextractor": "CC BY-SA 4.0 and GFDL (Wikipedia; dumps of before June 2009: GFDL)",
    "c4": "ODC-BY 1.0, and Common Crawl's terms of use",
    "wet": "Common Crawl's terms of use",
    "warc": "Common Crawl's terms of use",
}


def page(
    lineage: Lineage,
    config: ModelConfig,
    conversion: Conversion,
    engine: str = TRANSFORMERS,
    encoder_only: bool = False,
) -> str:
    """The card of an export for `engine`; what `lineage` doesn't know is left out."""
    parts = [
        f"---\n{_metadata(lineage, config, conversion, encoder_only)}---",
        f"# {lineage.name or config.family}",
        _summary(lineage, config, encoder_only),
        "## How to load it",
        *_loading(conversion, engine, encoder_only, config),
    ]
    if lineage.corpora or lineage.missing_corpora:
        parts += ["## Training data", *_data(lineage)]
    if len(lineage.curve) > 1:
        drawn = "\n".join(plot(lineage.curve, 72, 12))
        (first, started), (last, ended) = lineage.curve[0], lineage.curve[-1]
        parts += [
            "## Training loss",
            f"In nats per target token: {started:.4f} at step {first:,}, {ended:.4f} at step {last:,}.",
            f"```text\n{drawn}\n```",
        ]
    if lineage.results:
        parts += [
            "## Evaluation",
            "On held-out texts, the last values up to this checkpoint.",
            _table(["metric", "value"], [[name, f"{value:.6g}"] for name, value in sorted(lineage.results.items())]),
        ]
    if lineage.settings:
        settings = yaml.safe_dump(lineage.settings, sort_keys=False)
        parts += ["## Settings", f"The seed is {lineage.settings['run']['seed']}.", f"```yaml\n{settings}```"]
    return "\n\n".join(parts) + "\n"


def _metadata(lineage: Lineage, config: ModelConfig, conversion: Conversion, encoder_only: bool) -> str:
    """YAML for the Hub. It names no licence: the licence of the model is its owner's to choose."""
    sources = [source for one in lineage.corpora for source in one.corpus.manifest.config["sources"]]
    languages = sorted({source["language"] for source in sources if source["language"]})
    tasks = {"continuations": "text-generation", None: "fill-mask"}  # the Hub has no task of this name for answers
    task = "feature-extraction" if encoder_only else tasks.get(FAMILIES[config.family].generates)
    values = {
        **({"language": languages} if languages else {}),
        "library_name": "transformers",
        **({"pipeline_tag": task} if task else {}),
        "tags": [conversion.model_type, "encdec-pretrain"],
    }
    return yaml.safe_dump(values, sort_keys=False)


def _summary(lineage: Lineage, config: ModelConfig, encoder_only: bool) -> str:
    what = "The encoder of a model" if encoder_only else "A model"
    facts = [f"{what} of the family `{config.family}`, pretrained with encdec-pretrain."]
    rows = [["parameters of the whole model", f"{outline(config).num_parameters():,}"]]
    if lineage.average_of:
        rows.append(["its weights", f"the mean of {lineage.average_of}"])
    if lineage.step:
        rows += [["steps", f"{lineage.step:,}"], ["rows read", f"{lineage.rows:,}"]]
    if lineage.tokens is not None:
        rows.append(["tokens of text read", f"{lineage.tokens:,.0f}"])
    if lineage.flops is not None:
        rows.append(["FLOPs of training, with rows at full length", f"{lineage.flops:.3g}"])
    return "\n\n".join([*facts, _table(["", ""], rows)])


def _loading(conversion: Conversion, engine: str, encoder_only: bool, config: ModelConfig) -> list[str]:
    encoder = conversion.encoder
    path = encoder.class_name if encoder_only and encoder else conversion.class_name
    module, _, name = path.rpartition(".")
    trust = ", trust_remote_code=True" if conversion.remote_code else ""
    imports = f"from transformers import AutoTokenizer, {name}"
    if module:
        imports = f"from transformers import AutoTokenizer\nfrom {module} import {name}"
    code = (
        f"{imports}\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("DIRECTORY"{trust})\n'
        f'model = {name}.from_pretrained("DIRECTORY"{trust})'
    )
    parts = [f"transformers 5:\n\n```python\n{code}\n```"]
    if engine != LLAMA_CPP and not encoder_only and CTRANSLATE2 in conversion.engines:
        # see t5.with_head, and rewriting.exported for the rows that pad the vocabulary
        as_is = getattr(config, "scale_outputs", True) and config.padded_vocab_size == config.vocab_size
        command = "```sh\nct2-transformers-converter --model DIRECTORY --output_dir CONVERTED\n```"
        again = "CTranslate2 doesn't read this export right: export it again with `--for ctranslate2`."
        parts.append(f"CTranslate2:\n\n{command}" if as_is or engine == CTRANSLATE2 else again)
    if engine == LLAMA_CPP:
        command = "```sh\npython convert_hf_to_gguf.py DIRECTORY --outtype f32 --outfile model.gguf\n```"
        parts.append(f"llama.cpp, from its source tree:\n\n{command}")
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
    rows = [
        ["sha256 of its manifest", f"`{sha256(corpus.directory / 'manifest.json')}`"],
        ["rows read", f"{trained_on.rows:,}"],
    ]
    if report:
        rows.append(["documents", f"{report.documents.kept:,} of {report.documents.read:,} kept"])
    sources = [
        [one["name"] or one["format"], one["format"], one["language"] or "", LICENCES.get(one["format"], "not known")]
        for one in manifest.config["sources"]
    ]
    parts = [
        f"### {corpus.name}",
        _table(["", ""], rows),
        _table(["source", "format", "language", "licence of the texts"], sources),
    ]
    inputs = [[one.source, one.file, f"{one.bytes:,}", f"`{one.sha256}`"] for one in manifest.inputs]
    if inputs:
        parts.append(_table(["source", "file", "bytes", "sha256"], inputs[:_MOST_INPUTS]))
    if len(inputs) > _MOST_INPUTS:
        parts.append(f"and {len(inputs) - _MOST_INPUTS:,} more files, which the corpus's manifest lists.")
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
