"""nanoT5's loop, on Accelerate, and the two ways to resume that Accelerate's documentation has.

The loop: PiotrNawrot/nanoT5 at 1375b389, nanoT5/utils/train_utils.py (`train`) and model_utils.py: a shuffled stream,
`set_epoch`, clipping, `save_state` into a folder named by the step. nanoT5 doesn't load what it saves. The resume is of
the page "Checkpointing" of Accelerate's documentation:

--way skip             `load_state`, the step from the folder's name, `skip_first_batches`
--way skip-no-dropout  the same for a model without dropout, which needs no random numbers: a control
--way stateful         `load_state` with `use_stateful_dataloader=True`, which restores the loader too
"""

import itertools
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import set_seed
from datasets import load_dataset
from kills import arguments, text
from kills.record import Record
from kills.t5 import new_t5
from torch.utils.data import DataLoader


def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([example[name] for example in examples]) for name in ("row", "input_ids", "labels")}


def newest(folder: Path) -> Path:
    return max(folder.glob("checkpoint-pt-*"), key=lambda path: int(path.name.rsplit("-", 1)[1]))


def main() -> None:
    given = arguments.parse()
    set_seed(given.seed)
    is_stateful = given.way == "stateful"
    loading = DataLoaderConfiguration(use_stateful_dataloader=is_stateful)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    stream = load_dataset("json", data_files=str(given.text), split="train", streaming=True)
    stream = stream.map(text.pair, remove_columns=["text"]).shuffle(buffer_size=arguments.BUFFER, seed=given.seed)
    model = new_t5(dropout=0.0) if given.way == "skip-no-dropout" else new_t5()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps, eta_min=1e-5)
    loader = DataLoader(stream, batch_size=arguments.ROWS, collate_fn=collate)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    record, done, skipped = Record(given.folder), 0, 0
    if given.resume:
        checkpoint = newest(given.folder)
        accelerator.load_state(str(checkpoint))
        done = int(checkpoint.name.rsplit("-", 1)[1])
        skipped = 0 if is_stateful else done
    model.train()
    for epoch in itertools.count(1):
        if done == given.steps:
            break
        stream.set_epoch(epoch)
        batches = skip_first_batches(loader, skipped) if skipped else loader
        skipped = 0
        for batch in batches:
            rows = batch.pop("row")
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1
            record.step(done, rows.tolist(), loss.item())
            if done % arguments.EVERY == 0:
                accelerator.save_state(output_dir=str(given.folder / f"checkpoint-pt-{done}"))
            if done == given.steps:
                break
    record.weights(accelerator.unwrap_model(model).state_dict())


if __name__ == "__main__":
    main()
