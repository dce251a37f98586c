"""The loss that a teacher weighs: the formula in fp64, and its gradients by autograd."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.models import chunked_cross_entropy
from pretrain.models.chunked_cross_entropy import CrossEntropy
from pretrain.models.distilled_loss import TeacherTargets
from pretrain.models.layers import soft_capped
from pretrain.models.loss import token_losses
from pretrain.models.loss_head import Head
from tests.tables import each

VOCABULARY, OF_TEACHER = 300, 280  # the student has more ids, and the teacher rows of padding
CASES = [
    {},
    {"weight": 1.0, "temperature": 2.5},
    {"top_k": 7},
    {"top_k": 7, "temperature": 0.7, "z_loss": 0.05, "smoothing": 0.1},
    {"temperature": 2.0, "z_loss": 0.05, "smoothing": 0.1, "softcap": 3.0},
]


@pytest.fixture(autouse=True)
def few_logits(monkeypatch):
    """Four targets at a time."""
    monkeypatch.setattr(chunked_cross_entropy, "LOGITS_PER_CHUNK_WITH_TEACHER", 4 * VOCABULARY)


def losses_of(teacher_targets, x, weight, bias, labels, settings=CrossEntropy()):
    return chunked_cross_entropy.chunked_cross_entropy(
        x, weight, bias, labels, settings, teacher_targets=teacher_targets
    )


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
        shares = torch.full((11,), weight, dtype=torch.promote_types(dtype, torch.float32), device=device)
        shares[[2, 7, 10]] = 0
        torch.manual_seed(0)
        head = Head(16, OF_TEACHER + 4, 1.0).to(device, dtype)
        self.teacher_targets = TeacherTargets(head, draw(11, 16), OF_TEACHER, shares, temperature, top_k)

    def found(self, z_loss, smoothing, softcap):
        losses = losses_of(
            self.teacher_targets, self.x, self.weight, self.bias, self.labels, CrossEntropy(z_loss, smoothing, softcap)
        )
        gradients = torch.autograd.grad((losses["labels"] * self.along).sum(), (self.x, self.weight, self.bias))
        return [*losses.values(), *gradients]

    def defined(self, z_loss, smoothing, softcap):
        """The same in fp64, without chunks and functions of our own but the cross-entropy."""
        exact = [one.detach().double().requires_grad_() for one in (self.x, self.weight, self.bias)]
        teacher_targets, t = self.teacher_targets, self.teacher_targets.temperature
        logits = F.linear(*exact)
        logits = logits if softcap is None else soft_capped(logits, softcap)
        of_teacher = teacher_targets.head(teacher_targets.states).detach()[:, :OF_TEACHER].double()
        p = torch.softmax(of_teacher / t, dim=-1)
        if teacher_targets.top_k is not None:
            p = p * (p >= p.topk(teacher_targets.top_k).values[:, -1:])
            p = p / p.sum(dim=-1, keepdim=True)
        p = F.pad(p, (0, VOCABULARY - OF_TEACHER))
        counted = self.labels != IGNORE_INDEX
        log_q = torch.log_softmax(logits[counted] / t, dim=-1)
        divergence, shares = torch.zeros(2, *self.labels.shape, dtype=torch.float64, device=self.x.device)
        kl = F.kl_div(log_q, p, reduction="none").sum(dim=-1)
        divergence = divergence.masked_scatter(counted, t**2 * kl * (teacher_targets.weights > 0))
        shares = shares.masked_scatter(counted, teacher_targets.weights.double())
        own = token_losses(logits, self.labels, z_loss, smoothing)
        regular = own - token_losses(logits, self.labels, 0.0, smoothing)
        loss = regular + (1 - shares) * (own - regular) + shares * divergence
        return [loss, own, divergence, *torch.autograd.grad((loss * self.along).sum(), exact)]


PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2.5e-2)]


@each("settings, precision", itertools.product(CASES, PRECISIONS))
def test_losses_and_gradients_are_those_of_the_formula(settings, precision, device):
    dtype, most = precision
    of_student = {name: settings.get(name, 0.0) for name in ("z_loss", "smoothing")} | {
        "softcap": settings.get("softcap")
    }
    case = Case(dtype, device, **{name: value for name, value in settings.items() if name not in of_student})
    pairs = zip(case.found(**of_student), case.defined(**of_student), strict=True)
    for one, other in pairs:
        assert float(((one.double() - other).norm() / other.norm()).detach()) < most


@each("dtype", [torch.float32, torch.bfloat16])
def test_a_teacher_that_is_the_student_teaches_nothing(dtype, device):
    """All ids, at any temperature: the divergence is 0, and so is its gradient, but for rounding."""
    case = Case(dtype, device)
    head = Head(24, VOCABULARY, 1.0).to(device, dtype)
    states = case.x.detach().flatten(0, 1)[case.labels.flatten() != IGNORE_INDEX]
    shares = torch.ones(11, device=device)
    for temperature in (1.0, 3.0):
        teacher_targets = TeacherTargets(head, states, VOCABULARY, shares, temperature)
        losses = losses_of(teacher_targets, case.x, head.weight, None, case.labels)
        assert losses["distillation_loss"].abs().max() < 1e-5
        (gradient,) = torch.autograd.grad(losses["labels"].sum(), case.x)
        of_text = torch.autograd.grad(token_losses(F.linear(case.x, head.weight), case.labels).sum(), case.x)[0]
        assert gradient.norm() < 1e-5 * of_text.norm()


def test_the_teacher_gets_no_gradient():
    case = Case(torch.float32)
    case.teacher_targets.states.requires_grad_()
    losses_of(case.teacher_targets, case.x, case.weight, case.bias, case.labels)["labels"].sum().backward()
    assert case.teacher_targets.head.weight.grad is case.teacher_targets.states.grad is None


def test_no_tensor_holds_the_logits_of_more_than_a_few_targets(monkeypatch):
    """Neither the student's nor the teacher's, forward and backward."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for one in result if isinstance(result, tuple | list) else [result]:
                largest = max(largest, one.numel() if torch.is_tensor(one) else 0)
            return result

    monkeypatch.setattr(chunked_cross_entropy, "LOGITS_PER_CHUNK_WITH_TEACHER", 8 * 1000)
    x, weight = torch.randn(64, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    teacher_targets = TeacherTargets(Head(5, 1000, 1.0), torch.randn(64, 5), 1000, torch.ones(64))
    with Watch():
        losses_of(teacher_targets, x, weight, None, torch.arange(64))["labels"].sum().backward()
    assert largest == 8 * 1000
