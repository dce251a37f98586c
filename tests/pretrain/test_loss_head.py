"""The loss of each target: with its logits in hand, of states in chunks as GPUs compute it, and beside a teacher's."""

import itertools
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.prefetch import with_target_indices
from pretrain.config.model_config import ModelConfig
from pretrain.config.run_config import DistillationSection
from pretrain.models.functional import arithmetic
from pretrain.models.functional.arithmetic import CrossEntropy, chunked_cross_entropy, soft_capped, token_losses
from pretrain.models.model import Head, shift_right
from pretrain.training import distillation
from tests.tables import each

SETTINGS = [(0.0, 0.0), (0.05, 0.0), (0.0, 0.1), (0.05, 0.1)]


class LargeTensors(TorchDispatchMode):
    """Records the storages of at least `size` bytes that operations make."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.made = size, dict[int, torch.Tensor]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in [*args, *(kwargs or {}).values()] if torch.is_tensor(x)}
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else [results]:
            if torch.is_tensor(result):
                storage = result.untyped_storage()
                if storage.nbytes() >= self.size and storage.data_ptr() not in given:
                    self.made[storage.data_ptr()] = result  # kept, so that no address is used twice
        return results


MOST = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.5e-2}


@each(
    "dtype, z_loss, smoothing, softcap, compiled, added",
    [
        *((dtype, *settings, None, False, 0) for dtype in MOST for settings in SETTINGS),
        *((dtype, 0.05, 0.1, 3.0, False, added) for dtype in (torch.float64, torch.float32) for added in (0, 4)),
        *((dtype, *settings, None, True, 4) for dtype in (torch.float64, torch.float32) for settings in SETTINGS),
    ],
)
def test_chunks_give_the_losses_and_gradients_of_all_logits(
    dtype, z_loss, smoothing, softcap, compiled, added, monkeypatch
):
    """9 targets in chunks of 4, and some that are `added` and don't count. Compiled is what the compiler is given; the
    code that it makes is its own."""
    torch._dynamo.reset()
    graphs = cache(partial(torch.compile, fullgraph=True, backend="aot_eager"))
    monkeypatch.setattr(arithmetic, "_compiled", graphs)
    monkeypatch.setattr(arithmetic, "LOGITS_PER_CHUNK", 4 * 5000)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    inputs = draw(3, 5, 24), draw(5000, 24), draw(5000)
    labels = torch.randint(0, 5000, (3, 5), generator=generator)
    labels[0, 2:] = labels[2, :3] = IGNORE_INDEX
    along = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    indices = torch.cat([(labels.flatten() != IGNORE_INDEX).nonzero()[:, 0], torch.full((added,), 2)])
    settings = CrossEntropy(z_loss, smoothing, softcap, compiled)
    found = chunked_cross_entropy(*inputs, labels, settings, indices if added else None)
    assert not found[labels == IGNORE_INDEX].any()
    exact = [one.detach().double().requires_grad_() for one in inputs]
    logits = F.linear(*exact)
    defined = token_losses(logits if softcap is None else soft_capped(logits, softcap), labels, z_loss, smoothing)
    assert (found.double() - defined).norm() / defined.norm() < MOST[dtype]
    for losses_to_sum in (lambda losses: 0.3 * losses.sum(), lambda losses: (losses * along).sum()):
        gradients, expected = (
            torch.autograd.grad(losses_to_sum(losses), of, retain_graph=True)
            for losses, of in ((found, inputs), (defined, exact))
        )
        for one, other in zip(gradients, expected, strict=True):
            assert (one.double() - other).norm() / other.norm() < MOST[dtype]


def test_compiled_losses_know_the_vocabulary_and_the_settings_but_not_the_rows(monkeypatch):
    """For variables a GPU's kernel would divide by the vocabulary for each logit, and compute with settings in fp64."""
    given: list[list[Any]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        given.append(inputs)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    losses_of = arithmetic._compiled.__wrapped__(arithmetic._losses)
    for rows in (4, 6, 7, 9):
        losses_of(torch.randn(rows, 50), torch.arange(rows), 0.05, 0.1)
    first, *others = given
    assert len(others) == 1
    assert not any(isinstance(one, torch.SymInt) for one in first)
    (rows,) = (one for one in others[0] if not torch.is_tensor(one))
    (logits,) = (one for one in others[0] if torch.is_tensor(one) and one.dim() == 2)
    assert (logits.size(0), logits.size(1)) == (rows, 50)
    assert isinstance(rows, torch.SymInt)


class Products(TorchDispatchMode):
    """Counts the products of matrices."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


def test_the_gradient_of_a_sum_multiplies_no_logits_again():
    """It has three products: logits, and the gradients of states and matrix. Losses alone have one."""
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(100, 4, requires_grad=True)
    labels = torch.arange(6)

    def losses() -> torch.Tensor:
        return chunked_cross_entropy(x, weight, None, labels, CrossEntropy())

    with Products() as products:
        torch.autograd.grad(losses().sum() / 7, (x, weight))
    assert products.count == 3
    with Products() as products, torch.no_grad():
        losses()
    assert products.count == 1


@each("counted, softcap", itertools.product((0, 2, 11, 12), (None, 3.0)))
def test_positions_without_a_target_change_no_loss_and_no_gradient(counted, softcap):
    """Some are left out, and few are computed for nothing; both give what `token_losses` does."""
    generator = torch.Generator().manual_seed(0)
    head = Head(8, 50, std=1.0, bias=True, softcap=softcap).double()
    x = torch.randn(3, 4, 8, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(50, (12,), generator=generator)
    labels[torch.randperm(12, generator=generator)[counted:]] = IGNORE_INDEX
    config = ModelConfig(family="none", z_loss=0.05, label_smoothing=0.1)
    losses = head(x, labels.view(3, 4), config)
    expected = token_losses(head(x), labels.view(3, 4), 0.05, 0.1)
    torch.testing.assert_close(losses, expected)
    weights = torch.randn(3, 4, generator=generator)
    inputs = (x, head.weight, head.bias)
    for found, same in zip(
        *(torch.autograd.grad((of * weights).sum(), inputs) for of in (losses, expected)), strict=True
    ):
        torch.testing.assert_close(found, same)


def test_positions_without_a_target_take_no_time_in_the_output_matrix():
    x, labels = torch.randn(1, 40, 8), torch.full((1, 40), IGNORE_INDEX)
    labels[0, :10] = 1
    head = Head(8, 50, std=1.0)
    with FlopCounterMode(display=False) as counted:
        head(x, labels, ModelConfig(family="none"))
    assert counted.get_total_flops() == 2 * 10 * 8 * 50


def test_a_batch_knows_the_places_of_its_targets_before_it_is_on_the_device():
    labels = torch.tensor([[5, IGNORE_INDEX, 6], [IGNORE_INDEX, IGNORE_INDEX, 7]])
    assert with_target_indices({"labels": labels})["target_indices"].tolist() == [0, 2, 5]


# The loss of each target, compared with PyTorch's cross-entropy


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Makes even small batches take several parts, of four targets; the last is not full."""
    monkeypatch.setattr(arithmetic, "_rows_at_a_time", lambda logits: 4)
    monkeypatch.setattr(distillation, "LOGITS_PER_CHUNK", 4 * VOCABULARY)


def batch(rows=3, length=5, vocabulary=17, dtype=torch.float32, scale=3.0, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(rows, length, vocabulary, generator=generator)).to(device, dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows, length), generator=generator).to(device)
    labels[0, 3:] = IGNORE_INDEX
    labels[2, 0] = IGNORE_INDEX
    return logits, labels


@each(
    "dtype, most, rounding, z_loss, smoothing",
    [
        (*dtype, *settings)
        for dtype in [(torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 1e-6), (torch.bfloat16, 1e-5, 2**-8)]
        for settings in SETTINGS
    ],
)
def test_losses_and_gradients_are_pytorchs(dtype, most, rounding, z_loss, smoothing, device):
    """The gradient is of a weighted sum over targets; in bf16 only the gradient itself is rounded."""
    logits, labels = batch(dtype=dtype, device=device)
    losses, exact = token_losses(logits, labels, z_loss, smoothing), logits.double()
    expected = F.cross_entropy(exact.transpose(1, 2), labels, reduction="none", label_smoothing=smoothing)
    expected = expected + (z_loss * exact.logsumexp(dim=-1).square()).masked_fill(labels == IGNORE_INDEX, 0.0)
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(losses.double(), expected, rtol=0, atol=most)
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    wanted, found = (torch.autograd.grad((of * weights).sum(), logits)[0] for of in (expected, losses))
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=0 if dtype != torch.bfloat16 else rounding, atol=rounding)
    assert found[labels == IGNORE_INDEX].count_nonzero() == 0
    assert (found[labels != IGNORE_INDEX] != 0).any(dim=-1).all()


def test_large_logits_stay_finite(device):
    logits, labels = batch(scale=1e4, device=device)
    losses = token_losses(logits, labels, z_loss=1e-4)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logits.grad.isfinite().all()


def test_no_more_memory_than_the_logits_and_their_gradient():
    """In fp32, the whole softmax of bf16 logits would be twice as large as they are; no such tensor may exist."""
    logits, labels = batch(rows=8, length=16, vocabulary=64, dtype=torch.bfloat16)
    size = logits.untyped_storage().nbytes()
    with LargeTensors(size // 2) as forward:
        total = token_losses(logits, labels, 1e-4, 0.1).sum()
    assert forward.made == {}
    with LargeTensors(size // 2) as backward:
        total.backward()
    assert len(backward.made) == 1
    assert logits.grad.untyped_storage().data_ptr() in backward.made
    with LargeTensors(size // 2) as naive:
        F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
    assert naive.made


def test_each_example_of_a_packed_row_starts_anew():
    labels = torch.tensor([[5, 1, 6, 7, 1, IGNORE_INDEX]])
    segments = torch.tensor([[1, 1, 2, 2, 2, 0]])
    assert shift_right(labels, 0, segments).tolist() == [[0, 5, 0, 6, 7, 0]]


# The loss that a teacher weighs, compared with its formula in fp64, and its gradients with autograd's


VOCABULARY, OF_TEACHER = 300, 280  # the student has more ids, and the teacher rows of padding
CASES = [  # of the distillation, and of the student: z-loss, smoothing, softcap
    ({}, (0.0, 0.0, None)),
    ({"weight": 1.0, "temperature": 2.5}, (0.0, 0.0, None)),
    ({"top_k": 7}, (0.0, 0.0, None)),
    ({"top_k": 7, "temperature": 0.7}, (0.05, 0.1, None)),
    ({"temperature": 2.0}, (0.05, 0.1, 3.0)),
]


class OnlyHead(nn.Module):
    """In place of the student and of the teacher."""

    def __init__(self, head, config=None):
        super().__init__()
        self.lm_head, self.config = head, config

    def forward(self, x, labels, loss=None):
        return {"labels": self.lm_head(x, labels, self.config, loss=loss)}


class Distillation(distillation.Distillation):
    """Of a teacher that has read the texts before: its states (batch, targets, width), and which targets are text."""

    states, in_text = torch.empty(0), torch.empty(0)

    def read(self, batch):
        return self.states, self.in_text


def losses_of(case, student, teacher, vocabulary, **settings):
    section = DistillationSection(name="distillation", teacher="t", **settings)
    wrapper = Distillation(student, teacher, vocabulary, section)
    wrapper.states, wrapper.in_text = case.states, case.in_text
    return wrapper(x=case.x, labels=case.labels)


class Case:
    """11 targets of 15 labels, three of which the teacher has nothing to say about."""

    def __init__(self, dtype, device="cpu", weight=0.4, temperature=1.0, top_k=None):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self.x, self.weight, self.bias = (
            one.requires_grad_() for one in (draw(3, 5, 24), draw(VOCABULARY, 24), draw(VOCABULARY))
        )
        self.labels = torch.randint(0, VOCABULARY, (3, 5), generator=generator).to(device)
        self.labels[0, 3:] = self.labels[2, :2] = IGNORE_INDEX
        self.along = torch.rand(3, 5, generator=generator, dtype=torch.float64).to(device)
        self.settings = {"weight": weight, "temperature": temperature, "top_k": top_k}
        self.states, self.in_text = draw(3, 5, 16), torch.ones(3, 5, dtype=torch.bool, device=device)
        self.in_text[0, 2] = self.in_text[1, 4] = self.in_text[2, 4] = False
        torch.manual_seed(0)
        self.teacher = OnlyHead(Head(16, OF_TEACHER + 4, 1.0).to(device, dtype))

    def found(self, z_loss, smoothing, softcap):
        head = Head(24, VOCABULARY, 1.0, bias=True, softcap=softcap).to(self.x)
        head.weight, head.bias = nn.Parameter(self.weight.detach()), nn.Parameter(self.bias.detach())
        student = OnlyHead(head, ModelConfig(family="none", z_loss=z_loss, label_smoothing=smoothing))
        losses = losses_of(self, student, self.teacher, OF_TEACHER, **self.settings)
        gradients = torch.autograd.grad((losses["labels"] * self.along).sum(), (self.x, head.weight, head.bias))
        return [*losses.values(), *gradients]

    def defined(self, z_loss, smoothing, softcap):
        """The same in fp64, without chunks and functions of our own but the cross-entropy."""
        exact = [one.detach().double().requires_grad_() for one in (self.x, self.weight, self.bias)]
        t, top_k = self.settings["temperature"], self.settings["top_k"]
        logits = F.linear(*exact)
        logits = logits if softcap is None else soft_capped(logits, softcap)
        of_teacher = self.teacher.lm_head(self.states).detach()[..., :OF_TEACHER].double()
        p = torch.softmax(of_teacher / t, dim=-1)
        if top_k is not None:
            p = p * (p >= p.topk(top_k).values[..., -1:])
            p = p / p.sum(dim=-1, keepdim=True)
        p = F.pad(p, (0, VOCABULARY - OF_TEACHER))
        counted = (self.labels != IGNORE_INDEX) & self.in_text
        log_q = torch.log_softmax(logits / t, dim=-1)
        divergence = t**2 * F.kl_div(log_q, p, reduction="none").sum(dim=-1) * counted
        shares = self.settings["weight"] * counted.double()
        own = token_losses(logits, self.labels, z_loss, smoothing)
        regular = own - token_losses(logits, self.labels, 0.0, smoothing)
        loss = regular + (1 - shares) * (own - regular) + shares * divergence
        return [loss, own, divergence, *torch.autograd.grad((loss * self.along).sum(), exact)]


@each("settings, dtype", itertools.product(CASES, MOST))
def test_losses_and_gradients_are_those_of_the_formula(settings, dtype, device):
    of_distillation, of_student = settings
    case = Case(dtype, device, **of_distillation)
    for one, other in zip(case.found(*of_student), case.defined(*of_student), strict=True):
        assert float(((one.double() - other).norm() / other.norm()).detach()) < MOST[dtype]


def test_the_teacher_gets_no_gradient_and_the_student_by_itself_knows_none():
    """Neither in evaluation nor in training: the wrapper replaces nothing of the student."""
    case = Case(torch.float32)
    case.states.requires_grad_()
    student = OnlyHead(Head(24, VOCABULARY, 1.0), ModelConfig(family="none"))
    losses = losses_of(case, student, case.teacher, OF_TEACHER)
    losses["labels"].sum().backward()
    assert case.teacher.lm_head.weight.grad is case.states.grad is None
    assert not losses["cross_entropy"].requires_grad
    for alone in (student, student.eval()):
        of_text = alone(x=case.x, labels=case.labels)
        assert of_text.keys() == {"labels"}
        torch.testing.assert_close(of_text["labels"].detach(), losses["cross_entropy"], check_stride=False)


def test_no_tensor_holds_the_logits_of_more_than_a_few_targets(monkeypatch):
    """Of 64 targets, with a teacher and without, forward and backward."""
    monkeypatch.setattr(arithmetic, "LOGITS_PER_CHUNK", 8 * 1000)
    monkeypatch.setattr(distillation, "LOGITS_PER_CHUNK", 8 * 1000)
    x, weight = torch.randn(64, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with LargeTensors(1) as alone:
        chunked_cross_entropy(x, weight, None, torch.arange(64), CrossEntropy()).sum().backward()
    student = OnlyHead(Head(4, 1000, 1.0), ModelConfig(family="none"))
    case = Case(torch.float32)
    case.x, case.labels = torch.randn(2, 32, 4), torch.arange(64).view(2, 32)
    case.states, case.in_text = torch.randn(2, 32, 5), torch.ones(2, 32, dtype=torch.bool)
    with LargeTensors(1) as with_teacher:
        losses_of(case, student, OnlyHead(Head(5, 1000, 1.0)), 1000)["labels"].sum().backward()
    for watched in (alone, with_teacher):
        assert max(one.numel() for one in watched.made.values()) == 8 * 1000
