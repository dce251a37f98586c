"""What computes attention: `compute.attention`, and the check of this project's kernels at the start of a run."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import FailedError, UserError
from pretrain import models
from pretrain.config import RunConfig
from pretrain.config.batch import BatchPlan, BatchSection
from pretrain.config.run_config import ComputeSection
from pretrain.models.functional import attention_backends, kernel_check
from pretrain.models.functional.attention_backends import Pattern, Visibility, attend, logit_bias, using
from pretrain.models.kernels import Form
from pretrain.run.world import World
from pretrain.training import attention_check
from pretrain.training.attention_check import choose_attention, forms
from pretrain.training.prepare import prepare
from tests.support import runs
from tests.support.attention_cases import MODELS
from tests.support.attention_cases import by_definition as defined
from tests.support.rank_processes import each as each_of
from tests.support.rank_processes import on_ranks
from tests.support.runs import losses, run_file
from tests.support.tables import each

MODEL = {**runs.MODEL, "dropout_rate": 0.0}
T5 = {"family": "t5", "vocab_size": 50, "d_model": 32, "dropout_rate": 0.0, **MODELS["t5"]}
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _kept():
    with using(None):
        yield


@each(
    "backend, dtype, form",
    [
        (None, torch.float32, "sdpa"),
        (None, torch.bfloat16, "eager"),
        ("sdpa", torch.bfloat16, "sdpa"),
        ("eager", torch.float32, "eager"),
        ("triton", torch.float32, "flash"),
    ],
)
def test_each_backend_computes_attention(backend, dtype, form, monkeypatch):
    called = []
    for name in ("sdpa", "eager", "flash"):
        monkeypatch.setattr(attention_backends, name, lambda queries, *_, name=name: called.append(name) or queries)
    x, heads = torch.zeros(2, 6, 16, dtype=dtype), torch.zeros(2, 2, 6, 8, dtype=dtype)
    with using(backend):
        bias = logit_bias(x, 6, Visibility(key_mask=torch.ones(2, 6)))
        attend(heads, heads, heads, bias, False, 1.0, 0.0)
    assert called == [form]
    assert isinstance(bias, Pattern) == (backend == "triton")


@each("asked", ["sdpa", "eager"])
def test_a_run_takes_what_the_run_file_says(asked, small_corpus, tmp_path):
    """In fp32, one step each: both forms are the same attention."""
    paths = [
        run_file(tmp_path / name, small_corpus, 1, {"max_steps": 1}, compute={"attention": name}, model=MODEL)
        for name in (asked, "auto")
    ]
    assert on_ranks(1, each_of, trained, [(path,) for path in paths]) == [[asked, None]]
    assert losses(paths[0]) == pytest.approx(losses(paths[1]), rel=1e-5)


def trained(path: Any) -> str | None:
    from tests.support.runs import _train_each

    assert _train_each([(path, None)]) == [0]
    return attention_backends._backend


def a_run(asked: str, world: World | None = None) -> Any:
    config = SimpleNamespace(compute=ComputeSection(attention=asked), precision="bf16")
    plan = BatchPlan(BatchSection(global_batch_size=4), ranks=1)
    return SimpleNamespace(config=config, model=None, world=world or World.on_this_node(), plan=plan)


def alone(monkeypatch) -> None:
    """The only rank of all; several are in test_nodes.py."""
    monkeypatch.setattr(attention_check, "min_over_ranks", lambda value: value)


def chosen(monkeypatch, asked: str, problem: str | None, elsewhere: bool = False) -> tuple[str | None, str | None]:
    """On a GPU where the check finds `problem`, and perhaps one on another rank: the line for the log, the backend."""
    monkeypatch.setattr(attention_check, "find_problem", lambda *_: problem)
    alone(monkeypatch)
    if elsewhere:
        monkeypatch.setattr(attention_check, "min_over_ranks", lambda *_: 0)
    return choose_attention(a_run(asked), CUDA), attention_backends._backend


@each(
    "asked, problem, elsewhere, backend, said",
    [
        ("auto", None, False, "triton", None),
        ("triton", None, False, "triton", None),
        ("auto", "no compiler", False, "sdpa", "no compiler"),
        ("auto", None, True, "sdpa", "another rank"),  # all ranks take the same
        ("sdpa", None, False, "sdpa", None),
        ("eager", None, False, "eager", None),
    ],
)
def test_on_a_gpu_the_kernels_are_taken_after_a_check(asked, problem, elsewhere, backend, said, monkeypatch):
    line, found = chosen(monkeypatch, asked, problem, elsewhere)
    assert found == backend
    assert line is said is None or said in line


def test_the_forms_of_a_runs_own_rows_are_checked(small_corpus, tmp_path, monkeypatch):
    """Of T5: encoder, decoder and cross-attention, at the greatest lengths of the run."""
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    given = tmp_path / "given"
    child(monkeypatch, f"import sys; open({str(given)!r}, 'w').write(sys.stdin.read())")
    alone(monkeypatch)
    run = prepare(load(run_file(tmp_path, small_corpus), [], RunConfig), World.on_this_node())
    assert choose_attention(run, CUDA) is None
    assert attention_backends._backend == "triton"
    found = json.loads(given.read_text())
    settings = found["dtype"], found["device"], found["tf32"]
    assert settings == ("float32", "cuda", False)
    inputs, targets = run.lengths
    widths = {(form.queries, form.keys) for form in (Form(**one) for one in found["forms"])}
    assert widths == {(inputs, inputs), (targets, targets), (targets, inputs)}


def test_rows_that_cant_be_read_are_a_problem_and_no_end(monkeypatch):
    def damaged(*_: Any) -> None:
        raise FailedError("a damaged\nshard")

    monkeypatch.setattr(attention_check, "examples_per_row", damaged)
    alone(monkeypatch)
    line = choose_attention(a_run("auto"), CUDA)
    assert attention_backends._backend == "sdpa"
    assert line is not None
    assert line.endswith("fail: FailedError: a damaged shard; using PyTorch's attention (sdpa)")


def test_kernels_that_are_asked_for_and_fail_end_the_run_with_one_line(monkeypatch):
    with pytest.raises(FailedError, match=r"^compute.attention: .*no compiler; set auto or sdpa$"):
        chosen(monkeypatch, "triton", "no compiler")


def batches() -> list[dict[str, Tensor]]:
    """Rows with padding, and packed ones."""
    ids = torch.randint(5, 50, (2, 40), generator=torch.Generator().manual_seed(0))
    padded = {"encoder_input_ids": ids, "labels": ids, "encoder_attention_mask": torch.ones_like(ids)}
    segments = (1 + (torch.arange(40) >= 25).long()).expand(2, -1)
    return [padded, padded | {"encoder_segment_ids": segments, "decoder_segment_ids": segments}]


def problem(values: dict[str, Any]) -> str | None:
    found = forms(models.parse(values), batches(), torch.float32)
    return kernel_check.find_problem(found, "float32", "cpu", False)


def by_a_process(config: Any = T5) -> str | None:
    return attention_check.find_problem(models.parse(config), batches(), torch.float32, torch.device("cpu"))


def test_kernels_that_are_right_pass_the_check_which_is_a_process_of_its_own(monkeypatch):
    """Without Triton's interpreter there is no GPU to compile for; then in it: biases, dropout, padding, packed rows,
    causality, windows and soft caps."""
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    monkeypatch.setattr(attention_check, "_SECONDS", 3600.0)  # the interpreter is slow
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert by_a_process() is not None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    t5gemma = {"family": "t5gemma", "vocab_size": 50, "dropout_rate": 0.0, **MODELS["t5gemma"]}
    t5 = T5 | {"num_heads": 1, "dropout_rate": 0.1}
    of_both = [form for one in (t5, t5gemma) for form in forms(models.parse(one), batches(), torch.float32)]
    monkeypatch.setattr(attention_check, "forms", lambda *_: of_both)
    assert by_a_process() is None


def child(monkeypatch, code: str) -> None:
    """Puts `code` into the place of the check's process."""
    monkeypatch.setattr(attention_check, "_CHECK", [sys.executable, "-c", code])


@each(
    "code, expected",
    [
        ("import os; os.kill(os.getpid(), 11)", "the check was killed by SIGSEGV"),
        ("import os; os._exit(3)", "the check ended with exit code 3"),
        ("import sys; print('ptxas: a warning', file=sys.stderr); sys.exit('no compiler')", "no compiler"),
        ("print('a warning')", None),
        ("import signal; signal.pause()", "the check has not ended within 0.01 s"),
    ],
)
def test_a_check_that_breaks_or_hangs_is_a_problem_and_no_end(code, expected, monkeypatch):
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    child(monkeypatch, code)
    if "pause" in code:
        monkeypatch.setattr(attention_check, "_SECONDS", 0.01)
    assert by_a_process() == expected


def one_percent_more(*arguments: Any) -> Tensor:
    output = defined(*arguments)
    return output + 0.01 * output.detach()


def with_twice_the_gradient_of_the_bias(
    queries: Tensor, keys: Tensor, values: Tensor, pattern: Pattern, *settings: Any
) -> Tensor:
    diagonals = pattern.diagonals
    twice = None if diagonals is None else 2 * diagonals - diagonals.detach()
    return defined(queries, keys, values, pattern._replace(diagonals=twice), *settings)


def raising(error: Exception) -> Any:
    def form(*_: Any) -> Tensor:
        raise error

    return form


@each(
    "form, expected",
    [
        (defined, None),
        (one_percent_more, "the output: 1.0e-02 away from PyTorch's"),
        (lambda *arguments: defined(*arguments) * float("nan"), "the output: "),
        (with_twice_the_gradient_of_the_bias, "the gradient of the bias: 1.0e+00 away from PyTorch's"),
        *((raising(kind("no\ncompiler")), f"{kind.__name__}: no compiler") for kind in (RuntimeError, ImportError)),
        (raising(UserError("no\ncompiler")), "UserError: no compiler"),
    ],
)
def test_a_kernel_that_is_wrong_or_raises_is_a_problem_and_no_end(form, expected, monkeypatch):
    """Another function is in the kernels' place."""
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    own = attention_backends.flash

    def called(queries: Tensor, *others: Any) -> Tensor:
        return own(queries, *others) if queries.is_meta else form(queries, *others[:6])  # what they are joined in

    monkeypatch.setattr(attention_backends, "flash", called)
    found = problem(T5)
    assert found is expected is None or found.startswith(expected)
