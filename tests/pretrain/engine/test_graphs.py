"""Micro-batches as CUDA graphs. On a CPU what a graph would replay runs on tensors that stay where they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data_pipeline.loading.batch_layout import IGNORE_INDEX, BatchLayout
from data_pipeline.loading.batches import in_few_widths
from data_pipeline.loading.prefetch import with_target_indices
from pretrain.engine.graphs import MOST, WARM_UPS, GraphedMicroBatches, StaticTensors, Sums, graphed
from pretrain.engine.sharding import Sharding
from pretrain.models import build, meta_model, parse
from pretrain.models.functional.arithmetic import CrossEntropy, chunked_cross_entropy
from pretrain.models.functional.attention_backends import Backend, using
from pretrain.models.model import Head
from tests.support.rank_processes import each, on_ranks
from tests.support.slow import slow, soak
from tests.support.small_families import FAMILIES
from tests.support.small_models import MODELS, ONE_OF_EACH_FAMILY
from tests.support.small_runs import T5, engine_of, micro_batches, own_layout, own_sharding, row_offsets, run_config
from tests.support.tables import each as of_each

STEPS, ROWS = 8, 8  # each form comes twice to warm up, and then twice or more
MEASURED, SKIPPED = 3, 5  # steps
DROPOUT = {"dropout_rate": 0.1}
SMALL = {**T5, **DROPOUT}


def trained(graphs: bool, widths: int, stage: int, model: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The outcomes and gradient norms of the steps, the activations of the one that is measured, the weights and states
    at the end, what was told, and how many graphs there are. `widths`: how many the rows come in."""
    from diagnostics.step_norms import StepNorms

    from pretrain.engine.construction import construct
    from pretrain.engine.deepspeed_private import flat_buffers, wrapped
    from pretrain.engine.engine import Engine

    config = run_config(stage, model, compute={"cuda_graphs": graphs}, **changes)
    told: list[str] = []
    sharding = own_sharding(config)
    engine = Engine.initialize(construct(config, config.model, sharding), config, sharding, warn=told.append)
    kept = kept_nodes(engine.module)
    layout, weights = own_layout(ROWS // dist.get_world_size() // 2), [*engine.module.parameters()]
    outcomes, measured = [], torch.empty(0)
    for step in range(STEPS):
        length = 16 + step % widths
        batches, before = micro_batches(layout, step, length, length), [one.detach().clone() for one in weights]
        if step == MEASURED:
            norms = StepNorms(engine)
            with norms.measuring():
                outcome = engine.step(step, row_offsets(layout, step), batches)
            measured = norms.activations
        elif step == SKIPPED:
            for one in weights:
                one.data.view(-1)[0] = torch.nan
            outcome = engine.step(step, row_offsets(layout, step), batches)
            for one, value in zip(weights, before, strict=True):
                one.data.copy_(value)
        else:
            outcome = engine.step(step, row_offsets(layout, step), batches)
        outcomes.append((str(outcome), engine.gradient_norm))
    moments = [value for one in wrapped(engine.deepspeed).state.values() for value in one.values()]
    left = [torch.as_tensor(one) for one in (*(one.tensor for one in flat_buffers(engine.deepspeed)), *moments)]
    graphs_made = len(engine._graphs._captured) if engine._graphs else 0
    engine.close()
    return {
        "outcomes": outcomes,
        "tensors": [one.detach().clone() for one in (measured, *left, *weights)],
        "told": told,
        "graphs": graphs_made,
        "kept": kept,
    }


def kept_nodes(module: nn.Module) -> int:
    """For how many parameters something keeps the node at which autograd adds their gradients up.

    A node belongs to the stream on which it was made. A capture fails where another stream would have to wait for it.
    """

    def node(parameter: Tensor) -> Any:
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]

    for one in module.parameters():
        node(one).metadata["kept"] = True
    return sum("kept" in node(one).metadata for one in module.parameters())


def compared(*settings: Any) -> dict[str, Any]:
    """Whether training with graphs is training without, to the bit; what was told, and how many graphs there are."""
    plain, graphed = (trained(graphs, *settings) for graphs in (False, True))
    alike = [torch.equal(one, other) for one, other in zip(plain["tensors"], graphed["tensors"], strict=True)]
    return {
        "equal": all(alike) and plain["outcomes"] == graphed["outcomes"],
        "skipped": ["applied=False" in outcome for outcome, _ in graphed["outcomes"]],
        "told": graphed["told"],
        "graphs": graphed["graphs"],
        "kept": graphed["kept"],
    }


OF_FAMILIES: dict[str, tuple[Any, ...]] = {
    name: (1, 1, {"vocab_size": 100, **model, **DROPOUT}, {}) for name, model in FAMILIES.items()
}
QUICK = [OF_FAMILIES.pop(name) for name in ("t5", "encoder_only", "double_decoder")]
ON_HOST = (
    "compute.cuda_graphs: the model draws numbers on the host for each step; micro-batches run without CUDA graphs"
)
OF_OPTIMIZERS = [
    (1, stage, SMALL, {"optimizer": {"name": name, "learning_rate": 1e-2, "gradient_clipping": 0.1}, "precision": bits})
    for name, stage, bits in (
        ("adamw", 1, "bf16"), ("adamw_scale", 2, "fp32"), ("adafactor", 1, "fp32"), ("muon", 2, "bf16")
    )
]  # fmt: skip
ON_RANKS = [(1, 1, SMALL, {"precision": "bf16"}), (1, 2, SMALL, {})]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(1, [*QUICK, *OF_OPTIMIZERS]), (2, ON_RANKS), *slow((1, [*OF_FAMILIES.values()])), *soak((4, ON_RANKS))],
)
def test_graphs_change_no_bit(ranks, cases):
    """Of losses, norms, weights and moments: with dropout and padding, two micro-batches a step, one step measured and
    one skipped."""
    for of_rank in on_ranks(ranks, each, compared, cases):
        for case, found in zip(cases, of_rank, strict=True):
            draws = case[2]["family"] == "double_decoder"
            assert found["skipped"] == [step == SKIPPED for step in range(STEPS)], case
            assert found["equal"], case
            assert found["told"] == ([ON_HOST] if draws else []), case
            assert found["graphs"] == (0 if draws else 4), case  # the first of a step or not, with padding or without
            assert found["kept"] == 0, case


class Recorder(StaticTensors):
    """Notes what it is asked for. `fails` at this capture, counted from 1."""

    def __init__(self, fails: int = 0):
        self.asked, self.fails, self.captures = list[str](), fails, 0

    def warm_up(self, work: Callable[[], Sums]) -> Sums:
        self.asked.append("warm up")
        return work()

    def record(self, work: Callable[[], Sums]) -> Callable[[], Sums]:
        self.asked.append("capture")
        self.captures += 1
        if self.captures == self.fails:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

        def replay() -> Sums:
            self.asked.append("replay")
            return work()

        return replay

    def finish(self) -> None:
        self.asked.append("finish")


class Bodies:
    """Micro-batches of one row of zeros, of given widths; their graphs, and the widths of those that had none."""

    def __init__(self, recorder: Recorder, memory_for: int = 100):
        self.recorder, self.told, self.ran, self.memory_for = recorder, list[str](), list[int](), memory_for
        self.module = nn.Linear(1, 1)
        self.graphs = GraphedMicroBatches(self.body, self.module, recorder, self.told.append)

    def body(self, batch: dict[str, Tensor], counted: dict[str, Tensor], first: bool, last: bool) -> Sums:
        width = batch["labels"].size(1)
        self.ran.append(width)
        if self.ran.count(width) == self.memory_for:
            raise torch.OutOfMemoryError("out of memory")
        return {"labels": batch["labels"].sum() + counted["labels"] + torch.rand(())}

    def run(self, *widths: int, first: bool = True) -> list[str]:
        """What the recorder was asked for, and "body" where it wasn't."""
        asked = self.recorder.asked
        for number, width in enumerate(widths):
            torch.manual_seed(7)
            before = len(asked)
            batch, counted = {"labels": torch.full((1, width), number)}, {"labels": torch.tensor(number)}
            expected = number * width + number + torch.rand((), generator=torch.Generator().manual_seed(7))
            assert self.graphs(batch, counted, first, False)["labels"] == expected
            if len(asked) == before:
                asked.append("body")
        found, asked[:] = asked[:], []
        return found


WARM = ["warm up"] * WARM_UPS
CAPTURED = [*WARM, "capture", "replay"]
LINE = "compute.cuda_graphs: {}; {} run without CUDA graphs"
SHAPES = LINE.format(f"micro-batches come in more than {MOST} shapes", "others")


def test_a_form_is_warmed_up_then_captured_and_replayed_with_new_inputs():
    bodies = Bodies(Recorder())
    assert bodies.run(*[3] * (WARM_UPS + 2)) == [*CAPTURED, "replay"]
    assert bodies.run(*[3] * (WARM_UPS + 1), first=False) == CAPTURED
    assert (bodies.run(3), bodies.run(4)) == (["replay"], ["warm up"])
    bodies.graphs.release()
    assert bodies.run(3, 3) == ["finish", "capture", "replay", "replay"]
    assert bodies.told == []


def test_further_shapes_run_without_graphs_and_one_line_says_so():
    bodies = Bodies(Recorder())
    for width in range(MOST):
        assert bodies.run(*[width] * (WARM_UPS + 1)) == CAPTURED
    assert bodies.run(*[MOST] * 3, MOST + 1, 0) == ["body"] * 4 + ["replay"]
    assert bodies.told == [SHAPES]


def test_a_capture_that_fails_ends_all_graphs_and_one_line_says_so():
    bodies = Bodies(Recorder(fails=2))
    bodies.run(*[1] * 3)
    assert bodies.run(*[2] * 3, 2, 1) == [*WARM, "capture", "finish", "body", "body"]
    assert bodies.told == [
        LINE.format("a capture failed: operation not permitted when stream is capturing", "micro-batches")
    ]


def test_memory_that_has_no_room_for_graphs_and_other_shapes_goes_to_these():
    """To those that may have a graph too, it goes until they have."""
    bodies = Bodies(Recorder(), memory_for=1)
    bodies.ran += [0]
    bodies.run(*[0] * 3)
    assert bodies.run(1, 0, 1, 1) == ["warm up", "finish", "capture", "replay", "warm up", "capture", "replay"]
    for width in range(2, MOST):
        bodies.run(*[width] * 3, *range(width))
    assert bodies.told == []
    assert bodies.run(MOST, 1) == ["finish", "body"]
    memory = LINE.format("memory has no room for graphs and for micro-batches of other shapes", "micro-batches")
    assert bodies.told == [SHAPES, memory]
    with pytest.raises(torch.OutOfMemoryError):
        bodies.run(MOST + 1)


@of_each(
    "hook",
    [
        lambda one, call: one.register_forward_hook(call),
        lambda one, call: one.register_full_backward_hook(call),
        lambda one, call: one.weight.register_hook(call),
    ],
)
def test_hooks_see_each_micro_batch(hook):
    bodies = Bodies(Recorder())
    bodies.run(*[1] * 3)
    handle = hook(bodies.module, lambda *_: None)
    assert bodies.run(1, 1) == ["finish", "body"]
    handle.remove()
    assert bodies.run(1, 1) == ["capture", "replay", "replay"]


@of_each(
    "changes, ranks, expected",
    [
        ({"compute": {"cuda_graphs": True, "activation_checkpointing": True}}, 1, "activation checkpointing keeps"),
        ({"compute": {"cuda_graphs": True}, "zero": {"offload_optimizer": {"device": "cpu"}}}, 1, "DeepSpeed adds up"),
        ({"compute": {"cuda_graphs": True}, "stage": 3}, 2, "DeepSpeed adds up"),
        ({"compute": {"cuda_graphs": True}, "wrapper": {"name": "distillation", "teacher": "t"}}, 1, "a wrapper"),
        ({"compute": {"cuda_graphs": True}}, 2, None),
        ({"compute": {"cuda_graphs": False, "activation_checkpointing": True}}, 1, None),
        ({"stage": 3}, 2, None),
    ],
)
def test_what_can_not_be_a_graph_is_told_where_graphs_are_asked_for(changes, ranks, expected):
    config, told = run_config(**changes), list[str]()
    made = graphed(
        Bodies(Recorder()).body,
        meta_model(config.model),
        config,
        Sharding.of(config, ranks),
        torch.device("cpu"),
        told.append,
    )
    assert [line.split(": ")[1].startswith(expected) for line in told] == ([True] if expected else [])
    assert (made is not None) == (config.compute.cuda_graphs is True and expected is None)


# What a capture needs of a body


class Devices(TorchDispatchMode):
    """Notes the operations that read or make a tensor outside of the meta device, whose tensors have no values."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere = set[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(isinstance(one, Tensor) and not one.is_meta for one in tree_leaves((args, kwargs, result))):
            self.elsewhere.add(str(function))
        return result


def batch_of(columns: dict[str, int], device: str = "cpu") -> dict[str, Tensor]:
    return {name: torch.ones(2, width, dtype=torch.long, device=device) for name, width in columns.items()}


PLAIN = {"encoder_input_ids": 16, "labels": 16}
PACKED = {**PLAIN, "encoder_attention_mask": 16} | {
    f"{side}_{kind}": 16 for side in ("encoder", "decoder") for kind in ("segment_ids", "positions")
}
OTHERS = [name for name in MODELS if name not in (*ONE_OF_EACH_FAMILY, "t5, alibi")]


@of_each("name", [*(one for one in ONE_OF_EACH_FAMILY if one != "double_decoder"), "t5, alibi", *slow(*OTHERS)])
def test_no_body_asks_for_a_value_or_copies_one_from_the_host(name):
    """On the meta device a value that is asked for is an error, and a copy from the host is seen. As on GPUs, the batch
    has the indices of its targets, and attention is this project's kernels or PyTorch's."""
    model = meta_model(parse({"vocab_size": 100, **MODELS[name], **DROPOUT})).train()
    forms: list[tuple[dict[str, int], Backend]] = [(PLAIN, "sdpa"), (PACKED, "sdpa"), (PACKED, "triton")]
    for columns, backend in forms:
        batch = {**batch_of(columns, "meta"), "target_indices": torch.ones(20, dtype=torch.long, device="meta")}
        with using(backend), Devices() as devices:
            total = torch.stack([losses.sum() for losses in model(**batch).values()]).sum()
            torch.autograd.grad(total, [*model.parameters()], allow_unused=True)
        assert devices.elsewhere == set()


def test_nor_does_the_loss_of_targets_in_chunks():
    x, weight = (torch.empty(32, 8, device="meta", requires_grad=True) for _ in range(2))
    labels, indices = (torch.ones(count, dtype=torch.long, device="meta") for count in (32, 20))
    with Devices() as devices:
        losses = chunked_cross_entropy(x, weight, None, labels, CrossEntropy(1e-4, 0.1, 5.0), indices)
        torch.autograd.grad(losses.sum(), (x, weight))
    assert devices.elsewhere == set()


# Few shapes


def test_widths_become_multiples_of_64_up_to_the_longest():
    for inputs, targets, expected in ((1, 65, (64, 128)), (64, 129, (64, 140)), (99, 140, (100, 140))):
        columns = {name: targets if name == "labels" or name.startswith("decoder") else inputs for name in PACKED}
        found = in_few_widths(batch_of(columns), (100, 140), pad=5)
        for name, width in columns.items():
            to = expected[columns[name] == targets and (name == "labels" or name.startswith("decoder"))]
            fill = {"encoder_input_ids": 5, "labels": IGNORE_INDEX}.get(name, 0)
            assert found[name].tolist() == [[1] * width + [fill] * (to - width)] * 2, name


@of_each(
    "labels, expected", [(40 * [7], 40), (20 * [7] + 20 * [IGNORE_INDEX], 20), (33 * [7] + 7 * [IGNORE_INDEX], 36)]
)
def test_numbers_of_targets_have_four_digits(labels, expected):
    """33 is 100001 in binary: with four digits it is 36. Those that are added have no target."""
    (row,) = (torch.tensor([labels]),)
    found = with_target_indices({"labels": row}, in_few_shapes=True)["target_indices"]
    assert len(found) == expected
    assert row.flatten()[found].tolist() == [7] * labels.count(7) + [IGNORE_INDEX] * (expected - labels.count(7))


@of_each("name", ONE_OF_EACH_FAMILY)
def test_padding_to_a_width_changes_no_loss_and_no_gradient(name):
    """In fp64, where rounding is some 1e-16: rows of which some are shorter, and rows that are all as long."""
    torch.manual_seed(0)
    model = build(parse({"vocab_size": 100, **MODELS[name], "dropout_rate": 0.0})).double().train()
    for padded in (False, True):
        (batch, _) = micro_batches(BatchLayout(0, 1, 4, 2), int(padded), 20, 20)
        wide = in_few_widths(batch, (50, 50), pad=0)
        assert wide["labels"].shape == wide["encoder_input_ids"].shape == (4, 50)
        found = []
        for one in (batch, wide):
            losses = model(**one)
            total = torch.stack([values.sum() for values in losses.values()]).sum()
            gradients = torch.autograd.grad(total, [*model.parameters()], allow_unused=True)
            found.append([total, *(one for one in gradients if one is not None)])
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


RAGGED = 24  # steps
LENGTHS = (100, 72)  # the greatest of inputs and targets


def ragged(few: bool, step: int) -> list[dict[str, Tensor]]:
    """Two micro-batches of four rows of drawn lengths; if `few`, in few shapes."""
    draw = torch.Generator().manual_seed(step)
    found = []
    for _ in range(2):
        batch = {}
        for name, longest, fill in zip(("encoder_input_ids", "labels"), LENGTHS, (0, IGNORE_INDEX), strict=True):
            lengths = torch.randint(5, longest + 1, (4, 1), generator=draw)
            ids = torch.randint(3, 99, (4, int(lengths.max())), generator=draw)
            there = torch.arange(ids.size(1)) < lengths
            batch[name] = ids.where(there, fill)
            if name == "encoder_input_ids":
                batch["encoder_attention_mask"] = there.long()
        found.append(with_target_indices(in_few_widths(batch, LENGTHS, 0) if few else batch, few))
    return found


def ragged_run(few: bool) -> dict[str, Any]:
    """Losses, norms and the last weights of a run whose loss goes by the indices of targets, as on a GPU; the widths of
    its rows, how many graphs there are, and what was told."""
    compute, optimizer = {"cuda_graphs": few}, {"learning_rate": 1e-3, "gradient_clipping": 0.5}
    told: list[str] = []
    engine = engine_of(run_config(1, compute=compute, optimizer=optimizer, batch={"global_batch_size": 8}), told.append)

    def losses(head: Any, x: Tensor, labels: Tensor, config: Any, target_indices: Tensor, loss: None) -> Tensor:
        return chunked_cross_entropy(x, head.weight, None, labels, CrossEntropy(), target_indices)

    widths, found = set(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Head, "forward", losses)
        for step in range(RAGGED):
            batches = ragged(few, step)
            widths |= {(one["encoder_input_ids"].size(1), one["labels"].size(1)) for one in batches}
            found.append((engine.step(step, range(len(batches)), batches).loss, engine.gradient_norm))
    weights = [one.detach().clone() for one in engine.module.parameters()]
    graphs = len(engine._graphs._captured) if engine._graphs else 0
    engine.close()
    return {"found": found, "weights": weights, "widths": widths, "graphs": graphs, "told": told}


def test_a_run_of_ragged_rows_is_the_same_in_few_shapes():
    """But for the order of sums, in fp32: the bounds are those of other numbers of ranks."""
    ((plain, few),) = on_ranks(1, each, ragged_run, [(False,), (True,)])
    assert few["found"] == [pytest.approx(one, rel=1e-6) for one in plain["found"]]
    for one, other in zip(few["weights"], plain["weights"], strict=True):
        assert (one - other).norm() / other.norm() < 1e-5
    assert len(plain["widths"]) > 20
    assert few["widths"] == {(inputs, targets) for inputs in (64, 100) for targets in (64, 72)}
    assert (plain["graphs"], plain["told"]) == (0, [])
    assert few["graphs"] > 1
    assert few["told"] in ([], [SHAPES])
