"""The attention kernel: against fp64 in Triton's interpreter, and compiled for six GPUs without one.

The interpreter has no bf16 products, so fp16 stands for it here; checks/gpu runs the same cases in bf16.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretrain.models.functional.attention_backends import Pattern, Window, flash, labels
from tests.support import attention_cases, compiled_kernels
from tests.support.attention_cases import Case, interpreted
from tests.support.compiled_kernels import EVERYTHING, EVERYTHING_IN_A_WINDOW, OF_FAMILIES
from tests.support.slow import slow
from tests.support.tables import each

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from pretrain.models.kernels import OperatorArguments, flash_operator
from pretrain.models.kernels.flash import backward_keys, backward_queries, forward
from pretrain.models.kernels.tiles import shared_memory, tile_sizes

# Tiles have 32 rows and columns in fp32, 32 to 128 in fp16; ranges of what is seen are kept for 64 positions at a time.
# Most lengths end within a tile. One case a branch of the kernels, and other shapes of the same branches. The gradient
# of a bias takes most of the interpreter's time: few cases have two heads and a bias.
GRID = [
    Case(40, 36),
    Case(40, 70, causal=True, heads=1),
    Case(70, 70, masking="packed", causal=True, heads=1),
    Case(40, 30, masking="nothing"),
    Case(40, 40, bias=False, causal=True),
    Case(130, 70, d_kv=64, masking="padding", dtype=torch.float16, heads=1),
    Case(107, 107, masking="packed", window=Window(20, 3), softcap=0.7, heads=1),
]
OTHER_SHAPES = [
    *(Case(*lengths) for lengths in [(2, 3), (32, 64)]),
    Case(70, 37, causal=True),
    Case(40, 100, bias=False, masking="packed"),
    Case(70, 70, bias=False, masking="padding", causal=True),
    *(Case(40, 40, bias=False, d_kv=d_kv) for d_kv in (24, 128)),
    Case(40, 110, window=Window(5, 40)),
    Case(80, 40, window=Window(5, 3)),
    Case(70, 70, bias=False, causal=True, window=Window(33)),
    Case(40, 40, bias=False, causal=True, softcap=0.7),
    Case(40, 70, bias=False, d_kv=256, window=Window(20, 20), softcap=3.0, dtype=torch.float16),
    Case(70, 100, bias=False, d_kv=80, causal=True, dtype=torch.float16),
]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., Any]]:
    with interpreted() as call:
        yield call


@each("case", [*GRID, *(pytest.param(case, marks=pytest.mark.slow) for case in OTHER_SHAPES)])
def test_outputs_and_gradients_are_those_of_the_definition(run, case):
    errors = run(attention_cases.errors, case, "cpu")
    assert len(errors) == 4 + case.bias
    assert max(errors.values()) < TOLERANCE[case.dtype], errors


@each("family", ["t5", "t5gemma", *slow("t5gemma2", "decoder_only", "bart", "autoregressive", "encoder_only")])
def test_models_have_the_same_gradients_with_the_kernel_and_without(run, family):
    differences = run(attention_cases.of_model, family, "cpu")
    assert len(differences) > 5
    assert max(differences.values()) < 1e-4, differences


def test_a_query_that_sees_nothing_gives_zero(run):
    assert run(attention_cases.of_queries_that_see_nothing, "cpu") == (0.0, True)


def test_the_gradient_of_joined_queries_keys_and_values_is_one(run):
    assert run(attention_cases.joined_alike) == {"same": True, "copies": False}


@pytest.mark.slow
def test_compiled_layers_call_the_kernel_in_one_graph(run):
    assert run(attention_cases.compiled_alike) == {"0.0": True, "0.3": True}


def test_dropout_keeps_its_share_of_weights_and_drops_the_same_in_the_backward_pass(run):
    """2,560 draws a head: the standard deviation of a share of 0.75 is 0.0086."""
    found = run(attention_cases.dropped, "cpu")
    assert found["kept"] == pytest.approx([0.75] * 4, abs=0.035)
    assert len(set(found["kept"])) > 1
    assert found["alike"] == pytest.approx([0.75**2 + 0.25**2] * 3, abs=0.04)  # each head, query and key draws its own
    assert max(found["errors"]) < TOLERANCE[torch.float32]


def test_ranges_spare_padding_and_other_examples():
    mask = torch.arange(256) < torch.tensor([256, 100, 0])[:, None]
    found = labels(64, mask, None, None)
    assert found.key_ranges[:, :, 0].tolist() == [[0, 256], [0, 128], [256, 0]]
    segments = torch.tensor([[1] * 64 + [2] * 128 + [0] * 64])
    found = labels(256, segments > 0, segments, segments)
    assert found.key_ranges[0].tolist() == [[0, 64, 64, 256], [64, 192, 192, 0]]
    assert torch.equal(found.key_ranges, found.query_ranges)
    assert labels(8, None, None, None) is None  # everything is visible


def test_a_gpu_takes_tiles_by_its_shared_memory(monkeypatch):
    """An RTX 4090 offers less than an A100, and a GPU between two of the table's takes the smaller one's tiles."""
    a100, rtx = (tile_sizes("forward", torch.bfloat16, 64, offered) for offered in (166_912, 101_376))
    assert (a100.stages, rtx.stages) == (3, 2)
    assert tile_sizes("forward", torch.bfloat16, 64, 166_911) == rtx
    assert tile_sizes("forward", torch.bfloat16, 64) == a100  # no GPU here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(shared_memory_per_block_optin=101_376 if device else 166_912),
    )
    shared_memory.cache_clear()
    found = tile_sizes("forward", torch.bfloat16, 64)
    shared_memory.cache_clear()
    assert found == rtx


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Iterator[None]:
    """Triton compiles a kernel once for all tests here, and for nobody else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", [80, 90, 120, *(pytest.param(n, marks=pytest.mark.soak) for n in (86, 89, 100))]
)
@each("kernel", compiled_kernels.KERNELS)
def test_kernels_compile_for_each_gpu_and_fit_its_shared_memory(kernel, architecture, kept):
    """With every feature. In bf16 heads of 64 are multiplied by the tensor cores' instructions.

    86 and 89 have the shared memory and the instructions of 120; `make soak` compiles for them, too. In fp32 all have
    the same tiles: those fit if they fit the least memory."""
    cases = [(torch.bfloat16, d_kv, EVERYTHING) for d_kv in (64, 128, 256)]
    if compiled_kernels.SHARED[architecture] == min(compiled_kernels.SHARED.values()):
        cases += [(torch.float32, 128, EVERYTHING), (torch.bfloat16, 64, EVERYTHING_IN_A_WINDOW)]
    for dtype, d_kv, form in cases:
        compiled = compiled_kernels.compiled(kernel, architecture, dtype, d_kv, form)
        assert compiled.metadata.shared <= compiled_kernels.SHARED[architecture], (dtype, d_kv)
        if d_kv == 64:
            assert compiled_kernels.PRODUCTS.get(architecture, "mma.sync") in compiled.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "forms"),
    [(80, OF_FAMILIES[2:]), *(pytest.param(n, OF_FAMILIES, marks=pytest.mark.soak) for n in (80, 90))],
)
@each("kernel, d_kv", itertools.product(compiled_kernels.KERNELS, (64, 128, 256)))
def test_no_tiles_spill_registers(kernel, d_kv, architecture, forms, kept, tmp_path):
    """In bf16, in the two forms of families that compute most; `make soak` compiles all forms."""
    for form in forms:
        compiled = compiled_kernels.compiled(kernel, architecture, torch.bfloat16, d_kv, form)
        assert compiled_kernels.usage(compiled, tmp_path).spilled == 0, form


# How often Triton compiles

HEADS, D_KV = 3, 16


@pytest.fixture
def compilations(monkeypatch) -> Counter[str]:
    """The number of each kernel that Triton would compile for an H100 from now on. Nothing is compiled or launched."""
    gpu = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda *_: 0)
    gpu.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    monkeypatch.setattr(driver, "_active", gpu)
    for kernel in (forward, backward_queries, backward_keys):
        kernel.device_caches.clear()
    found: dict[str, str] = {}

    def note(*, compile: Mapping[str, Any], fn: Any, **_: object) -> bool:
        found[compile["specialization_data"]] = fn.name.rsplit(".", 1)[-1]
        counts.clear()
        counts.update(found.values())
        return True

    counts: Counter[str] = Counter()
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", note)
    return counts


def attend(rows: int, queries: int, keys: int, *, causal: bool = False, bias: bool = False, padded: bool = False):
    """Forward and backward, with the strides that joined products give."""

    def heads(length: int) -> torch.Tensor:
        return torch.zeros(rows, length, HEADS * D_KV, dtype=torch.bfloat16).unflatten(-1, (-1, D_KV)).transpose(1, 2)

    inputs = [heads(queries), heads(keys), heads(keys)]
    inputs += [torch.zeros(HEADS, queries + keys - 1, dtype=torch.bfloat16)] if bias else []
    inputs = [one.requires_grad_() for one in inputs]
    seen = labels(queries, torch.ones(rows, keys), None, None) if padded else None
    out = flash(*inputs[:3], Pattern(inputs[3] if bias else None, seen, causal), 1.0, 0.0)
    torch.autograd.grad(out, inputs, torch.zeros_like(out))


def t5_step(rows: int, inputs: int, targets: int) -> None:
    attend(rows, inputs, inputs, bias=True, padded=True)
    attend(rows, targets, targets, bias=True, causal=True)
    attend(rows, targets, inputs, padded=True)


def test_ragged_widths_are_compiled_once(compilations):
    """Three forms of attention, of which two have a bias. Widths that are 1, odd, or multiples of 16 need no others."""
    draw = random.Random(0)
    widths = [(512, 114), (512, 128), (1, 1), *((draw.randint(200, 512), draw.randint(20, 114)) for _ in range(20))]
    for some in widths:
        t5_step(draw.randint(1, 3), *some)
    assert compilations == {"forward": 3, "backward_queries": 3, "backward_keys": 3}


def test_the_arguments_of_the_operator_have_its_names():
    """An argument more, or in another place, must not be read as its neighbour."""
    schema = flash_operator.attention._opoverload._schema
    assert [argument.name for argument in schema.arguments] == list(OperatorArguments._fields)
