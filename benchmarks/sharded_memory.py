"""How much memory a rank needs to build a model under ZeRO-3, and to train one at each stage: measured and computed.

    python benchmarks/sharded_memory.py                   T5 3B built by 4 ranks; T5 v1.1 small trained by 2, in bf16
    python benchmarks/sharded_memory.py --train-only

Runs on CPU and measures the resident memory of each rank's process. The weights of 3B take 5.7 GB over all ranks.
"""

import argparse
import ctypes
import gc
import mmap
import multiprocessing as mp
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from data_pipeline.loading.batch_layout import BatchLayout
from pretrain import models
from pretrain.config import RunConfig
from pretrain.run.hardware import free_port
from pretrain.trainer.validate import ValidatedRun
from pretrain.zero.memory import give_back, peak_resident, resident

KINDS = ("weights", "masters", "moments", "gradients")  # bf16, fp32, fp32, fp32
ROOT = Path(__file__).parent.parent
LARGE, SMALL = (ROOT / f"configs/models/{name}.yaml" for name in ("t5-v1.0-3b", "t5-v1.1-small"))


def config_of(model: Path, stage: int, ranks: int) -> RunConfig:
    """The config of a run of `model` in bf16 without a corpus, with one row on each rank."""
    values = {
        **OmegaConf.to_container(OmegaConf.load(model)),  # type: ignore[dict-item]
        "run": {"name": "memory", "directory": "none", "max_steps": 1},
        "data": {"train": [{"corpus": "none"}]},
        "batch": {"global_batch_size": ranks},
        "optimizer": {"learning_rate": 1e-3},
        "deepspeed": {"zero_optimization": {"stage": stage}},
    }
    return RunConfig.model_validate(values)


def setup_of(model: Path, stage: int) -> ValidatedRun:
    config = config_of(model, stage, dist.get_world_size())
    return ValidatedRun(config, [], {}, config.model, BatchLayout(dist.get_rank(), dist.get_world_size(), 1, 1), None)


def built(model: Path) -> dict[str, float]:
    """The bytes that a rank needs to build `model` under ZeRO-3, beyond what its process held before."""
    from pretrain.zero.construction import construct

    setup, made = setup_of(model, 3), []
    dist.barrier()
    before = resident()
    peak = peak_resident(lambda: made.append(construct(setup.config, setup.model, setup.layout))) - before
    shapes = [parameter.numel() for parameter in models.outline(setup.model).parameters()]
    share = 2 * sum(shapes) / dist.get_world_size()
    # the largest parameter, whole: nn.Linear's in fp32, its bf16 copy, and the fp32 values drawn for it
    return {
        "parameters": sum(shapes),
        "peak": peak,
        "held": resident() - before,
        "share": share,
        "reckoned peak": share + (4 + 4 + 2) * max(shapes),
        "whole copy": 2 * sum(shapes),
    }


def trained(model: Path, stage: int) -> dict[str, float]:
    """The bytes of this rank after one step, by kind, beyond what its process held before."""
    from pretrain.zero.construction import construct
    from pretrain.zero.engine import Engine

    setup = setup_of(model, stage)
    before = resident()
    engine = Engine(construct(setup.config, setup.model, setup.layout), setup.config, setup.layout)
    ids = torch.randint(3, 30_000, (1, 128))

    def step() -> None:
        engine.step(0, 0, [{"encoder_input_ids": ids, "labels": ids[:, :32]}])

    peak = peak_resident(step) - before
    gc.collect()
    found = {"peak": peak, "resident": resident() - before, **_by_kind(engine)}
    give_back()
    found["freed"] = found["resident"] - (resident() - before)
    found["rest"] = found["resident"] - found["freed"] - sum(found[kind] for kind in KINDS)
    engine.close()
    return found


def _by_kind(engine: Any) -> dict[str, float]:
    """The resident bytes of all existing tensors; each storage counts once."""
    from pretrain.zero.deepspeed_private import fragments

    optimizer = engine.deepspeed.optimizer.optimizer
    kinds = {
        "weights": [getattr(p, "ds_tensor", p) for p in engine.deepspeed.module.parameters()],
        "masters": [one.flat for one in fragments(engine.deepspeed)],
        "moments": [value for slots in optimizer.state.values() for value in slots.values() if value.dim()],
        "gradients": [found for found in gc.get_objects() if isinstance(found, torch.Tensor)],  # and all other tensors
    }
    counted: set[int] = set()
    bytes_of: dict[str, float] = {}
    for kind, tensors in kinds.items():
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        bytes_of[kind] = sum(_in_memory(*storage) for storage in storages.items() if storage[0] not in counted)
        counted |= storages.keys()
    return bytes_of


def _in_memory(address: int, size: int) -> int:
    """The bytes of the pages that were ever touched and therefore are in memory (man mincore)."""
    page = mmap.PAGESIZE
    if size < page or not address:  # a meta tensor has no address
        return size if address else 0
    first = address // page * page
    pages = (ctypes.c_ubyte * -((first - address - size) // page))()
    if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(first), ctypes.c_size_t(len(pages) * page), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return min(size, sum(one & 1 for one in pages) * page)


def on_ranks(ranks: int, function: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """Runs `function` in `ranks` gloo processes; returns the maximum over the ranks for each key."""
    port = free_port()
    with ProcessPoolExecutor(ranks, mp.get_context("spawn")) as pool:  # breaks if a rank dies
        started = [pool.submit(_rank, rank, ranks, port, function, arguments) for rank in range(ranks)]
        found = [rank.result() for rank in started]
    return {key: max(one[key] for one in found) for key in found[0]}


def _rank(
    rank: int, ranks: int, port: int, function: Callable[..., dict[str, float]], arguments: tuple[Any, ...]
) -> dict[str, float]:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in own.items()} | {"MASTER_ADDR": "127.0.0.1"}
    import pretrain.zero.engine  # noqa: F401  keeps the memory of imports out of the measurement
    from pretrain.zero.ranks import process_group

    with process_group(cpu_threads=1, seconds=600):
        return function(*arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--model", type=Path, default=LARGE, help="the model to build")
    parser.add_argument("--ranks", type=int, default=4, help="how many ranks build it")
    options = parser.parse_args()
    if not options.train_only:
        found = on_ranks(options.ranks, built, options.model)
        print(f"{options.model.stem}, {found['parameters']:,.0f} parameters, built by {options.ranks} ranks, MB a rank")
        for key in ("held", "share", "peak", "reckoned peak", "whole copy"):
            print(f"  {key:14} {found[key] / 1e6:8,.0f}")
    parameters = models.outline(config_of(SMALL, 1, 1).model).num_parameters()
    # with 2 ranks a share is half: masters and moments at every stage, gradients from 2 on, weights at 3
    print(f"\n{SMALL.stem}, {parameters:,} parameters, after a step of 2 ranks, MB a rank; computed in brackets")
    print("stage" + "".join(f"{kind:>14}" for kind in KINDS) + "    freed    rest  resident    peak")
    for stage in (1, 2, 3):
        found = on_ranks(2, trained, SMALL, stage)
        reckoned = dict(zip(KINDS, (2 - (stage == 3), 2, 4, 4 if stage == 1 else 2), strict=True))  # bytes a parameter
        cells = "".join(f"{found[kind] / 1e6:8,.0f} ({of * parameters / 1e6:3,.0f})" for kind, of in reckoned.items())
        others = [found[key] / 1e6 for key in ("freed", "rest", "resident", "peak")]
        print(f"{stage:>5}{cells}" + "{:9,.0f}{:8,.0f}{:10,.0f}{:8,.0f}".format(*others), flush=True)


if __name__ == "__main__":
    main()
