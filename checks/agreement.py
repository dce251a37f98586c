"""How far are models from transformers' models of the same weights? Writes docs/results/models/agreement.csv.

    python -m checks.agreement

Random weights, width 64, fp32, rows of 30, 22 and 9 tokens padded to one batch: the largest difference of a logit and
of an element of a gradient, with the largest value of either, and how many of 40 greedy texts of 20 tokens are equal up
to their EOS. Takes half a minute of one core.
"""

import csv
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.evaluate.generation.decoding import generate
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.models import build, parse
from pretrain.models.model import shift_right
from tests.pretrain.export.test_export import ROTARY_DECODERS
from tests.support.exported import in_transformers, pairs_of_gradients, randomise
from tests.support.small_families import FAMILIES

IDS = {"vocab_size": 500, "pad_id": 0, "eos_id": 1}
STANDARD = {"T5 v1.0": {"feed_forward": "relu", "tie_embeddings": True}, "T5 v1.1": {}}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("T5", {**FAMILIES["t5"], "dropout_rate": 0.0, **given}) for name, given in STANDARD.items()},
    "BART": ("BART", FAMILIES["bart"]),
    "T5Gemma": ("T5Gemma", {**FAMILIES["t5gemma"], "bos_id": 2}),
    "T5Gemma 2": ("T5Gemma 2", {**FAMILIES["t5gemma2"], "bos_id": 2}),
    "decoder_only": ("GPT-2", FAMILIES["decoder_only"]),
    **{
        f"decoder_only, {name}'s layers": (name, {**ROTARY_DECODERS[name], "d_model": 64})
        for name in ("Llama", "Qwen3", "Gemma 2", "Gemma 3")
    },
}
HEADINGS = (
    "family",
    "against",
    "logits_differ",
    "largest_logit",
    "gradients_differ",
    "largest_gradient",
    "rows",
    "equal_rows",
)
FILE = Path(__file__).parents[1] / "docs/results/models/agreement.csv"


def compared(settings: dict[str, Any]) -> Iterator[float]:
    """The figures of one model, in the order of HEADINGS."""
    model: Any = randomise(build(parse({**IDS, **settings})))
    with tempfile.TemporaryDirectory() as folder:
        reference = in_transformers(model, Path(folder) / "export")
    mask = (torch.arange(30) < torch.tensor([30, 22, 9])[:, None]).long()
    inputs, has_encoder = _ids(3, 30).masked_fill(mask == 0, 0), hasattr(model, "encode")
    if has_encoder:
        given = torch.arange(20) < torch.tensor([17, 20, 3])[:, None]
        labels = _ids(3, 20, seed=1).masked_fill(~given, IGNORE_INDEX)
        read = shift_right(labels, model.config.decoder_start_id, pad_id=0)
        theirs = reference(input_ids=inputs, attention_mask=mask, decoder_input_ids=read, labels=labels)
        ours, real, targets = model.decode(read, model.encode(inputs, mask), mask), labels != IGNORE_INDEX, labels
    else:
        labels, real = inputs.masked_fill(mask == 0, IGNORE_INDEX), mask.bool()
        theirs = reference(input_ids=inputs, attention_mask=mask, labels=labels)
        ours = model.decode(inputs, attention_mask=mask)
        targets = torch.cat([labels[:, 1:], torch.full((3, 1), IGNORE_INDEX)], dim=1)
    yield float((ours - theirs.logits)[real].abs().max())
    yield float(theirs.logits[real].abs().max())
    loss = model(inputs, targets, encoder_attention_mask=mask)["labels"].sum() / (targets != IGNORE_INDEX).sum()
    loss.backward()
    theirs.loss.backward()
    pairs = pairs_of_gradients(model, reference).values()
    yield max(float((one - other).abs().max()) for one, other in pairs)
    yield max(float(other.abs().max()) for _, other in pairs)
    prompts = [_ids(1, 3 + number % 20, seed=number) for number in range(40)]
    yield len(prompts)
    yield sum(_greedy(model, prompt) == _their_greedy(reference, prompt, has_encoder) for prompt in prompts)


def _ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 500, shape, generator=torch.Generator().manual_seed(seed))


def _greedy(model: Any, prompt: Tensor) -> list[int]:
    return _until_eos(generate(model, prompt, None, GenerationSettings(max_new_tokens=20))[0].tolist())


def _their_greedy(reference: Any, prompt: Tensor, has_encoder: bool) -> list[int]:
    marks = {"pad_token_id": 0, "eos_token_id": 1, "do_sample": False, "max_new_tokens": 20}
    text = reference.generate(prompt, attention_mask=torch.ones_like(prompt), **marks)[0].tolist()
    return _until_eos(text[1 if has_encoder else prompt.shape[1] :])


def _until_eos(text: list[int]) -> list[int]:
    return text[: text.index(1) + 1] if 1 in text else text


def main() -> int:
    torch.set_num_threads(1)
    with FILE.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(HEADINGS)
        for name, (against, settings) in MODELS.items():
            writer.writerow([name, against, *(f"{value:.3g}" for value in compared(settings))])
    print(FILE.read_text(encoding="utf-8"), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
