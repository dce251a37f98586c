"""torchtitan's text loader, and PyTorch's distributed checkpoints (DCP), which torchtitan saves.

The loader and its state: torchtitan 0.3.0, torchtitan/hf_datasets/text_datasets.py and components/dataloader.py; a
dataset of one's own: its page "datasets". A checkpoint is a folder `step-N`; a resume takes the newest one that has
`.metadata`, as components/checkpointer/dcp.py does. `dcp.save` and `dcp.load` with a `Stateful` of model and optimizer:
PyTorch's recipe "Getting Started with Distributed Checkpoint". torchtitan's own models and trainer expect GPUs.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from datasets import load_dataset
from kills import arguments, text
from kills.record import Record
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader


class Bytes(BaseTokenizer):
    def __init__(self) -> None:
        super().__init__()
        self.eos_id = 1

    def encode(self, line: str, add_bos: bool, add_eos: bool) -> list[int]:
        return text.tokens(line) + [1] * add_eos

    def decode(self, ids: list[int]) -> str:
        return bytes(one - 3 for one in ids if 3 <= one < 259).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return text.VOCABULARY


class Decoder(nn.Module):
    """A decoder of a million parameters."""

    def __init__(self, length: int):
        super().__init__()
        sizes = arguments.T5
        self.tokens = nn.Embedding(text.VOCABULARY, sizes["d_model"])
        self.positions = nn.Embedding(length, sizes["d_model"])
        layer = nn.TransformerEncoderLayer(
            sizes["d_model"], sizes["num_heads"], 4 * sizes["d_model"], dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(sizes["d_model"], text.VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(ids) + self.positions(torch.arange(length))
        logits: Tensor = self.out(self.layers(hidden, mask=mask, is_causal=True))
        return logits


class State(Stateful):
    """What a checkpoint has besides the loader: model, optimizer, schedule and the number of steps."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any):
        self.model, self.optimizer, self.schedule, self.step = model, optimizer, schedule, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict(), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step = state["step"]


def newest(folder: Path) -> Path | None:
    whole = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)


def main() -> None:
    given = arguments.parse()
    torch.manual_seed(given.seed)
    length = 2 * text.LENGTH
    DATASETS["lines"] = DatasetConfig(
        path=str(given.text),
        loader=lambda path: load_dataset("json", data_files=path, split="train", streaming=True),
        sample_processor=lambda sample: str(sample["text"]),
    )
    loader = HuggingFaceTextDataLoader(
        HuggingFaceTextDataLoader.Config(dataset="lines"),
        dp_world_size=1,
        dp_rank=0,
        tokenizer=Bytes(),
        seq_len=length,
        local_batch_size=arguments.ROWS,
    )
    model = Decoder(length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps, eta_min=1e-5)
    state, record = State(model, optimizer, schedule), Record(given.folder)
    if checkpoint := newest(given.folder / "checkpoints"):
        dcp.load({"state": state, "dataloader": loader}, checkpoint_id=checkpoint)
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs["input"]).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        state.step += 1
        pairs = zip(inputs["input"].tolist(), labels.tolist(), strict=True)
        record.step(
            state.step, [hashlib.blake2b(repr(pair).encode(), digest_size=8).hexdigest() for pair in pairs], loss.item()
        )
        if state.step % arguments.EVERY == 0:
            saved = given.folder / "checkpoints" / f"step-{state.step}"
            dcp.save({"state": state, "dataloader": loader}, checkpoint_id=saved)
        if state.step == given.steps:
            break
    record.weights(model.state_dict())


if __name__ == "__main__":
    main()
