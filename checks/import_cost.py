"""What an import costs: memory and seconds for each format of weights.

    python -m checks.import_cost FOLDER > docs/results/models/import-cost.csv

In FOLDER, this writes a T5 v1.1 of random weights, of 1 GB in fp32, in each format, imports each in a process of its
own, and prints its private memory beyond an import of a small model, in sizes of the file, the processor's seconds and
the seconds by the clock for a GB of the file. A file that is mapped takes page cache, which the system takes back when
it needs memory, so private memory alone is counted. It is read from /proc every 5 ms.
"""

import csv
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

State = dict[str, Tensor]
LARGE = {"d_model": 1024, "d_ff": 2816, "num_heads": 16, "d_kv": 64, "num_layers": 6, "num_decoder_layers": 6}
SMALL = {"d_model": 16, "d_ff": 16, "num_heads": 2, "d_kv": 8, "num_layers": 1, "num_decoder_layers": 1}
VOCABULARY = 32_128


def write_safetensors(state: State, folder: Path) -> None:
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def write_bin(state: State, folder: Path) -> None:
    torch.save(state, folder / "pytorch_model.bin")


def write_old_bin(state: State, folder: Path) -> None:
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def write_msgpack(state: State, folder: Path) -> None:
    """As Flax wrote T5: a tree of arrays, in which matrices but the embedding are the transposes."""
    with (folder / "flax_model.msgpack").open("wb") as file:
        tree: dict = {}
        for name, tensor in state.items():
            *above, layer, _ = name.split(".")
            place = tree
            for part in above:
                place = place.setdefault(part, {})
            kind = "scale" if tensor.dim() == 1 else "embedding" if "shared" in name or "bias" in layer else "kernel"
            place[layer] = {kind: tensor.T if kind == "kernel" else tensor}
        _write_value(tree, file)


def _write_value(value: dict | Tensor, file) -> None:
    def head(code: int, size: int) -> bytes:
        return bytes([code]) + size.to_bytes(4, "big")

    def text(given: str) -> bytes:
        return head(0xDB, len(given)) + given.encode()

    if isinstance(value, dict):
        file.write(head(0xDF, len(value)))
        for key, one in value.items():
            file.write(text(key))
            _write_value(one, file)
        return
    bits = value.contiguous()
    content = bits.view(torch.int16).numpy() if value.dtype == torch.bfloat16 else bits.numpy()
    shape = b"".join(head(0xCE, length) for length in value.shape)
    kind = str(value.dtype).removeprefix("torch.")
    before = b"\x93" + head(0xDD, value.dim()) + shape + text(kind) + head(0xC6, content.nbytes)
    file.write(head(0xC9, len(before) + content.nbytes) + b"\x01" + before)
    file.write(np.ascontiguousarray(content).data)


FORMATS: list[tuple[str, torch.dtype, Callable[[State, Path], None]]] = [
    ("`model.safetensors`", torch.float32, write_safetensors),
    ("`model.safetensors` in bf16", torch.bfloat16, write_safetensors),
    ("`pytorch_model.bin` of torch 1.6 and later", torch.float32, write_bin),
    ("`pytorch_model.bin` in bf16", torch.bfloat16, write_bin),
    ("`pytorch_model.bin`, older", torch.float32, write_old_bin),
    ("`flax_model.msgpack`", torch.float32, write_msgpack),
    ("`flax_model.msgpack` in bf16", torch.bfloat16, write_msgpack),
]


def model(sizes: dict, folder: Path) -> State:
    """Writes config.json and ByT5's tokenizer; returns weights under transformers' names."""
    import transformers  # seconds

    folder.mkdir(parents=True)
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        **sizes,
    )
    with torch.device("meta"):
        made = transformers.T5ForConditionalGeneration(config)
    config.save_pretrained(folder)
    transformers.ByT5Tokenizer(extra_ids=100).save_pretrained(folder)
    shapes = {name: one.shape for name, one in made.named_parameters()}
    return {name: 0.05 * torch.randn(shape) for name, shape in shapes.items()}


def cost(folder: Path) -> dict[str, float]:
    """Imports the model in `folder` in a new process: its private memory at most, in bytes, and seconds."""
    out = folder.with_name("imported")
    shutil.rmtree(out, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-m", "checks.import_cost", "--import", str(folder), str(out)],
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def import_here(folder: Path, out: Path) -> None:
    """Imports, and prints the cost as JSON. Modules are loaded before, so that their time isn't counted."""
    import transformers.models.t5.modeling_t5  # noqa: F401  seconds

    from pretrain.export import import_

    most, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.005):
            found = Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]
            most = max(most, int(found) * 1024)

    watcher = threading.Thread(target=watch)
    watcher.start()
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    import_(folder, out)
    after, seconds = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - started
    ended.set()
    watcher.join()
    processor = sum(getattr(after, key) - getattr(before, key) for key in ("ru_utime", "ru_stime"))
    print(json.dumps({"private": most, "processor": processor, "seconds": seconds}))


def main(folder: Path) -> None:
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(("file", "size, GB", "private memory, of the file's size", "CPU time, s/GB", "time, s/GB"))
    folder.mkdir(parents=True, exist_ok=True)
    small = folder / "small"
    shutil.rmtree(small, ignore_errors=True)
    write_safetensors(model(SMALL, small), small)
    least = cost(small)["private"]
    for name, dtype, write in FORMATS:
        place = folder / "large"
        shutil.rmtree(place, ignore_errors=True)
        torch.manual_seed(0)
        write({key: one.to(dtype) for key, one in model(LARGE, place).items()}, place)
        (file,) = (path for path in place.iterdir() if path.suffix in (".safetensors", ".bin", ".msgpack"))
        size = file.stat().st_size
        os.sync()
        found = cost(place)
        gigabytes = size / 1e9
        seconds = (f"{found[key] / gigabytes:.1f}" for key in ("processor", "seconds"))
        table.writerow((name, f"{gigabytes:.2f}", f"{max(0, found['private'] - least) / size:.2f}", *seconds))
        sys.stdout.flush()
    shutil.rmtree(folder)


if __name__ == "__main__":
    if sys.argv[1] == "--import":
        import_here(*map(Path, sys.argv[2:]))
    else:
        main(Path(sys.argv[1]).absolute())
