"""In a training step the host waits for a GPU once, for the norm of the gradient.

A CPU plays the GPU: the test follows which tensors the host holds and which would be on the GPU.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from data_pipeline.loading.batches import Batch
from data_pipeline.loading.prefetch import with_target_indices
from pretrain.models import model as model_module
from pretrain.optimizers import flat_buffers
from tests.pretrain.rank_processes import each, on_ranks
from tests.pretrain.small_families import FAMILIES
from tests.pretrain.small_runs import T5, engine_of, micro_batches, own_layout, run_config
from tests.slow import slow

GPU = torch.device("cpu")  # plays one; the host is called "cpu"
READ = {"item", "tolist", "numpy", "nonzero", "masked_select", "equal", "allclose", "is_nonzero", "unique"}
READ |= {"__bool__", "__int__", "__float__", "__index__", "__contains__"}
MADE_OF_VALUES = {"tensor", "as_tensor", "new_tensor"}


class Waits(TorchFunctionMode):
    """Within the block, notes in `places` where the host would wait for the GPU, as "function in file.py".

    A tensor is on the GPU unless it was made without a device, was read from there, or comes only from such tensors.
    Waits are reading, taking what a mask chooses, copying without `non_blocking`, and checks of operations' arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        name, given = function.__name__, [one for one in tree_leaves((args, options)) if isinstance(one, Tensor)]
        result = function(*args, **options)
        hosts = all(_on_host(one) for one in given)
        to_host = name == "cpu" or (name == "to" and "cpu" in args)
        to_gpu = (name == "to" and GPU in args) or (options.get("device") is not None and hosts)
        if _waits(name, args, options, hosts, to_host, to_gpu):
            self.places.append(_place())
        if to_host or (hosts and not to_gpu):
            result = result.clone() if to_host else result
            for one in tree_leaves(result):
                if isinstance(one, Tensor):
                    one._on_host = True
        elif to_gpu and given:
            result = result.clone()
        return result


def _on_host(tensor: Tensor) -> bool:
    return getattr(tensor, "_on_host", False)


def _waits(name: str, args: Any, options: dict[str, Any], hosts: bool, to_host: bool, to_gpu: bool) -> bool:
    if to_gpu:
        return ((hosts and name == "to") or name in MADE_OF_VALUES) and not options.get("non_blocking")
    if hosts:
        return False
    if name == "new_tensor":
        return True
    if name == "repeat_interleave":
        return options.get("output_size") is None and isinstance(args[1], Tensor)
    if name == "segment_reduce":
        return not options.get("unsafe")
    if name == "__getitem__":
        return any(isinstance(one, Tensor) and one.dtype == torch.bool for one in tree_leaves(args[1]))
    if name == "copy_":
        return _on_host(args[0]) != _on_host(args[1]) and not options.get("non_blocking")
    return (name in READ or to_host) and not options.get("non_blocking")


def _place() -> str:
    """The innermost function outside of PyTorch and of this file."""
    frame: Any = sys._getframe(2)
    while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_name} in {Path(frame.f_code.co_filename).name}"


ALIBI = {"family": "decoder_only", "d_model": 64, "d_ff": 128, "num_heads": 4, "num_layers": 2, "positions": "alibi"}
MODELS = {**FAMILIES, "t5": {**T5, "dropout_rate": 0.1}, "alibi": ALIBI}
CASES = [
    *(("t5", optimizer, stage) for optimizer in ("adafactor", "muon") for stage in (1, 2)),
    ("t5", "adamw_scale", 2),
    *((name, "adamw", 2) for name in ("autoregressive", "double_decoder", "bart", "alibi")),
]
OTHERS = [(name, "adamw", 2) for name in MODELS if (name, "adamw", 2) not in CASES]


@pytest.mark.parametrize("cases", [CASES, *slow(OTHERS)])
def test_a_step_waits_for_the_norm_alone(cases):
    for case, found in zip(cases, on_ranks(1, each, _waits_of_a_step, cases)[0], strict=True):
        norm = "_norm_of_tensors" if case[-1] == 1 else "_norm"
        assert found == [f"{norm} in deepspeed_private.py"], case


def _waits_of_a_step(name: str, optimizer: str, stage: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_buffers, "IN_PARTS", frozenset())  # as on a GPU
        patch.setattr(model_module, "_indices_worth_selecting", lambda labels: None)
        settings = {"name": optimizer, "learning_rate": 1e-2, "gradient_clipping": 0.01}
        config = run_config(stage, {"vocab_size": 100, **MODELS[name]}, optimizer=settings, precision="bf16")
        engine = engine_of(config)
        for step in range(3):
            batches = [with_target_indices(packed(batch)) for batch in micro_batches(own_layout(), step, 16, 16)]
            with Waits() as found:
                engine.step(step, 8 * step, batches, (False, True))
        assert engine.applied
        assert engine.gradient_norm > 0.01  # so it was clipped
        engine.close()
    return found.places


def packed(batch: Batch) -> Batch:
    """Each row as one packed example."""
    segments = torch.ones_like(batch["labels"])
    sides = {"encoder_segment_ids": segments, "decoder_segment_ids": segments}
    positions = segments.cumsum(1) - 1
    return {**batch, **sides, "encoder_positions": positions, "decoder_positions": positions}
