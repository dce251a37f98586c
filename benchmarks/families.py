"""Does each family learn, and what does it agree with?

    python benchmarks/families.py [--train] [--write docs/models.md]

Models of random weights beside transformers' of the same weights, gradients beside finite differences where
transformers lacks the family, generated tokens beside transformers' `generate`, parameters of the published sizes.
With --train each family also takes 200 steps on the shipped text, as a user would run them: `data-pipeline build`,
then `launch local` with two ranks at ZeRO stage 2. --write puts the tables into a page, between its markers.
"""

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor
from transformers import dynamic_module_utils

from pretrain.generation.decoders import CausalModel, EncoderDecoderModel
from pretrain.generation.decoding import generate
from pretrain.generation.settings import GenerationSettings
from pretrain.generation.texts import padded
from pretrain.huggingface import FAMILIES as INTERCHANGES
from pretrain.metric_log import read_metrics
from pretrain.models import FAMILIES, ModelConfig, build
from pretrain.models.encoder_only import EncoderOnly
from pretrain.models.loss import IGNORED, shift_right
from pretrain.models.model import Model

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"

Json = dict[str, Any]
ENCODER_DECODER = {"num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2}
LAYERS = {"num_heads": 4, "num_layers": 3}
EMBEDDING_LOSS = {"kind": "mse", "coefficient": 8.0}
# What is compared: a family, and what of its config is not a size.
KINDS: dict[str, Json] = {
    "T5 v1.0": {"family": "t5", **ENCODER_DECODER, "feed_forward": "relu", "tie_embeddings": True},
    "T5 v1.1": {"family": "t5", **ENCODER_DECODER},
    "BART": {"family": "bart", **ENCODER_DECODER, "dropout_rate": 0.0},
    "Transformer": {"family": "vanilla", **ENCODER_DECODER, "dropout_rate": 0.0},
    "autoregressive": {
        "family": "autoregressive",
        **ENCODER_DECODER,
        "subtract_positions": "without_norm",
        "embedding_loss": EMBEDDING_LOSS,
    },
    "GPT-2": {"family": "decoder_only", **LAYERS},
    "BERT": {"family": "encoder_only", **LAYERS},
}
REFERENCES = {
    "T5 v1.0": "T5",
    "T5 v1.1": "T5",
    "BART": "BART",
    "autoregressive": "exported file",
    "GPT-2": "GPT-2",
    "BERT": "BERT",
}


def config_of(kind: str, d_model: int, vocab_size: int, max_positions: int, **changes: Any) -> ModelConfig:
    values: Json = {**KINDS[kind], "d_model": d_model, "vocab_size": vocab_size, **changes}
    config_class = FAMILIES[values["family"]][0]
    if values["family"] == "t5":
        values["d_kv"] = d_model // values["num_heads"]
    elif values["family"] != "vanilla":
        values["max_positions"] = max_positions
    return config_class.model_validate({"d_ff": 2 * d_model, **values})


def randomised(model: Model, std: float) -> Model:
    """With weights that all matter: attention that is not flat, gains and biases that are not ones and zeros."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=std)
    return model.eval()


def in_transformers(model: Model, folder: Path) -> Any:
    """The same model in transformers, through the files that an export writes."""
    exported = INTERCHANGES[model.config.family].to_hugging_face(model.state_dict(), model.config)
    folder.mkdir(parents=True)
    tensors = {name: tensor.detach().float().contiguous() for name, tensor in exported.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(exported.config))
    for name, content in exported.files.items():
        (folder / name).write_bytes(content)
    (class_name,) = exported.config["architectures"]
    kind = getattr(transformers, "AutoModelForCausalLM" if exported.files else class_name)
    loaded, report = kind.from_pretrained(folder, trust_remote_code=bool(exported.files), output_loading_info=True)
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    return loaded.eval()


# ---- logits and gradients


@dataclass(frozen=True)
class Batch:
    """Rows of 30, 22 and 9 tokens, and labels of as many on the other side, where there is one."""

    ids: Tensor
    mask: Tensor
    labels: Tensor


def batch_of(config: ModelConfig) -> Batch:
    generator = torch.Generator().manual_seed(0)
    vocab_size = config.vocab_size or 0
    mask = (torch.arange(30) < torch.tensor([30, 22, 9])[:, None]).long()
    ids = torch.randint(3, vocab_size, (3, 30), generator=generator).masked_fill(mask == 0, config.pad_id)
    labels = torch.randint(3, vocab_size, (3, 30), generator=generator).masked_fill(mask == 0, IGNORED)
    if config.family == "encoder_only":
        labels[:, ::3] = IGNORED
    return Batch(ids, mask, labels)


def both_sides(model: Model, reference: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Our logits and theirs at all real tokens, our loss and theirs."""
    ids, mask, labels = batch.ids, batch.mask, batch.labels
    config = model.config
    if isinstance(model, EncoderDecoderModel):
        read = shift_right(labels, config.decoder_start_id).clamp(min=0)
        theirs = reference(input_ids=ids, attention_mask=mask, decoder_input_ids=read, labels=labels)
        ours = model.decode(read, model.encode(ids, mask), mask)
        losses = model(ids, labels, decoder_input_ids=read, encoder_attention_mask=mask)
    elif isinstance(model, CausalModel):
        theirs = reference(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, IGNORED))
        ours = model.decode(ids, attention_mask=mask)
        following = torch.cat([ids[:, 1:], torch.full((3, 1), config.pad_id)], dim=1)
        labels = following.masked_fill(torch.cat([mask[:, 1:], torch.zeros(3, 1).long()], dim=1) == 0, IGNORED)
        losses = model(ids, labels, encoder_attention_mask=mask)
    else:
        types = (torch.arange(30) > 5).long().expand(3, 30)
        follows = torch.tensor([1, 0, 1])
        told = {"labels": labels, "next_sentence_label": 1 - follows}  # transformers' 0: the second text follows
        theirs = reference(input_ids=ids, attention_mask=mask, token_type_ids=types, **told)
        assert isinstance(model, EncoderOnly)
        ours = model.masked_lm_logits(model.encode(ids, mask, types))
        losses = model(ids, labels, mask, types, follows)
    loss = losses["labels"].sum() / (labels != IGNORED).sum()
    if "next_sentence_labels" in losses:
        loss = loss + losses["next_sentence_labels"].mean()
    found = theirs.prediction_logits if "next_sentence_labels" in losses else theirs.logits
    real = mask.bool()
    return ours[real], found[real], loss, theirs.loss


def gradient_difference(model: Model, reference: Any) -> tuple[float, float]:
    """The largest difference of a gradient from transformers', and the largest gradient.

    Ours get their names and shapes there as the weights do: the way there only renames, joins and transposes.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    gradients = {
        name: torch.zeros_like(tensor) if (at := parameters.get(name)) is None or at.grad is None else at.grad
        for name, tensor in model.state_dict().items()
    }
    ours = INTERCHANGES[model.config.family].to_hugging_face(gradients, model.config).tensors
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    difference = max(float((ours[name] - gradient).abs().max()) for name, gradient in theirs.items())
    return difference, max(float(gradient.abs().max()) for gradient in theirs.values())


def finite_differences(kind: str, per_tensor: int = 2, step: float = 1e-5) -> tuple[float, float, int]:
    """In fp64 and training, with label smoothing and the embedding loss: the largest difference between a gradient and
    the slope of the loss, the largest gradient, and how many parameters were moved."""
    changes = {"embedding_loss": {**EMBEDDING_LOSS, "detach": "none"}} if kind == "autoregressive" else {}
    model = randomised(build(config_of(kind, 32, 100, 40, **changes)), 0.2).double().train()
    batch = batch_of(model.config)
    generator = random.Random(0)

    def loss() -> Tensor:
        losses = model(batch.ids, batch.labels, encoder_attention_mask=batch.mask)
        return sum((values.sum() for values in losses.values()), torch.zeros(())) / (batch.labels != IGNORED).sum()

    loss().backward()
    worst, largest, moved = 0.0, 0.0, 0
    for parameter in model.parameters():
        assert parameter.grad is not None
        flat, gradients = parameter.data.view(-1), parameter.grad.view(-1)
        for at in generator.sample(range(flat.numel()), min(per_tensor, flat.numel())):
            value = float(flat[at])
            slopes = []
            with torch.no_grad():
                for moved_by in (step, -step):
                    flat[at] = value + moved_by
                    slopes.append(float(loss()))
            flat[at] = value
            slope = (slopes[0] - slopes[1]) / (2 * step)
            worst = max(worst, abs(slope - float(gradients[at])))
            largest, moved = max(largest, abs(slope)), moved + 1
    return worst, largest, moved


@torch.no_grad()
def first_loss(kind: str) -> float:
    """Of a new model of width 256 over 8,192 ids, above ln 8,192; rows of random tokens."""
    config = config_of(kind, 256, 8192, 64)
    torch.manual_seed(0)
    model = build(config).eval()
    ids = torch.randint(3, 8192, (16, 64), generator=torch.Generator().manual_seed(0))
    labels = torch.randint(3, 8192, (16, 64), generator=torch.Generator().manual_seed(1))
    return float(model(ids, labels)["labels"].mean()) - math.log(8192)


# ---- generation


def until_end(row: list[int], end: int) -> list[int]:
    return row[: row.index(end) + 1] if end in row else row


def equal_rows(kind: str, folder: Path, num_beams: int, batches: int = 10) -> tuple[int, int]:
    """Of rows of random prompts, padded together: how many get transformers' tokens up to their end mark, of how many.

    Few ids and large weights, so that texts vary; fp64, so that rounding decides nothing. The end mark is an id that
    came up, so that some rows end and others reach the longest length.
    """
    model = randomised(build(config_of(kind, 32, 24, 40)), 1.0)
    reference = in_transformers(model, folder).double()
    model = model.double()
    causal = not isinstance(model, EncoderDecoderModel)
    draws = random.Random(kind)
    equal = 0
    for _ in range(batches):
        rows = [[draws.randrange(2, 24) for _ in range(draws.randint(1, 9))] for _ in range(4)]
        ids, mask = padded(rows, 0, left=causal)
        mask = torch.ones_like(ids) if mask is None else mask
        chosen = GenerationSettings(max_new_tokens=20, num_beams=num_beams)
        end = draws.choice(sorted(set(generate(model, ids, mask, chosen).flatten().tolist()) - {0}) or [1])
        start = {} if causal else {"decoder_start_token_id": model.config.decoder_start_id}
        before, model.config = model.config, model.config.model_copy(update={"eos_id": end})
        if start and model.config.family == "bart":  # whose texts start with the end mark
            start = {"decoder_start_token_id": end}
        found = generate(model, ids, mask, chosen).tolist()
        model.config = before
        options = {"max_new_tokens": 20, "num_beams": num_beams, "do_sample": False, "pad_token_id": 0}
        theirs = reference.generate(ids, attention_mask=mask, eos_token_id=end, **start, **options)
        new = theirs[:, ids.size(1) if causal else 1 :].tolist()
        pairs = zip(found, new, strict=True)
        equal += sum(until_end(ours, end) == until_end(their, end) for ours, their in pairs)
    return equal, 4 * batches


def equal_without_cache(kind: str, batches: int = 10) -> tuple[int, int]:
    """Of rows decoded greedily with caches: how many have at each step the likeliest token of the prefix run anew."""
    model = randomised(build(config_of(kind, 32, 24, 40)), 1.0).double()
    draws, equal = random.Random(kind), 0
    assert isinstance(model, EncoderDecoderModel)
    for _ in range(batches):
        rows = [[draws.randrange(2, 24) for _ in range(draws.randint(1, 9))] for _ in range(4)]
        ids, mask = padded(rows, 0, left=False)
        found = generate(model, ids, mask, GenerationSettings(max_new_tokens=20))
        start = torch.full((4, 1), model.config.decoder_start_id)
        with torch.no_grad():
            logits = model.decode(torch.cat([start, found[:, :-1]], dim=1), model.encode(ids, mask), mask)
        likeliest = logits.argmax(dim=-1).tolist()
        for row, other in zip(found.tolist(), likeliest, strict=True):
            equal += until_end(row, 1) == other[: len(until_end(row, 1))]
    return equal, 4 * batches


# ---- published sizes


# Yan (2024) counts without the table of positions.
COUNTED_BY_YAN = {
    "autoregressive-yan2024": 15_763_500,
    "decoder-only-yan2024-15m": 15_441_192,
    "decoder-only-yan2024-16m": 16_036_800,
}


def published_sizes() -> Iterator[tuple[str, int, int | None]]:
    """Name, parameters, and those that someone else counts; on the meta device, without memory."""
    for path in sorted((ROOT / "configs/models").glob("*.yaml")):
        values = yaml.safe_load(path.read_text())["model"]
        config = FAMILIES[values["family"]][0].model_validate(values)
        with torch.device("meta"):
            model = build(config)
            theirs = None
            if config.family in INTERCHANGES and path.stem not in COUNTED_BY_YAN:
                theirs = in_transformers_without_memory(model)
        ours = model.num_parameters()
        yield path.stem, ours, theirs
        if path.stem in COUNTED_BY_YAN:
            tables = [tensor.numel() for name, tensor in model.named_parameters() if "position" in name]
            yield f"{path.stem}, without positions", ours - sum(tables), COUNTED_BY_YAN[path.stem]


def in_transformers_without_memory(model: Model) -> int:
    """Parameters of transformers' model of the same config."""
    config = model.config
    saved = INTERCHANGES[config.family].to_hugging_face(model.state_dict(), config).config
    (class_name,) = saved.pop("architectures")
    reference = getattr(transformers, class_name)._from_config(
        transformers.AutoConfig.for_model(saved.pop("model_type"), **saved)
    )
    # transformers 5 ties every T5 that it makes of a config, and unties those whose files hold two matrices
    untied = reference.lm_head.weight.numel() if getattr(config, "tie_embeddings", None) is False else 0
    return reference.num_parameters() + untied


# ---- training

STEPS, ROWS = 200, 32
TRAINING_SIZES: Json = {"d_model": 128, "num_heads": 4}
STACKS = {"num_encoder_layers": 2, "num_decoder_layers": 2}
SPANS, NOISED, CAUSAL, MASKED = "span_corruption", "denoising", "causal_lm", "masked_lm"
OBJECTIVES: dict[str, Json] = {
    SPANS: {"objective": {"name": SPANS, "inputs_length": 96}},
    NOISED: {"packing": "complete_documents", "objective": {"name": NOISED, "length": 96}},
    CAUSAL: {"objective": {"name": CAUSAL, "length": 96}},
    MASKED: {"packing": "sentence_pairs", "objective": {"name": MASKED, "length": 96, "next_sentence": True}},
}
SPECIAL_TOKENS = {NOISED: ["<mask>", "<s>"], MASKED: ["[CLS]", "[SEP]", "<mask>"]}
TRAINED: dict[str, tuple[str, Json, float]] = {
    "T5 v1.0": (SPANS, {**STACKS, "d_kv": 32, "d_ff": 512}, 3e-3),
    "T5 v1.1": (SPANS, {**STACKS, "d_kv": 32, "d_ff": 256}, 3e-3),
    "BART": (NOISED, {**STACKS, "d_ff": 512, "max_positions": 96}, 1e-3),
    "Transformer": (SPANS, {**STACKS, "d_ff": 512}, 1e-3),
    "autoregressive": (CAUSAL, {**STACKS, "d_ff": 512, "max_positions": 96}, 1e-3),
    "autoregressive, without embedding loss": (
        CAUSAL,
        {**STACKS, "d_ff": 512, "max_positions": 96, "embedding_loss": None},
        1e-3,
    ),
    "GPT-2": (CAUSAL, {"num_layers": 5, "d_ff": 512, "max_positions": 96}, 1e-3),
    "BERT": (MASKED, {"num_layers": 5, "d_ff": 512, "max_positions": 96}, 1e-3),
}


def command(name: str, *arguments: str | Path) -> None:
    """Runs one of this project's commands as a user does."""
    program = [str(Path(sys.executable).with_name(name)), *map(str, arguments)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(program)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def build_corpora(folder: Path) -> dict[str, Path]:
    """A corpus of the shipped text for each objective, all with the pieces of the first one's tokenizer."""
    made: dict[str, Path] = {}
    for objective, rows in OBJECTIVES.items():
        tokenizer: Json = {"special_tokens": SPECIAL_TOKENS.get(objective, [])}
        tokenizer["sentinels"] = 100 if objective == SPANS else 0
        if made:
            tokenizer["path"] = str(made[SPANS] / "tokenizer/spiece.model")
        values = {
            "extends": [str(ROOT / "configs/corpora/quickstart.yaml")],
            "name": objective.replace("_", "-"),
            "output": str(folder / objective),
            "tokenizer": tokenizer,
            "rows": rows,
        }
        path = folder / f"{objective}.yaml"
        path.write_text(json.dumps(values))  # JSON is YAML
        command("data-pipeline", "build", path)
        made[objective] = folder / objective
    return made


@dataclass(frozen=True)
class Run:
    """What a training run has come to; losses in nats per token."""

    parameters: int
    expected: float
    first: float
    last: float
    validation: float
    text: float
    word_counts: float
    seconds: float
    tokens_per_second: float


def train(kind: str, corpora: dict[str, Path], folder: Path) -> Run:
    objective, sizes, rate = TRAINED[kind]
    name = kind.lower().replace(",", "").replace(" ", "-")
    values = {
        "run": {"name": name, "directory": str(folder / name), "seed": 0, "max_steps": STEPS, "cpu_threads": 1},
        "model": {**_without_sizes(kind.split(",")[0]), **TRAINING_SIZES, **sizes},
        "data": {
            "train": [{"corpus": str(corpora[objective])}],
            "validation": [{"corpus": str(corpora[objective])}],
            "workers": 0,
        },
        "batch": {"global_batch_size": ROWS},
        "optimizer": {"learning_rate": rate, "betas": [0.9, 0.98], "gradient_clipping": 1.0},
        "schedule": {"name": "cosine", "warmup_steps": 30},
        "precision": "fp32",
        "deepspeed": {"zero_optimization": {"stage": 2}},
        "checkpoint": {"every_steps": STEPS},
        "evaluation": [{"hook": "validation_loss", "every_steps": STEPS}],
        "tracking": {"mlflow": None, "log_every_steps": 1},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(values))
    started = time.monotonic()
    command("launch", "local", path, "--ranks", "2")
    seconds = time.monotonic() - started
    rows = read_metrics(folder / name)
    losses = [row.metrics["train/loss"] for row in rows if "train/loss" in row.metrics]
    assert len(losses) == STEPS
    speeds = [row.metrics["train/tokens_per_second"] for row in rows if "train/tokens_per_second" in row.metrics]
    found = {key.rsplit("/", 1)[1]: value for row in rows for key, value in row.metrics.items() if "validation" in key}
    saved = json.loads(next((folder / name / "checkpoints").glob("step-*/index.json")).read_text())["identity"]["model"]
    config = FAMILIES[saved["family"]][0].model_validate(saved)
    with torch.device("meta"):
        parameters = build(config).num_parameters()
    return Run(
        parameters,
        math.log(config.padded_vocab_size),
        losses[0],
        statistics.mean(losses[-20:]),
        found["loss"],
        found["text_loss"],
        found["unigram_entropy"],
        seconds,
        statistics.median(speeds),
    )


def _without_sizes(kind: str) -> Json:
    return {key: value for key, value in KINDS[kind].items() if not key.startswith("num_")}


# ---- tables


@dataclass
class Figures:
    """A table for the terminal and for a page."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def show(self, console: Console) -> None:
        table = Table(*self.columns, title=self.title)
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    @property
    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return f"{self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def agreement(folder: Path) -> Figures:
    """Everything that is compared at small sizes."""
    rows = []
    for kind in KINDS:
        theirs = REFERENCES.get(kind)
        logits = gradients = "—"
        if theirs is not None:
            model = randomised(build(config_of(kind, 64, 500, 40)), 0.15)
            reference = in_transformers(model, folder / kind / "logits")
            ours, found, loss, their_loss = both_sides(model, reference, batch_of(model.config))
            logits = _difference(float((ours - found).detach().abs().max()), float(found.detach().abs().max()))
            loss.backward()
            their_loss.backward()
            difference, largest = gradient_difference(model, reference)
            gradients = _difference(difference, largest)
        slopes = "—"
        if kind in ("Transformer", "autoregressive"):
            difference, largest, moved = finite_differences(kind)
            slopes = f"{_difference(difference, largest)}, at {moved}"
        rows.append(
            [kind, theirs or "—", logits, gradients, slopes, f"{first_loss(kind):+.3f}", *generation(kind, folder)]
        )
    columns = [
        "family",
        "against",
        "logits differ by",
        "gradients differ by",
        "gradients from slopes by",
        "first loss − ln V",
        "greedy rows equal",
        "rows of 4 beams equal",
    ]
    return Figures("Agreement", columns, rows)


def _difference(difference: float, largest: float) -> str:
    return f"{difference:.0e} of {largest:.2g}" if difference else f"0 of {largest:.2g}"


def generation(kind: str, folder: Path) -> list[str]:
    if kind == "BERT":
        return ["—", "—"]
    if kind not in REFERENCES:
        equal, of = equal_without_cache(kind)
        return [f"{equal} of {of}, own without a cache", "—"]
    found = [equal_rows(kind, folder / kind / f"{beams} beams", beams) for beams in (1, 4)]
    return [f"{equal} of {of}" for equal, of in found]


def sizes() -> Figures:
    rows = [
        [name, f"{ours:,}", "—" if theirs is None else f"{theirs:,}", _same(ours, theirs)]
        for name, ours, theirs in published_sizes()
    ]
    return Figures("Parameters of configs/models", ["config", "parameters", "by others", "equal"], rows)


def _same(ours: int, theirs: int | None) -> str:
    return "—" if theirs is None else "yes" if ours == theirs else "no"


def row_of(kind: str, run: Run) -> list[str]:
    losses = (run.expected, run.first, run.last, run.validation, run.text, run.word_counts)
    return [
        kind,
        TRAINED[kind][0],
        f"{run.parameters:,}",
        *(f"{loss:.3f}" for loss in losses),
        f"{run.seconds:.0f}",
        f"{run.tokens_per_second:,.0f}",
    ]


def training(folder: Path, console: Console) -> Figures:
    corpora = build_corpora(folder)
    rows = []
    for kind in TRAINED:
        rows.append(row_of(kind, train(kind, corpora, folder)))
        console.print(*rows[-1])
    columns = [
        "family",
        "objective",
        "parameters",
        "ln V",
        "loss of step 1",
        "of the last 20",
        "validation",
        "of text",
        "word counts alone",
        "seconds",
        "tokens/s",
    ]
    return Figures(f"Training: {STEPS} steps of {ROWS} rows, two CPU ranks, ZeRO stage 2, fp32", columns, rows)


def write(page: Path, tables: list[Figures]) -> None:
    """Puts the tables between the markers of `page`; tables that were not made this time stay as they are."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN, 1)
    held, after = rest.split(END, 1)
    parts = {part.split("\n", 1)[0].split(":")[0]: part for part in held.strip().split("\n\n### ") if part}
    kept = {key.removeprefix("### "): part.removeprefix("### ") for key, part in parts.items()}
    kept |= {table.title.split(":")[0]: table.markdown for table in tables}
    body = "\n\n".join(f"### {part.strip()}" for part in kept.values())
    page.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", action="store_true", help="also 200 steps of each family")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="a page with the markers")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    console = Console(width=180)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dynamic_module_utils.HF_MODULES_CACHE = str(folder / "modules")
        makers: list[Callable[[], Figures]] = [lambda: agreement(folder), sizes]
        if arguments.train:
            makers.append(lambda: training(folder, console))
        tables = []
        for make in makers:
            tables.append(make())
            tables[-1].show(console)
            if arguments.write:
                write(arguments.write, tables)


if __name__ == "__main__":
    main()
