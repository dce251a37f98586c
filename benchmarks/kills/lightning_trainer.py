"""Lightning's Trainer, with torchdata's StatefulDataLoader over a streamed dataset.

`ModelCheckpoint(every_n_train_steps=…, save_last=True)` and `trainer.fit(…, ckpt_path="last")`: Lightning's pages on
checkpoints and the docstring of `Trainer.fit`: "last" continues from the latest
checkpoint, and starts anew if there is none. A loader with `state_dict` is saved and restored with the loops
(CHANGELOG of 2.2.0). The loader: meta-pytorch/data, torchdata/stateful_dataloader/README.md. datasets' streams have
`state_dict` (its page "Stream").
"""

from typing import Any

import lightning
import torch
from datasets import load_dataset
from kills import arguments, text
from kills.record import Record
from kills.t5 import new_t5
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader


class Module(lightning.LightningModule):
    def __init__(self, record: Record, steps: int):
        super().__init__()
        self.record, self.steps = record, steps
        self.model = new_t5()

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        rows = batch.pop("row")
        loss: torch.Tensor = self.model(**batch).loss
        self.record.step(self.global_step + 1, rows.tolist(), loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=arguments.RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps, eta_min=1e-5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([example[name] for example in examples]) for name in ("row", "input_ids", "labels")}


def main() -> None:
    given = arguments.parse()
    lightning.seed_everything(given.seed)
    stream = load_dataset("json", data_files=str(given.text), split="train", streaming=True)
    # `map` first: a stream that is shuffled as read from the file resumes some 100 rows before where it was
    stream = stream.map(text.pair, remove_columns=["text"]).shuffle(seed=given.seed, buffer_size=arguments.BUFFER)
    loader = StatefulDataLoader(stream, batch_size=arguments.ROWS, collate_fn=collate)
    record = Record(given.folder)
    module = Module(record, given.steps)
    saving = ModelCheckpoint(given.folder / "checkpoints", every_n_train_steps=arguments.EVERY, save_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=given.steps,
        gradient_clip_val=1.0,
        callbacks=[saving],
        default_root_dir=given.folder,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, loader, ckpt_path="last")
    record.weights(module.state_dict())


if __name__ == "__main__":
    main()
