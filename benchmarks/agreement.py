"""Do the models agree with transformers?

    python benchmarks/agreement.py [--write docs/results/models.md]

Compares models of random weights with transformers' models of the same weights, or their gradients with finite
differences where transformers lacks the family; generated tokens with transformers' `generate`; and parameter counts
with the published sizes.
"""

import math
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from families import EMBEDDING_LOSS, KINDS, arguments_of, show
from harness import ROOT, Json, Table
from peers import in_transformers
from torch import Tensor
from transformers import dynamic_module_utils

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.generation.decoders import CausalModel
from pretrain.generation.decoding import generate
from pretrain.generation.settings import GenerationSettings
from pretrain.generation.texts import padded
from pretrain.huggingface import conversion_for
from pretrain.models import FAMILIES, ModelConfig, T5Config, build
from pretrain.models.encoder_decoder import EncoderDecoder
from pretrain.models.encoder_only import EncoderOnly
from pretrain.models.loss import shift_right
from pretrain.models.model import Model

REFERENCES = {
    "T5 v1.0": "T5",
    "T5 v1.1": "T5",
    "BART": "BART",
    "autoregressive": "exported file",
    "T5Gemma": "T5Gemma",
    "T5Gemma 2": "T5Gemma 2",
    "decoder_only": "GPT-2",
    **{f"decoder_only, {name}'s layers": name for name in ("Llama", "Qwen3", "Gemma 2", "Gemma 3")},
    "encoder_only": "BERT",
}


SOFT_CAPPED = ("T5Gemma", "decoder_only, Gemma 2's layers")


def config_of(kind: str, d_model: int, vocab_size: int, max_positions: int, **changes: Any) -> ModelConfig:
    values: Json = {**KINDS[kind], "d_model": d_model, "vocab_size": vocab_size, **changes}
    config_class = FAMILIES[values["family"]].config
    if values["family"] == "t5":
        values["d_kv"] = d_model // values["num_heads"]
    elif values["family"] in ("t5gemma", "modern"):
        stack = {"d_model": values.pop("d_model"), "d_ff": 2 * d_model, "num_heads": 4, "num_key_value_heads": 2}
        values |= {side: {**stack, "num_layers": layers} for side, layers in (("encoder", 2), ("decoder", 3))}
        return config_class.model_validate(values)
    elif "positions" not in values and values["family"] not in ("vanilla", "t5gemma2"):
        values["max_positions"] = max_positions
    return config_class.model_validate({"d_ff": 2 * d_model, **values})


def randomised(model: Model, std: float) -> Model:
    """Draws weights that all matter: attention isn't uniform, and gains and biases aren't ones and zeros."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        of_vectors = float(parameter.mean()) if parameter.dim() == 1 else 0.0  # gains are around 1, or 1 + weight is
        torch.nn.init.normal_(parameter, mean=of_vectors, std=std)
    return model.eval()


# ---- logits and gradients


@dataclass(frozen=True)
class Batch:
    """Rows of 30, 22 and 9 tokens, each with as many labels."""

    ids: Tensor
    mask: Tensor
    labels: Tensor


def batch_of(config: ModelConfig) -> Batch:
    generator = torch.Generator().manual_seed(0)
    vocab_size = config.vocab_size or 0
    mask = (torch.arange(30) < torch.tensor([30, 22, 9])[:, None]).long()
    ids = torch.randint(3, vocab_size, (3, 30), generator=generator).masked_fill(mask == 0, config.pad_id)
    labels = torch.randint(3, vocab_size, (3, 30), generator=generator).masked_fill(mask == 0, IGNORE_INDEX)
    if config.family == "encoder_only":
        labels[:, ::3] = IGNORE_INDEX
    return Batch(ids, mask, labels)


def both_sides(model: Model, reference: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Our logits and theirs at all real tokens, our loss and theirs."""
    ids, mask, labels = batch.ids, batch.mask, batch.labels
    config = model.config
    if isinstance(model, EncoderDecoder):
        read = shift_right(labels, config.decoder_start_id).clamp(min=0)
        theirs = reference(input_ids=ids, attention_mask=mask, decoder_input_ids=read, labels=labels)
        ours = model.decode(read, model.encode(ids, mask), mask)
        losses = model(ids, labels, decoder_input_ids=read, encoder_attention_mask=mask)
    elif isinstance(model, CausalModel):
        theirs = reference(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, IGNORE_INDEX))
        ours = model.decode(ids, attention_mask=mask)
        following = torch.cat([ids[:, 1:], torch.full((3, 1), config.pad_id)], dim=1)
        labels = following.masked_fill(torch.cat([mask[:, 1:], torch.zeros(3, 1).long()], dim=1) == 0, IGNORE_INDEX)
        losses = model(ids, labels, encoder_attention_mask=mask)
    else:
        types = (torch.arange(30) > 5).long().expand(3, 30)
        follows = torch.tensor([1, 0, 1])
        targets = {"labels": labels, "next_sentence_label": 1 - follows}  # transformers' 0: the second text follows
        theirs = reference(input_ids=ids, attention_mask=mask, token_type_ids=types, **targets)
        assert isinstance(model, EncoderOnly)
        ours = model.masked_lm_logits(model.encode(ids, mask, types))
        losses = model(ids, labels, mask, types, follows)
    loss = losses["labels"].sum() / (labels != IGNORE_INDEX).sum()
    if "next_sentence_labels" in losses:
        loss = loss + losses["next_sentence_labels"].mean()
    found = theirs.prediction_logits if "next_sentence_labels" in losses else theirs.logits
    real = mask.bool()
    return ours[real], found[real], loss, theirs.loss


def gradient_difference(model: Model, reference: Any) -> tuple[float, float]:
    """The largest difference of a gradient from transformers', and the largest gradient.

    Our gradients are converted like weights: the conversion only renames, joins and transposes.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    gradients = {
        name: torch.zeros_like(tensor) if (at := parameters.get(name)) is None or at.grad is None else at.grad
        for name, tensor in model.state_dict().items()
    }
    ours = conversion_for(model.config).to_hugging_face(gradients, model.config).tensors
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    difference = max(float((ours[name] - gradient).abs().max()) for name, gradient in theirs.items())
    return difference, max(float(gradient.abs().max()) for gradient in theirs.values())


def finite_differences(kind: str, per_tensor: int = 2, step: float = 1e-5) -> tuple[float, float, int]:
    """The largest difference between a gradient and the slope of the loss, the largest gradient, and the number of
    parameters that were moved. Runs in fp64 and training mode, with label smoothing and the embedding loss."""
    changes = {"embedding_loss": {**EMBEDDING_LOSS, "detach": "none"}} if kind == "autoregressive" else {}
    model = randomised(build(config_of(kind, 32, 100, 40, **changes)), 0.2).double().train()
    batch = batch_of(model.config)
    generator = random.Random(0)

    def loss() -> Tensor:
        losses = model(batch.ids, batch.labels, encoder_attention_mask=batch.mask)
        return sum((values.sum() for values in losses.values()), torch.zeros(())) / (batch.labels != IGNORE_INDEX).sum()

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
    """How far a new model's first loss exceeds ln 8,192, with width 256 and rows of random tokens from 8,192 ids."""
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
    """Counts rows of random prompts, padded together, that get transformers' tokens up to EOS; and all rows.

    Few ids and large weights make texts vary; with fp64, rounding decides nothing. EOS is an id that was
    generated before, so that some rows end and others reach the maximum length. Where transformers has soft caps, it
    computes in fp32: its masks of fp64 would become minus infinity in its softmax, and queries of padding NaN.
    """
    model = randomised(build(config_of(kind, 32, 24, 40)), 1.0)
    dtype = torch.float32 if kind in SOFT_CAPPED else torch.float64
    reference, model = in_transformers(model, folder).to(dtype), model.to(dtype)
    causal = not isinstance(model, EncoderDecoder)
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
        if start and model.config.family == "bart":  # whose texts start with EOS
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
    """Counts rows whose greedily decoded tokens, with caches, are the likeliest without a cache; and all rows."""
    model = randomised(build(config_of(kind, 32, 24, 40)), 1.0).double()
    draws, equal = random.Random(kind), 0
    assert isinstance(model, EncoderDecoder)
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
    """Yields name, our parameter count and someone else's; built on the meta device, without memory."""
    for path in sorted((ROOT / "configs/models").glob("*.yaml")):
        values = yaml.safe_load(path.read_text())["model"]
        config = FAMILIES[values["family"]].config.model_validate(values)
        with torch.device("meta"):
            model = build(config)
            theirs = None
            if FAMILIES[config.family].conversion and path.stem not in COUNTED_BY_YAN:
                theirs = in_transformers_without_memory(model)
        ours = model.num_parameters()
        yield path.stem, ours, theirs
        if path.stem in COUNTED_BY_YAN:
            tables = [tensor.numel() for name, tensor in model.named_parameters() if "position" in name]
            yield f"{path.stem}, without positions", ours - sum(tables), COUNTED_BY_YAN[path.stem]


def in_transformers_without_memory(model: Model) -> int | None:
    """The number of parameters of transformers' model of the same config; None if the export brings its own."""
    config = model.config
    exported = conversion_for(config).to_hugging_face(model.state_dict(), config)
    if exported.files:
        return None
    saved = exported.config
    (class_name,) = saved.pop("architectures")
    reference = getattr(transformers, class_name)._from_config(
        transformers.AutoConfig.for_model(saved.pop("model_type"), **saved)
    )
    # transformers 5 ties every T5 that it builds from a config, and unties those whose files hold two matrices
    untied = reference.lm_head.weight.numel() if isinstance(config, T5Config) and not config.tie_embeddings else 0
    of_images = ("vision_tower.", "multi_modal_projector.", "eoi_embedding")  # which T5Gemma 2 always has
    unused = [tensor.numel() for name, tensor in reference.named_parameters() if any(one in name for one in of_images)]
    return reference.num_parameters() + untied - sum(unused)


# ---- tables


def agreement(folder: Path) -> Table:
    """All comparisons at small sizes."""
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
        if kind in ("vanilla", "modern", "autoregressive"):
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
    return Table("Agreement", columns, rows)


def _difference(difference: float, largest: float) -> str:
    return f"{difference:.0e} of {largest:.2g}" if difference else f"0 of {largest:.2g}"


def generation(kind: str, folder: Path) -> list[str]:
    if kind == "encoder_only":
        return ["—", "—"]
    if kind not in REFERENCES:
        equal, of = equal_without_cache(kind)
        return [f"{equal} of {of}, own without a cache", "—"]
    found = [equal_rows(kind, folder / kind / f"{beams} beams", beams) for beams in (1, 4)]
    return [f"{equal} of {of}" for equal, of in found]


def sizes() -> Table:
    rows = [
        [
            name,
            f"{ours:,}",
            "—" if theirs is None else f"{theirs:,}",
            "—" if theirs is None else "yes" if ours == theirs else "no",
        ]
        for name, ours, theirs in published_sizes()
    ]
    return Table("Parameters of configs/models", ["config", "parameters", "by others", "equal"], rows)


def main() -> None:
    arguments = arguments_of(__doc__)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        dynamic_module_utils.HF_MODULES_CACHE = f"{name}/modules"
        show((make() for make in (lambda: agreement(Path(name)), sizes)), arguments.write)


if __name__ == "__main__":
    main()
