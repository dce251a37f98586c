"""The loss that a teacher weighs, compared with its formula in fp64, and its gradients with autograd's."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from distillation import wrapper
from distillation.settings import DistillationSettings
from torch import nn

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.config.model_config import ModelConfig
from pretrain.models.functional.arithmetic import soft_capped, token_losses
from pretrain.models.model import Head
from tests.support.large_tensors import LargeTensors
from tests.support.tables import each

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
MOST = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.5e-2}
VOCABULARY, OF_TEACHER = 300, 280  # the student has more ids, and the teacher rows of padding
CASES = [  # of the distillation, and of the student: z-loss, smoothing, softcap
    ({}, (0.0, 0.0, None)),
    ({"weight": 1.0, "temperature": 2.5}, (0.0, 0.0, None)),
    ({"top_k": 7}, (0.0, 0.0, None)),
    ({"top_k": 7, "temperature": 0.7}, (0.05, 0.1, None)),
    ({"temperature": 2.0}, (0.05, 0.1, 3.0)),
]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Makes even small batches take several chunks, of four targets; the last is not full."""
    monkeypatch.setattr(wrapper, "LOGITS_PER_CHUNK", 4 * VOCABULARY)


class OnlyHead(nn.Module):
    """In place of the student and of the teacher."""

    def __init__(self, head, config=None):
        super().__init__()
        self.lm_head, self.config = head, config

    def forward(self, x, labels, loss=None):
        return {"labels": self.lm_head(x, labels, self.config, loss=loss)}


class Distillation(wrapper.Distillation):
    """Of a teacher that has read the texts before: its states (batch, targets, width), and which targets are text."""

    states, in_text = torch.empty(0), torch.empty(0)

    def read(self, batch):
        return self.states, self.in_text


def losses_of(case, student, teacher, vocabulary, **settings):
    section = DistillationSettings(teacher="t", **settings)
    wrapped = Distillation(student, teacher, vocabulary, section)
    wrapped.states, wrapped.in_text = case.states, case.in_text
    return wrapped(x=case.x, labels=case.labels)


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


@each("settings, dtype, device", itertools.product(CASES, MOST, DEVICES))
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
    """Of 64 targets, forward and backward."""
    monkeypatch.setattr(wrapper, "LOGITS_PER_CHUNK", 8 * 1000)
    student = OnlyHead(Head(4, 1000, 1.0), ModelConfig(family="none"))
    case = Case(torch.float32)
    case.x, case.labels = torch.randn(2, 32, 4), torch.arange(64).view(2, 32)
    case.states, case.in_text = torch.randn(2, 32, 5), torch.ones(2, 32, dtype=torch.bool)
    with LargeTensors(1) as watched:
        losses_of(case, student, OnlyHead(Head(5, 1000, 1.0)), 1000)["labels"].sum().backward()
    assert max(one.numel() for one in watched.made.values()) == 8 * 1000
