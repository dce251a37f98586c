"""How often the engine and the optimizers touch memory, launch operations and wait, besides the model's own work."""

import argparse
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.batches import Batch
from data_pipeline.loading.prefetch import COUNTS, count_of, with_counts, with_target_indices
from pretrain import models
from pretrain.engine import optimizers
from pretrain.engine.construction import deepspeed_config
from pretrain.engine.optimizers import flat_buffers
from pretrain.engine.sharding import Sharding
from pretrain.models import model as model_module
from tests.conftest import TOP
from tests.support import tables
from tests.support.rank_processes import each, on_ranks
from tests.support.slow import slow
from tests.support.small_families import FAMILIES
from tests.support.small_runs import T5, engine_of, micro_batches, own_layout, row_offsets, run_config

WIDE = {"vocab_size": 4096, "d_model": 256, "d_ff": 512, "d_kv": 64, "num_heads": 4}


class Moved(TorchDispatchMode):
    """Counts operations that aren't views, and the bytes of the tensors that they read and return. A copy of a tensor
    to itself, which PyTorch skips, isn't counted."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.copy_.default and args[0].data_ptr() == args[1].data_ptr():
            return result
        if not function.is_view and not function.__name__.startswith(("detach", "empty", "set_", "record_stream")):
            self.operations += 1
            found = tree_leaves((args, kwargs, result))
            self.bytes += sum(one.nbytes for one in found if isinstance(one, Tensor))
        return result


@pytest.mark.parametrize("precision", ["bf16", *slow("fp32")])
def test_the_engine_touches_each_gradient_a_few_times(precision):
    """By the bytes of fp32 gradients: to copy one into the flat buffer counts thrice (2.5 times in bf16), to measure it
    once, to clip it twice, to copy the new weights twice. Another micro-batch's gradient is added: thrice. The
    optimizer isn't counted. DeepSpeed alone comes to 15 to 30 of these passes.
    """
    first, more = on_ranks(1, _passes, precision)[0]
    assert first < {"fp32": 8.1, "bf16": 7.8}[precision]
    assert more < {"fp32": 3.1, "bf16": 2.7}[precision]


def _passes(precision: str) -> tuple[float, float]:
    """Of a step with one micro-batch, and of another micro-batch."""
    found = []
    for count in (1, 2):
        config = run_config(1, WIDE, precision=precision, optimizer={"name": "adamw", "learning_rate": 1e-3})
        engine = engine_of(config)
        batch = micro_batches(own_layout(), 0)[0]
        inner, model, counted = engine.deepspeed.optimizer.optimizer, models.build(config.model), Moved()
        size = sum(parameter.numel() for parameter in model.parameters())
        model.to(torch.bfloat16 if precision == "bf16" else torch.float32)
        step_alone = inner.step

        def uncounted(*arguments: Any, step: Any = step_alone, counted: Moved = counted) -> Any:
            before = counted.bytes
            result = step(*arguments)
            counted.bytes = before
            return result

        inner.step = uncounted
        for step in range(2):
            counted.bytes = 0
            with counted:
                engine.step(step, range(count), [batch] * count)
        whole = counted.bytes
        counted.bytes = 0
        with counted:
            torch.autograd.grad(model(**batch)["labels"].sum(), list(model.parameters()))
        found.append((whole - count * counted.bytes) / (4 * size))
        engine.close()
    return found[0], found[1] - found[0]


def test_on_one_rank_no_hook_fetches_weights():
    """Also at stage 3."""
    cases = [(stage, precision) for stage in (1, 3) for precision in ("fp32", "bf16")]
    assert on_ranks(1, each, _hooks_inside, cases)[0] == [0] * len(cases)


def _hooks_inside(stage: int, precision: str) -> int:
    engine = engine_of(run_config(stage, precision=precision))
    layout = own_layout()
    engine.step(0, row_offsets(layout, 0), micro_batches(layout, 0))
    inside = list(engine.module.modules())[1:]  # DeepSpeed has two on the model itself
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in inside)
    engine.close()
    return hooks


class Layers(nn.Module):
    """Twelve layers of a Transformer's shapes, and embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 128)
        for layer in range(12):
            for name in "qkvo":
                self.add_module(f"{name}{layer}", nn.Linear(128, 128, bias=False))
            self.add_module(f"wi{layer}", nn.Linear(128, 256, bias=False))
            self.add_module(f"wo{layer}", nn.Linear(256, 128, bias=False))


@pytest.fixture
def benchmark(monkeypatch) -> ModuleType:
    """benchmarks/optimizers.py, which gives optimizers flat tensors as ZeRO does."""
    monkeypatch.syspath_prepend(str(TOP / "benchmarks"))
    return import_module("optimizers")


def stepped(name: str, flattened: Callable[[Any], Any]) -> tuple[Tensor, int]:
    """The parameters after three steps of what `flattened` makes of the optimizer, and the operations of the last."""
    torch.manual_seed(0)
    settings = {"name": name, "learning_rate": 1e-2, "weight_decay": 0.1}
    settings |= {"newton_schulz_dtype": "fp32"} if name == "muon" else {}
    model = Layers()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = flattened(optimizers.build(model, run_config(optimizer=settings).optimizer))
    for _ in range(3):
        counted = Moved()
        with counted:
            optimizer.step()
    found = [parameter.detach().flatten() for group in optimizer.param_groups for parameter in group["params"]]
    return torch.cat(found), counted.operations


@tables.each("name, most", [("adamw_scale", 40), ("adafactor", 150), ("muon", 120)])
def test_optimizers_take_whole_flat_buffers_in_few_operations(name, most, benchmark, monkeypatch):
    """73 matrices of four shapes; one tensor at a time, Adafactor would take a thousand. The steps are the same."""
    plain, _ = stepped(name, lambda optimizer: optimizer)
    in_parts, _ = stepped(name, benchmark.flattened)
    monkeypatch.setattr(flat_buffers, "IN_PARTS", frozenset())
    fused_update, operations = stepped(name, benchmark.flattened)
    assert operations <= most
    for found in (in_parts, fused_update):
        assert (found - plain).norm() / plain.norm() < 1e-5


def test_the_benchmark_measures_every_optimizer(benchmark, monkeypatch):
    harness = import_module("harness")
    monkeypatch.setattr(benchmark, "our_model", lambda *_: models.build(run_config().model))
    monkeypatch.setattr(harness, "cpu_multiplies_bf16", lambda: True)  # else Muon is left out
    (table,) = benchmark.measure(harness.Options((1,), ("fp32",), 0.0, argparse.Namespace()))
    assert [row[0] for row in table.rows] == list(benchmark.PEERS)


def test_one_rank_shards_nothing_unless_it_offloads():
    def chosen(stage: int, ranks: int, **zero: Any) -> int:
        config = run_config(stage, zero=zero)
        return deepspeed_config(config, Sharding.of(config, ranks))["zero_optimization"]["stage"]

    offload = {"device": "cpu"}
    assert [chosen(stage, 1) for stage in (1, 2, 3)] == [2, 2, 2]
    assert chosen(3, 1, offload_optimizer=offload) == chosen(3, 1, offload_param=offload) == chosen(3, 2) == 3


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


@tables.each(
    "ranks, stage, precision, zero, runs, reason",
    [
        (8, 1, "bf16", {}, 1, ""),
        (8, 2, "fp32", {}, 1, "in fp32 each rank has whole gradients"),
        (8, 2, "bf16", {}, 2, ""),
        (8, 3, "fp32", {}, 3, ""),
        (1, 1, "bf16", {}, 1, ""),
        (1, 3, "bf16", {}, 1, "one rank has nothing to shard"),
        (1, 1, "bf16", OFFLOADED, 2, "DeepSpeed reduces the gradients of an offloaded optimizer"),
        (1, 3, "bf16", OFFLOADED, 3, ""),
    ],
)
def test_the_stage_that_runs(ranks, stage, precision, zero, runs, reason):
    """At stage 1 each rank adds up gradients; else DeepSpeed does."""
    config = run_config(precision=precision, deepspeed={"zero_optimization": {"stage": stage, **zero}})
    sharding = Sharding.of(config, ranks)
    assert (sharding.stage, sharding.local) == (runs, runs == 1)
    assert sharding.reason.startswith(reason)
    assert bool(sharding.reason) is bool(reason)


def test_deepspeed_starts_no_programs_in_a_step(monkeypatch):
    from deepspeed.accelerator import get_accelerator

    from pretrain.run.rank_environment import be_the_only_rank

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that they are as before after this test
        monkeypatch.delenv(name)
    monkeypatch.setattr(subprocess, "Popen", None)
    be_the_only_rank()
    assert get_accelerator().device_count() == 1


def test_an_update_waits_for_the_copy_that_a_checkpoint_is_written_from():
    """Also: the next copy goes to the same memory, and timers that wait for the device are off."""
    waited, seconds, *others = on_ranks(1, _update_during_a_copy)[0]
    assert (waited, seconds > 0, *others) == (True, True, True, True, False)


def _update_during_a_copy() -> tuple[bool, float, bool, bool, bool]:
    """The copy is finished once an update waits for it, or after the update if that doesn't."""
    from pretrain.engine.checkpoint.engine_state import PinnedStaging
    from pretrain.engine.deepspeed_private import wrapped

    layout, engine = own_layout(), engine_of(run_config(2))
    engine.step(0, row_offsets(layout, 0), micro_batches(layout, 0))
    copies = PinnedStaging(engine)
    copy = copies.take()
    state = wrapped(engine.deepspeed).state
    expected = torch.cat([slots["exp_avg"].clone() for slots in state.values()])

    asked = threading.Event()

    class Done(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            asked.set()
            return super().wait(timeout)

    def finish_when_asked() -> None:
        asked.wait()
        copy.finish()

    copy._done = Done()
    late = threading.Thread(target=finish_when_asked)
    late.start()
    engine.step(1, row_offsets(layout, 1), micro_batches(layout, 1), before_update=copies.wait)
    waited = asked.is_set()
    asked.set()
    late.join()
    found = torch.cat([tensor for name, tensor in copy.tensors.items() if name.startswith("exp_avg/")])
    same = torch.equal(found[found != 0].sort().values, expected[expected != 0].sort().values)  # but for padding
    addresses = {name: tensor.data_ptr() for name, tensor in copy.tensors.items()}
    second = copies.take()
    again = {name: tensor.data_ptr() for name, tensor in second.tensors.items()} == addresses
    second.finish()
    return waited, copy.seconds, same, again, engine.deepspeed.tput_timer.config.enabled


# In a step the host waits for a GPU once, for the norm of the gradient. A CPU plays the GPU: the test follows which
# tensors the host holds and which would be on the GPU.


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
    *(("t5", optimizer) for optimizer in ("adafactor", "muon", "adamw_scale")),
    *((name, "adamw") for name in ("autoregressive", "double_decoder", "bart", "alibi")),
]
OTHERS = [(name, "adamw") for name in MODELS if (name, "adamw") not in CASES]


@pytest.mark.parametrize("cases", [CASES, *slow(OTHERS)])
def test_a_step_waits_for_the_norm_alone(cases):
    for case, found in zip(cases, on_ranks(1, each, _waits_of_a_step, cases)[0], strict=True):
        assert found == ["update in gradients.py"], case


class Reads(TorchDispatchMode):
    """Counts operations, and notes whether one gets a tensor of `batches` that isn't a count of them."""

    def __init__(self, batches: list[Batch]):
        super().__init__()
        self._kept = {id(one) for batch in batches for name, one in batch.items() if name not in COUNTS}
        self.operations, self.reads = 0, False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        self.reads |= any(id(one) in self._kept for one in tree_leaves((args, kwargs)))
        return function(*args, **(kwargs or {}))


def test_counts_of_a_step_are_those_that_the_loader_has_made(one_rank):
    """20 launches a micro-batch for labels and tokens would be made on a GPU: `_agreed` makes some for a step, and
    what speed is computed from none."""
    from pretrain.engine.engine import Engine

    engine: Any = SimpleNamespace(device=torch.device("cpu"))
    found = []
    for count in (2, 8):
        rows = [packed(micro_batches(BatchLayout(0, 1, 2, 1), number, 16, 16)[0]) for number in range(count)]
        batches = [with_counts(batch) for batch in rows]
        with Reads(batches) as reads:
            labels = Engine._agreed(engine, batches, {"stop": True})["labels"]["labels"]
            sizes = [count_of("example_sizes", batch) for batch in batches]
        assert int(labels) == sum(int((batch["labels"] != -100).sum()) for batch in rows)
        assert [int(one[0]) for one in sizes] == [2 * 16] * count  # input tokens
        assert not reads.reads
        found.append(reads.operations)
    assert found[0] == found[1] < 20


def _waits_of_a_step(name: str, optimizer: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_buffers, "IN_PARTS", frozenset())  # as on a GPU
        patch.setattr(model_module, "_indices_worth_selecting", lambda labels: None)
        settings = {"name": optimizer, "learning_rate": 1e-2, "gradient_clipping": 0.01}
        engine = engine_of(run_config(1, {"vocab_size": 100, **MODELS[name]}, optimizer=settings, precision="bf16"))
        for step in range(3):
            rows = [with_target_indices(packed(batch)) for batch in micro_batches(own_layout(), step, 16, 16)]
            batches = [with_counts(batch) for batch in rows]
            with Waits() as found:
                engine.step(step, row_offsets(own_layout(), step), batches, {"stop": False, "save": True})
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
