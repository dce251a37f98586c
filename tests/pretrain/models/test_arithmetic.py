"""The forms that a CPU computes faster give what PyTorch's own functions give, and attention what its formula gives."""

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from data_pipeline.base.errors import UserError
from pretrain.config.run_config import ComputeSection
from pretrain.engine.construction import prepare_layers
from pretrain.models import build, layers
from pretrain.models.attention import AttentionMask
from pretrain.models.functional.arithmetic import drop, token_losses
from pretrain.models.functional.attention_backends import Visibility, Window, attend
from pretrain.models.layers import RMSNorm
from pretrain.models.stacks import EncoderLayer
from tests.support import small_models
from tests.support.attention_cases import Case, OperationNames, by_pytorch, errors
from tests.support.rank_processes import on_ranks
from tests.support.small_models import ids, logits_of, made
from tests.support.small_runs import run_config
from tests.support.tables import each


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def gradients(result: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    along = torch.randn(result.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return [result.detach(), *torch.autograd.grad((result * along.to(result.dtype)).sum(), inputs, retain_graph=True)]


@each("epsilon", [1e-6, 0.5])
def test_rms_norm_and_its_gradients_are_pytorchs(epsilon):
    norm = RMSNorm(24, epsilon).double()
    norm.weight.data = draw(24, seed=1).detach()
    x = draw(3, 5, 24)
    reference = F.rms_norm(x, (24,), norm.weight, epsilon)
    for ours, theirs in zip(gradients(norm(x), x, norm.weight), gradients(reference, x, norm.weight), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(norm, x)


def test_rms_norm_computes_in_fp32_whatever_the_dtype():
    norm = RMSNorm(512).to(torch.bfloat16)
    x = draw(2, 7, 512, dtype=torch.bfloat16)
    ours = norm(x)
    exact = F.rms_norm(x.double(), (512,), None, 1e-6)
    assert ours.dtype == torch.bfloat16
    # one rounding, of the result, which in fp32 is off by some 2⁻²⁴
    either = [(exact * (1 + off)).to(torch.bfloat16) for off in (-(2**-20), 2**-20)]
    assert ((ours == either[0]) | (ours == either[1])).all()


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@each("dtype, rate", itertools.product(DTYPES, (0.1, 0.5, 0.9)))
def test_dropped_elements_are_zero_and_the_others_scaled_as_by_pytorch(dtype, rate):
    torch.manual_seed(3)
    x = torch.ones(333, 301, dtype=dtype, requires_grad=True)  # an odd number: draws serve several elements
    result = drop(x, rate)
    kept = result != 0
    scaled = torch.nn.functional.dropout(torch.ones(1000, dtype=dtype), rate).max()
    assert result.unique().tolist() == [0.0, scaled.item()]
    deviation = (rate * (1 - rate) / x.numel()) ** 0.5  # of a share of independent draws
    assert abs(kept.double().mean() - (1 - rate)) < 5 * deviation + 2**-16
    for one, other in ((kept[1:], kept[:-1]), (kept[:, 1:], kept[:, :-1])):  # neighbours are independent
        assert abs((one & other).double().mean() - (1 - rate) ** 2) < 7 * deviation
    result.sum().backward()
    assert torch.equal(x.grad, result)


@each("rate, kept", [(1e-6, 1.0), (1 - 1e-6, 0.0)])
def test_rates_beside_0_and_1_keep_nearly_all_and_nearly_nothing(rate, kept):
    result = drop(torch.ones(1 << 16, dtype=torch.bfloat16), rate)  # a 16-bit draw can't be rarer than 2⁻¹⁶
    assert abs((result != 0).double().mean() - kept) < 20 * 2**-16


@each("name", ["t5", "bart", "llama", "t5gemma2", "modern", "t5gemma, unbalanced"])
def test_joined_products_are_the_separate_ones(name, monkeypatch):
    model, products = made(name).train(), []
    monkeypatch.setattr(F, "linear", lambda *inputs, plain=F.linear: products.append(inputs) or plain(*inputs))

    def computed() -> tuple[int, list[torch.Tensor]]:
        products.clear()
        found = gradients(logits_of(model, ids(2, 5), ids(2, 5, seed=1)), *model.parameters())
        return len(products), found

    number, separate = computed()
    prepare_layers(model, ComputeSection(compile=False), stage=2)
    torch.testing.assert_close(computed()[1], separate, rtol=0, atol=0)  # on a CPU nothing changes
    monkeypatch.setattr(layers, "fusing_is_faster", lambda _: True)
    fewer, fused = computed()
    assert fewer < number
    torch.testing.assert_close(fused, separate, rtol=1e-12, atol=1e-12)


def test_the_products_of_a_gated_layer_are_not_joined(monkeypatch):
    """A compiler would compute the gradients of both for each number of their joined gradient."""
    monkeypatch.setattr(layers, "fusing_is_faster", lambda _: True)
    model = made("t5").train()
    prepare_layers(model, ComputeSection(compile=False), stage=1)
    layer, x = model.encoder.layers[0].feed_forward, draw(2, 5, model.config.d_model)
    assert layer.gated
    with OperationNames() as names:
        gradients(layer(x), x, *layer.parameters())
    assert "mm" in names.found
    assert not {"cat", "stack"} & names.found


@each("stage, compiled, fused", [(1, False, True), (2, False, True), (3, False, False), (3, True, True)])
@each("recomputed", [False, True])
def test_zero_3_gathers_single_matrices_unless_layers_are_compiled(stage, compiled, fused, recomputed):
    """A product of matrices that are not gathered together would read some that aren't there. What is made for all
    layers at once isn't recomputed."""
    config = run_config(stage, compute={"compile": compiled, "activation_checkpointing": recomputed})
    model = build(config.model)
    prepare_layers(model, config.compute, config.zero_stage)
    found = {module.fused for module in model.modules() if hasattr(module, "fused")}
    assert found == {fused}
    assert model.decoder.joins_memories == (stage < 3 and not recomputed)
    assert not any("forward" in vars(module) for module in model.modules())  # none is replaced from outside


@each("training, runs", [(True, 2), (False, 1)])
def test_a_layer_is_recomputed_in_training_alone_with_the_same_gradient(training, runs, monkeypatch):
    called, plain = [], EncoderLayer.run
    monkeypatch.setattr(EncoderLayer, "run", lambda *given: called.append(given) or plain(*given))
    model, found = made("t5").train(training), []
    layer, x = model.encoder.layers[0], draw(2, 5, model.config.d_model)
    for recomputed in (False, True):
        layer.prepare(recomputed=recomputed)
        called.clear()
        torch.manual_seed(0)
        found.append(gradients(layer(x, AttentionMask()), x, *layer.parameters()))
    assert len(called) == runs
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_layers_that_cannot_be_recomputed_are_named():
    model = torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
    with pytest.raises(UserError, match=r"^compute\.activation_checkpointing: the layer Linear of this family"):
        prepare_layers(model, ComputeSection(compile=False, activation_checkpointing=True), stage=2)


def test_one_look_up_of_inputs_and_targets_has_the_gradient_of_two():
    model, inputs, labels = made("t5, tied"), ids(3, 7), ids(3, 5, seed=1)
    of_one = small_models.gradients(model, model(inputs, labels)["labels"].sum())
    of_two = small_models.gradients(model, token_losses(logits_of(model, inputs, labels), labels).sum())
    torch.testing.assert_close(of_one, of_two, rtol=1e-12, atol=1e-12)


FAULTS = """
import resource, sys
from pretrain.engine.memory import freed_at_once, keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
    with freed_at_once():
        pass
bytearray(64 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    bytearray(64 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.timing  # and huge pages: what a page is
def test_freed_memory_is_used_again_without_new_pages():
    faults = {
        which: int(subprocess.run([sys.executable, "-c", FAULTS, which], capture_output=True, check=True).stdout)
        for which in ("mapped", "kept")
    }
    assert faults["kept"] < faults["mapped"] / 10


def _tiniest_product() -> float:
    return float(torch.full((), 1e-20) * torch.full((), 1e-20))


def test_ranks_round_numbers_that_slow_a_cpu_down_to_zero():
    assert on_ranks(1, _tiniest_product, joined=False)[0] > 0
    assert on_ranks(1, _tiniest_product) == [0.0]


# Attention is right for every length and mask, and never meets a kernel that isn't.


MASK = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 0, 0, 0]])
SEGMENTS = torch.tensor([[1, 1, 2, 2, 2], [1, 1, 1, 1, 0]])
PREFIX = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]])


@each(
    "seen, expected",
    [
        (Visibility(), []),
        (Visibility(prefix=PREFIX), []),  # which hides nothing by itself
        (Visibility(causal=True), ["11100 11110 11111"]),
        (Visibility(window=Window(1, 1)), ["01110 00111 00011"]),
        (Visibility(causal=True, window=Window(1, 1)), ["01100 00110 00011"]),
        (Visibility(causal=True, prefix=PREFIX), ["11101 11111 11111", "11100 11110 11111"]),
        # a query that sees nothing sees all
        (Visibility(key_mask=MASK), ["11011 11011 11011", "11111 11111 11111"]),
        (
            Visibility(causal=True, query_segments=SEGMENTS[:, 2:], key_segments=SEGMENTS),
            ["00100 00110 00111", "11100 11110 00001"],
        ),
        (
            Visibility(key_mask=MASK, query_segments=SEGMENTS[:, 2:], key_segments=SEGMENTS),
            ["00011 00011 00011", "11111 11111 11111"],
        ),
    ],
)
def test_a_query_sees_the_keys_that_nothing_hides(seen, expected):
    """Worked by hand, for the last three of five tokens in two rows."""
    mask = seen.mask(3, 5, torch.device("cpu"))
    rows = [] if mask is None else mask[:, 0].expand(-1, 3, -1).int().tolist()
    assert [" ".join("".join(map(str, keys)) for keys in row) for row in rows] == expected


LENGTHS = (63, 64, 114, 128, 192, 320, 512)
FORMS = [
    {"bias": False},
    {"bias": False, "causal": True},
    {},
    *({"bias": bias, "masking": masking} for bias in (False, True) for masking in ("padding", "packed", "nothing")),
]

# Unit roundoff is 6e-8 in fp32 and 4e-3 in bf16. Sums of some hundred roundings of random sign stay below these.
BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 3e-2}


@each("dtype", BOUNDS)
def test_outputs_and_gradients_are_those_of_fp64(dtype):
    lengths = LENGTHS if dtype == torch.float32 else (64, 114, 192)
    for case in (Case(length, length, **form, dtype=dtype) for length in lengths for form in FORMS):
        assert max(errors(case, "cpu", by_pytorch).values()) < BOUNDS[dtype], case


class _Asked(TorchFunctionMode):
    """Notes which kernels may compute each call of PyTorch's attention, and computes none."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[bool, bool]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        switches = torch.backends.cuda
        others = switches.flash_sdp_enabled, switches.mem_efficient_sdp_enabled, switches.math_sdp_enabled
        self.kernels.append((switches.cudnn_sdp_enabled(), all(one() for one in others)))
        return args[0]


def test_on_a_gpu_cudnn_gets_no_mask_and_a_plan_for_few_widths_alone():
    """Of 114 widths of targets that read 512 inputs, one is a multiple of 64. PyTorch's other kernels get everything,
    and its switches are as before."""
    lengths = [(512, 512), (128, 512), (512, 500), *((targets, 512) for targets in range(1, 115))]
    with FakeTensorMode(), _Asked() as asked:
        for queries, keys in lengths:
            q, k = (torch.empty(2, 2, n, 64, dtype=torch.bfloat16, device="cuda") for n in (queries, keys))
            for bias in (None, torch.empty(1, 2, queries, keys, dtype=torch.bfloat16, device="cuda")):
                attend(q, k, k, bias, False, 1.0, 0.0)
    by_cudnn, by_others = zip(*asked.kernels, strict=True)
    assert all(by_others)
    assert not any(by_cudnn[1::2])  # with a mask
    assert [pair for pair, one in zip(lengths, by_cudnn[::2], strict=True) if one] == [
        (512, 512),
        (128, 512),
        (64, 512),
    ]
    assert torch.backends.cuda.cudnn_sdp_enabled()
