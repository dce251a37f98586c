"""Models of this project and of transformers with the same weights, and training steps of both on the same tokens."""

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from harness import PRECISIONS, ROOT, Options, Side
from safetensors.torch import save_file
from torch import Tensor

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.engine.construction import BACKEND, layers
from pretrain.export import hf_model_of, to_hf
from pretrain.export.export import MODELLING_FILES
from pretrain.models import build, parse
from pretrain.models.flops import Sizes
from pretrain.models.model import Model

FORMS = ("sdpa", "eager")  # of attention in transformers


@dataclass(frozen=True)
class Work:
    """A model in configs/models, and the tokens of a step: `rows` of `inputs` and `targets`."""

    name: str
    config: str
    rows: int
    inputs: int
    targets: int

    def __str__(self) -> str:
        lengths = f"{self.inputs}/{self.targets}" if self.inputs else str(self.targets)
        return f"{self.name}, {self.rows} × {lengths}"

    @property
    def sizes(self) -> Sizes:
        rows, inputs, targets = self.rows, self.inputs, self.targets
        pairs = (rows * inputs * inputs, rows * targets * targets, rows * inputs * targets)
        return Sizes(rows, rows * inputs, rows * targets, *pairs)


CPU_WORK = (
    Work("T5-v1.1-small", "t5-v1.1-small", 4, 512, 114),
    Work("BART-base", "bart-base", 1, 256, 256),
    Work("GPT-2 small", "gpt2-small", 1, 0, 256),
)
# for transformers' products in bf16, on a CPU that has no arithmetic for it
SLOW_WORK = (
    Work("T5-v1.1-small", "t5-v1.1-small", 1, 64, 16),
    Work("BART-base", "bart-base", 1, 8, 8),
    Work("GPT-2 small", "gpt2-small", 1, 0, 16),
)
CUDA_WORK = tuple(
    Work(name, config, rows, inputs, targets)
    for name, config, inputs, targets in (
        ("T5-v1.1-base", "t5-v1.1-base", 512, 114),
        ("BART-base", "bart-base", 512, 512),
        ("GPT-2 small", "gpt2-small", 0, 1024),
    )
    for rows in (32, 64, 128, 256)
)


def works(options: Options, slow: bool = False) -> tuple[Work, ...]:
    """The work of a benchmark: --models, or all of the device's; `slow` as in `Options.slow`."""
    chosen = options.arguments.models
    given = CUDA_WORK if options.cuda else SLOW_WORK if slow else CPU_WORK
    return tuple(work for work in given if not chosen or work.config in chosen)


def works_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", help="of configs/models; by default all")


def our_model(config: str, **settings: Any) -> Model:
    """A model of configs/models with random weights, in fp32."""
    values = yaml.safe_load((ROOT / f"configs/models/{config}.yaml").read_text(encoding="utf-8"))["model"]
    torch.manual_seed(0)
    return build(parse({**values, **settings}))


def in_transformers(model: Model, folder: Path, **settings: Any) -> Any:
    """The same model in transformers, loaded with `settings` from files exported to `folder`, in evaluation mode.

    From files, since transformers 5 ties the two matrices of any T5 that it builds from a config.
    """
    hf = hf_model_of(model.config)
    exported = to_hf(hf, model.config, model.state_dict())
    folder.mkdir(parents=True)
    tensors = {name: tensor.detach().float().contiguous() for name, tensor in exported.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(exported.config))
    for name in hf.code:
        shutil.copy(MODELLING_FILES / name, folder)
    (class_name,) = exported.config["architectures"]
    kind = getattr(transformers, hf.class_name if hf.code else class_name)
    loaded, report = kind.from_pretrained(folder, trust_remote_code=bool(hf.code), output_loading_info=True, **settings)
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    return loaded.eval()


def their_model(model: Model, form: str) -> Any:
    """transformers' model with the weights of `model` and attention in `form`, sdpa or eager, in training mode."""
    with tempfile.TemporaryDirectory() as folder:
        peer = in_transformers(model, Path(folder, "peer"), attn_implementation=form, dtype=torch.float32)
    peer.config.use_cache = False
    return peer.train()


def tokens(model: Model, work: Work, device: str) -> dict[str, Tensor]:
    """A batch for `model`, without padding: every position has a target."""
    generator = torch.Generator().manual_seed(1)

    def ids(length: int) -> Tensor:
        return torch.randint(10, 30_000, (work.rows, length), generator=generator).to(device)

    if work.inputs:
        return {"encoder_input_ids": ids(work.inputs), "labels": ids(work.targets)}
    labels = ids(work.targets)
    last = labels.new_full((work.rows, 1), IGNORE_INDEX)
    return {"encoder_input_ids": labels, "labels": torch.cat([labels[:, 1:], last], dim=1)}


def our_step(model: Model, batch: dict[str, Tensor]) -> Side:
    """Forward and backward of the mean loss."""
    count = (batch["labels"] != IGNORE_INDEX).sum()

    def step() -> Tensor:
        loss = model(**batch)["labels"].sum() / count
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return step


def their_step(peer: Any, batch: dict[str, Tensor]) -> Side:
    """Forward and backward of the mean loss of transformers' model, on a batch of ours."""
    ids, labels = batch["encoder_input_ids"], batch["labels"]
    if not peer.config.is_encoder_decoder:  # it shifts the labels itself
        labels = ids

    def step() -> Tensor:
        loss = peer(input_ids=ids, labels=labels).loss
        loss.backward()
        peer.zero_grad()
        return loss.detach()

    return step


def pair(work: Work, precision: str, device: str, **settings: Any) -> tuple[dict[str, Side], Model]:
    """Training steps of our model and of transformers' in each form, by side; and our model."""
    ours = our_model(work.config, **settings)
    peers = {f"transformers, {form}": their_model(ours, form) for form in FORMS}
    dtype = PRECISIONS[precision]
    ours.to(device, dtype).train()
    batch = tokens(ours, work, device)
    sides = {"ours": our_step(ours, batch)}
    for name, peer in peers.items():
        sides[name] = their_step(peer.to(device, dtype).train(), batch)
    return sides, ours


def compiled_pair(work: Work, precision: str, device: str) -> tuple[dict[str, Side], Model]:
    """Training steps compiled by torch: our layers as `compute.compile` does it, and transformers' whole model."""
    ours = our_model(work.config)
    peer = their_model(ours, "sdpa")
    dtype = PRECISIONS[precision]
    ours.to(device, dtype).train()
    batch = tokens(ours, work, device)
    for layer in layers(ours).values():
        layer.prepare(BACKEND)
    whole: Callable[..., Any] = torch.compile(peer.to(device, dtype).train())
    ids, labels = batch["encoder_input_ids"], batch["labels"] if work.inputs else batch["encoder_input_ids"]

    def their_compiled() -> Tensor:
        loss = whole(input_ids=ids, labels=labels).loss
        loss.backward()
        peer.zero_grad()
        return loss.detach()

    return {"ours": our_step(ours, batch), "transformers, sdpa": their_compiled}, ours
