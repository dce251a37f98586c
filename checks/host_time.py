"""How long the host takes for a training step of T5 v1.1 base, measured without a GPU.

    python -m checks.host_time

All layers and parameters, with widths so small that arithmetic takes no time, in the forms that a GPU takes: what is
left is Python, autograd and DeepSpeed, which a GPU waits for where its kernels are short. A kernel of this project is
one write in place of Triton's launch. A CUDA graph is what is left where the micro-batch itself costs nothing. Prints
the median milliseconds of processor time of a step with 1, 2 and 8 micro-batches.
"""

import csv
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.loading.prefetch import with_facts, with_target_indices
from pretrain.engine import graphs
from pretrain.engine.optimizers import flat_buffers
from pretrain.models import layers
from pretrain.models.functional.arithmetic import CrossEntropy, chunked_cross_entropy
from pretrain.models.functional.attention_backends import using
from pretrain.models.kernels import flash_operator
from pretrain.models.kernels.tiles import Tiles
from pretrain.models.model import Head
from tests.pretrain.rank_processes import on_ranks
from tests.pretrain.small_runs import engine_of, run_config

BASE = {"family": "t5", "vocab_size": 128, "feed_forward": "gated-gelu", "tie_embeddings": False, "dropout_rate": 0.0}
BASE |= {"num_encoder_layers": 12, "num_decoder_layers": 12, "d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 64}
COUNTS, STEPS = (1, 2, 8), 15
FORMS = {
    "stage 1, eager": (1, False),
    "stage 1, a CUDA graph": (1, True),
}


class Nothing(graphs.StaticTensors):
    """A replay takes no time."""

    def record(self, work: Callable[[], graphs.Sums]) -> Callable[[], graphs.Sums]:
        found = work()
        return lambda: found


def _launched(kernel: Any, _: bool, pointers: Any, *others: Any) -> None:
    """Writes what the kernel would; other results only pass from kernel to kernel."""
    for place in {"forward": [-2], "backward_queries": [-3], "backward_keys": [-2, -1]}[kernel.__name__]:
        pointers[place].zero_()


def _norm(x: Tensor, gains: Tensor, epsilon: float) -> Tensor:
    return F.layer_norm(x, gains.shape, gains, None, epsilon)  # one operation, as RMSNorm is on a GPU


def _losses(head: Head, x: Tensor, labels: Tensor, config: Any, target_indices: Tensor) -> Tensor:
    return chunked_cross_entropy(head.scaled(x), head.weight, None, labels, CrossEntropy(), target_indices)


def measured(stage: int, graph: bool) -> list[float]:
    """ms of a step for each of COUNTS."""
    config = run_config(stage, BASE, precision="bf16", compute={"cuda_graphs": graph})
    ids = torch.arange(8)[None] + 3
    batch = with_facts(with_target_indices({"encoder_input_ids": ids, "labels": ids}))
    found = []
    forms = {
        (flash_operator, "_launch"): _launched,
        (flash_operator, "tile_sizes"): lambda *_: Tiles(64, 64, 4, 2),
        (flat_buffers, "IN_PARTS"): frozenset(),
        (graphs, "StaticTensors"): Nothing,
        (layers, "fusing_is_faster"): lambda _: True,
        (layers.RMSNormInCache, "apply"): _norm,
        (Head, "forward"): _losses,
    }
    for (place, name), form in forms.items():
        patch.object(place, name, form).start()  # in a process of its own
    with using("triton"):
        for count in COUNTS:
            told: list[str] = []
            engine, taken = engine_of(config, told.append), list[float]()
            for step in range(STEPS):
                began = time.process_time()
                engine.step(step, range(count), [dict(batch) for _ in range(count)])
                taken.append(time.process_time() - began)
                assert engine.applied
            assert not told
            engine.close()
            found.append(1e3 * statistics.median(taken[len(taken) // 3 :]))
    return found


def main() -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["step", *(f"ms, {count} micro-batch{'es' * (count > 1)}" for count in COUNTS)])
    for name, form in FORMS.items():
        (found,) = on_ranks(1, measured, *form)
        writer.writerow([name, *(f"{ms:.1f}" for ms in found)])


if __name__ == "__main__":
    main()
