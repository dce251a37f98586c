"""Models of this project and of transformers with the same weights, and training steps of both on the same tokens."""

import argparse
import json
import shutil
import tempfile
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


USUAL_WORK = (
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


def works(options: Options, slow: bool = False) -> tuple[Work, ...]:
    """The work of a benchmark: --models, or all; `slow` as in `harness.slow`."""
    chosen = options.arguments.models
    return tuple(work for work in (SLOW_WORK if slow else USUAL_WORK) if not chosen or work.config in chosen)


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


def tokens(work: Work) -> dict[str, Tensor]:
    """A batch without padding: every position has a target."""
    generator = torch.Generator().manual_seed(1)

    def ids(length: int) -> Tensor:
        return torch.randint(10, 30_000, (work.rows, length), generator=generator)

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


def their_step(peer: Any, batch: dict[str, Tensor], compiled: bool = False) -> Side:
    """Forward and backward of the mean loss of transformers' model, on a batch of ours."""
    forward = torch.compile(peer) if compiled else peer
    ids, labels = batch["encoder_input_ids"], batch["labels"]
    if not peer.config.is_encoder_decoder:  # it shifts the labels itself
        labels = ids

    def step() -> Tensor:
        loss = forward(input_ids=ids, labels=labels).loss
        loss.backward()
        peer.zero_grad()
        return loss.detach()

    return step


def pair(work: Work, precision: str) -> dict[str, Side]:
    """Training steps of our model and of transformers' in each form, by side."""
    ours = our_model(work.config)
    peers = {f"transformers, {form}": their_model(ours, form) for form in FORMS}
    dtype = PRECISIONS[precision]
    ours.to(dtype).train()
    batch = tokens(work)
    sides = {"ours": our_step(ours, batch)}
    for name, peer in peers.items():
        sides[name] = their_step(peer.to(dtype), batch)
    return sides


def compiled_pair(work: Work, precision: str) -> dict[str, Side]:
    """Training steps compiled by torch: our layers as `compute.compile` does it, and transformers' whole model."""
    ours = our_model(work.config)
    dtype = PRECISIONS[precision]
    peer = their_model(ours, "sdpa").to(dtype)
    ours.to(dtype).train()
    batch = tokens(work)
    for layer in layers(ours).values():
        layer.prepare(BACKEND)
    return {"ours": our_step(ours, batch), "transformers, sdpa": their_step(peer, batch, compiled=True)}
