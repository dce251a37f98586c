"""transformers' Trainer with a streamed dataset.

Checkpoints, `resume_from_checkpoint=True` and the loss by a subclass: the page "Trainer" of its documentation.
By the default of `ignore_data_skip`, a resumed run reads the rows that it has trained on, and skips them (docstring of
TrainingArguments). The stream: the page "Stream" of datasets' documentation.
"""

from typing import Any

import torch
from datasets import load_dataset
from kills import arguments, text
from kills.record import Record
from kills.t5 import new_t5
from transformers import Trainer, TrainingArguments, set_seed


class RecordingTrainer(Trainer):
    def __init__(self, record: Record, **settings: Any):
        super().__init__(**settings)
        self.record = record

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], **settings: Any) -> torch.Tensor:
        rows = inputs.pop("row")
        loss = super().compute_loss(model, inputs, **settings)
        self.record.step(self.state.global_step + 1, rows.tolist(), loss.item())
        return loss


def main() -> None:
    given = arguments.parse()
    set_seed(given.seed)
    stream = load_dataset("json", data_files=str(given.text), split="train", streaming=True)
    stream = stream.shuffle(seed=given.seed, buffer_size=arguments.BUFFER).map(text.pair, remove_columns=["text"])
    model = new_t5()
    settings = TrainingArguments(
        output_dir=str(given.folder / "checkpoints"),
        max_steps=given.steps,
        per_device_train_batch_size=arguments.ROWS,
        learning_rate=arguments.RATE,
        save_steps=arguments.EVERY,
        save_total_limit=2,
        seed=given.seed,
        use_cpu=True,
        remove_unused_columns=False,  # "row" isn't an argument of the model
        report_to="none",
        disable_tqdm=True,
    )
    record = Record(given.folder)
    trainer = RecordingTrainer(record, model=model, args=settings, train_dataset=stream)
    trainer.train(resume_from_checkpoint=True if given.resume else None)
    record.weights(model.state_dict())


if __name__ == "__main__":
    main()
