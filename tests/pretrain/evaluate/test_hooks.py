"""Hooks: when they run, what they leave, and that none of them ends or changes a run."""

import contextlib
import inspect
import json
import math
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_pipeline.base.config_file import check
from data_pipeline.base.errors import UserError
from data_pipeline.base.packages import Kinds
from data_pipeline.corpus import open_corpus
from data_pipeline.loading.batch_layout import BatchLayout
from pretrain.config.evaluation import HookSettings, SamplesSettings, ValidationLossSettings
from pretrain.engine.checkpoint.index import checkpoint_in
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate import hook as hooks
from pretrain.evaluate.hook import Collectives, EvalResult, Evaluation, Outcome, StepHook, ValidationData
from pretrain.evaluate.hook_runner import HookRunner
from pretrain.loaded import PretrainedModel
from pretrain.models.functional import arithmetic
from pretrain.models.model import Head, recording_hits
from pretrain.run.metrics_file import read_metrics
from pretrain.tools.evaluate import Standalone
from tests.conftest import TOP
from tests.conftest import run as run_command
from tests.support.forked import run_forked
from tests.support.in_process import done_here
from tests.support.rank_processes import each, on_ranks
from tests.support.runs import install, install_page, losses, run_file, train_ranks
from tests.support.small_evaluations import T5, evaluated, evaluated_alone, evaluation_of
from tests.support.small_models import as_at_the_start, ids, logits_of
from tests.support.small_runs import engine_of, micro_batches, own_layout, run_config
from tests.support.tables import each as table

CPU = torch.device("cpu")
# Weights are spread over the ranks however small they are: the ranks exchange them in each forward.
SHARDED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


def _ended_on_each(case: str) -> Outcome[str]:
    alone = torch.distributed.get_rank() == 0
    collectives = Collectives(0.3 if case == "hangs" and alone else 3600, CPU)

    def hook() -> str:
        with collectives.guard():
            torch.distributed.all_reduce(torch.ones(1))
        if case == "raises" and alone:
            raise ValueError("no such row\nsecond line")
        if case == "hangs" and alone:
            time.sleep(3600)
        if case == "calls less" and alone:
            return "done"
        with collectives.guard():
            torch.distributed.all_reduce(torch.ones(1))
        if case == "raises at the end" and alone:
            raise ValueError("too late")
        return "done"

    return collectives.run(hook)


def test_all_ranks_leave_a_hook_together():
    """Whatever rank 0 does alone, and ready for the next hook. Only the rank that raised knows why."""
    cases = ["returns", "raises", "hangs", "calls less", "raises at the end", "returns"]
    first, second = on_ranks(2, each, _ended_on_each, [(case,) for case in cases])
    assert [outcome.value for outcome in first] == ["done", None, None, None, None, "done"]
    assert [outcome.value for outcome in second] == ["done", None, None, None, None, "done"]
    others = "failed on another rank"
    numbers = "its ranks made different numbers of collective calls"
    assert [outcome.error for outcome in second[1:5]] == [others, others, numbers, others]
    assert [outcome.error for outcome in first[1:5]] == [
        "ValueError: no such row",
        "hung: no end after 0.6 s, twice its budget",
        numbers,
        "ValueError: too late",
    ]
    assert "second line" in first[1].traceback


class Leaving:
    """An engine whose model is put back while the `number`-th Python function that this calls gets the alarm of a
    spent budget. `calls`: how many it has called."""

    def __init__(self, engine: Any):
        self.engine, self.module = engine, engine.module
        self.device, self.losses = engine.device, engine.losses
        self.number = self.calls = 0

    @contextlib.contextmanager
    def whole(self) -> Iterator[Any]:
        with self.engine.whole() as model:
            yield model
            self.calls = 0
            sys.setprofile(self._count)
        sys.setprofile(None)

    def _count(self, frame: Any, event: str, _: Any) -> None:
        self.calls += event == "call"
        if self.calls == self.number and event == "call":
            signal.raise_signal(signal.SIGALRM)


def left_at_any_moment() -> tuple[set[str | None], list[Any]]:
    """How hooks end, and how the model is after each: the modules in another mode than before, the parameters that are
    still whole, and the modules that train inside the block."""
    engine = engine_of(run_config(3, {"num_encoder_layers": 1, "num_decoder_layers": 1}, SHARDED["zero_optimization"]))
    model, (batch, _) = engine.deepspeed.module, micro_batches(own_layout(), 0)
    model.encoder.layers[0].eval()  # as one that is frozen
    modes, leaving = {name: one.training for name, one in model.named_modules()}, Leaving(engine)
    ended, found = set(), []

    def hook() -> str:
        with evaluation.whole_model() as whole:
            evaluation.losses_and_hits(batch, alone=True)
            inside.extend(name for name, one in whole.named_modules() if one.training)
        return "done"

    def run(number: int) -> None:
        nonlocal evaluation
        leaving.number, collectives = number, Collectives(3600, CPU)
        evaluation = Evaluation(leaving, ValidationData({}, None, False, own_layout()), 0, collectives)
        ended.add(collectives.run(hook).error)
        sys.setprofile(None)
        wrong = [name for name, one in model.named_modules() if one.training != modes[name]]
        whole = [name for name, one in model.named_parameters() if one.ds_status.name != "NOT_AVAILABLE"]
        found.append((wrong, whole, [*inside]))

    inside: list[str] = []
    evaluation: Any = None
    with torch.no_grad():
        run(0)
        assert leaving.calls > 100
        for number in [*range(1, leaving.calls, leaving.calls // 16), leaving.calls]:
            run(number)
    assert math.isfinite(engine.step(0, [0], [batch]).loss)
    engine.close()
    return ended, found


def test_a_model_is_put_back_whenever_the_budget_ends():
    """At ZeRO-3, on two ranks: no module is left in evaluation mode, or in training inside the block, and no parameter
    stays gathered."""
    ended, found = on_ranks(2, left_at_any_moment)[0]
    assert ended == {None, "hung: no end after 7200 s, twice its budget"}
    assert len(found) > 16
    assert [one for one in found if one != ([], [], [])] == []


@table("took, left", [(4000, 5000), (9001, 0)])
def test_an_alarm_that_was_set_before_a_hook_goes_off_when_it_would_have(monkeypatch, took, left):
    """Such as that of pytest-timeout. It was to go off after 9000 s, and the hook takes `took`."""
    now, rang = [0.0], []
    monkeypatch.setattr(hooks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    handler, own = signal.signal(signal.SIGALRM, lambda *_: rang.append(1)), signal.setitimer(signal.ITIMER_REAL, 9000)

    def hook():
        now[0] += took
        assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(7200, abs=120)  # what this machine itself took
        return "done"

    try:
        assert Collectives(3600, CPU, alone=True).run(hook).value == "done"
        assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(left, abs=120)
        while took > 9000 and not rang:
            time.sleep(0.01)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *own)
        signal.signal(signal.SIGALRM, handler)
    assert len(rang) == (took > 9000)


def test_a_hook_that_is_due_twice_runs_once(tmp_path, monkeypatch):
    """Hooks every 2 and every 3 steps: each once at 2, 3, 4 and 6, and once at the end."""
    ran = []
    monkeypatch.setattr(
        HookRunner, "_evaluated", lambda self, settings, hook, model, step: ran.append(step) or EvalResult()
    )
    hooks = HookRunner([ValidationLossSettings(every_steps=every) for every in (2, 3)], SimpleNamespace(), tmp_path)
    for step in range(1, 8):
        list(hooks.after(SimpleNamespace(), step, last=step == 7))
    assert ran == [2, 3, 4, 6, 7]
    ran.clear()  # other settings make another hook
    hooks = HookRunner([SamplesSettings(number=1), SamplesSettings(number=2)], SimpleNamespace(), tmp_path)
    list(hooks.after(SimpleNamespace(), 500, last=False))
    assert ran == [500, 500]


PACKAGE = '''
import signal
import time
from types import SimpleNamespace
from typing import ClassVar, Literal
from pretrain.config.evaluation import HookSettings

class TroubleSettings(HookSettings):
    """Trouble."""
    implementation: ClassVar[str] = "trouble.Trouble"
    hook: Literal["trouble"] = "trouble"
    what: Literal["raise", "hang", "dawdle", "leave"]
    """What it does."""
    on_rank: int = 0
    """The rank that does it."""

skipped = 0

def dawdle():
    global skipped
    skipped += 700

def hang():
    signal.setitimer(signal.ITIMER_REAL, 0.01)  # the alarm that would go off after twice the budget
    time.sleep(3600)

class Trouble:
    def __init__(self, settings):
        from pretrain.evaluate import hook as hooks, hook_runner
        self.settings = settings
        hooks.time = hook_runner.time = SimpleNamespace(monotonic=lambda: time.monotonic() + skipped)

    def evaluate(self, evaluation):
        import torch
        from pretrain.evaluate.hook import EvalResult
        batches = 0
        for corpus in evaluation.held_out.corpora.values():
            for batch in evaluation.batches(corpus):
                evaluation.losses(batch)
                batches += 1
                if evaluation.held_out.layout.rank == self.settings.on_rank:
                    {"raise": lambda: 1 // 0, "hang": hang, "dawdle": dawdle,
                     "leave": lambda: torch.manual_seed(0)}[self.settings.what]()
        return EvalResult({"trouble/batches": batches})
'''


@pytest.fixture
def package(tmp_path_factory, monkeypatch) -> Callable[[], Path]:
    """Installs a package that offers a hook; returns the folder that it is in."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "trouble.py").write_text(PACKAGE)

    def installed() -> Path:
        install(monkeypatch, folder, "trouble", {"encdec_pretrain.hooks": {"trouble": "trouble:TroubleSettings"}})
        return folder

    return installed


@pytest.mark.slow
def test_a_package_of_ones_own_offers_hooks_and_their_trouble_is_not_the_runs(package, small_corpus, tmp_path):
    """At ZeRO-3, whose ranks exchange weights in each forward: what one rank does alone ends the hook on both."""
    plain = run_file(tmp_path / "plain", small_corpus, deepspeed=SHARDED)
    assert train_ranks(plain, 2) == [0, 0]
    troubles = [{"what": "raise", "on_rank": 1}, {"what": "hang", "budget_seconds": 1800}]
    troubles += [{"what": "dawdle", "budget_seconds": 1300}, {"what": "leave"}]
    hooks = [{"hook": "trouble", "every_steps": 5, **trouble} for trouble in troubles]
    hooks.append({"hook": "validation_loss"})
    path = run_file(tmp_path / "trouble", small_corpus, evaluation=hooks, deepspeed=SHARDED)
    package()
    done = run_command("launch", "local", path, "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert losses(path) == losses(plain)
    said = [line.partition("  ")[2] for line in done.stdout.splitlines() if "warning: " in line]
    one_time = [
        f"warning: evaluation by trouble failed on rank {rank}: {error}; training continues"
        for rank, error in (
            (1, "ZeroDivisionError: integer division or modulo by zero"),
            (0, "hung: no end after 3600 s, twice its budget"),
        )
    ]
    assert [said[0], said[1], said[3], said[4]] == [*one_time, *one_time]
    budget = r"its budget of 1300 s \(evaluation\.budget_seconds\)"
    cut = re.match(rf"warning: trouble was cut after (.*) s, {budget}", said[2])
    assert cut, said[2]
    assert 2100 <= float(cut[1]) < 2800  # at the end of a batch
    kept = tmp_path / "trouble/run/artifacts/evaluation/failures/trouble-step-00000005-rank-1.txt"
    assert "1 // 0" in kept.read_text()


def test_the_hook_of_the_page_runs(small_corpus, tmp_path, monkeypatch):
    evaluation = install_page("how-to/write-a-hook", tmp_path, monkeypatch)["evaluation"]
    path = run_file(tmp_path / "run-file", small_corpus, evaluation=evaluation)
    done = run_command("pretrain", "train", path)
    assert done.returncode == 0, done.stderr
    (copied,) = [
        row.metrics["copied_tokens"] for row in read_metrics(path.parent / "run") if "copied_tokens" in row.metrics
    ]
    assert 0 < copied < 1
    page = (TOP / "docs/how-to/write-a-hook.md").read_text()
    assert f"`during({list(inspect.signature(StepHook.during).parameters)[1]})`" in page


def test_the_metric_of_generated_texts_on_the_page(small_corpus):
    """The share of samples from which pairs of brackets can be removed until none is left."""
    page = (TOP / "docs/how-to/write-a-hook.md").read_text()
    (code,) = re.findall(r"```python\n# my_package/balanced.py\n(.*?)```", page, re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    model, evaluation = evaluation_of(T5, open_corpus(small_corpus).tokenizer)
    metric = found["Balanced"](None).evaluate(evaluation).metrics["balanced"]
    trained = PretrainedModel(TrainedModel(model, evaluation.held_out.tokenizer))
    balanced = 0
    for seed in range(4):
        for one in trained.generate("", samples=25, seed=seed, max_new_tokens=64):
            brackets = re.sub(r"[^()]", "", one.generated)
            while "()" in brackets:
                brackets = brackets.replace("()", "")
            balanced += not brackets
    assert metric == balanced / 100
    assert 0 < metric < 1
    assert [found["is_balanced"](text) for text in ("", "C(=O)(N)", ")(", "(()")] == [True, True, False, False]


def test_a_hook_that_is_unknown_or_broken_is_one_line(package, small_corpus, tmp_path, monkeypatch):
    path = run_file(tmp_path, small_corpus, evaluation=[{"hook": "trouble"}])
    unknown = run_forked("train", path)
    assert unknown.returncode == 2
    assert "evaluation.0.hook: expected one of validation_loss, input_use, " in unknown.stderr
    assert "got 'trouble'" in unknown.stderr
    monkeypatch.syspath_prepend(package())
    with pytest.raises(UserError) as lacking:
        check({"hook": "trouble"}, Kinds("hooks", HookSettings, "hook", {})["trouble"], "run.yaml")
    assert str(lacking.value) == "run.yaml: what: missing (what it does)"


class Raising:
    """A hook that raises before the step, after it, or never."""

    def __init__(self, when: str):
        self.when = when

    @contextlib.contextmanager
    def during(self, trainer: Any) -> Iterator[None]:
        if self.when == "before":
            raise ValueError("before the step")
        yield
        if self.when == "after":
            raise ValueError("after the step")

    def evaluate(self, evaluation: Any) -> EvalResult:
        return EvalResult({"found": 1.0})


def test_a_hook_that_raises_around_a_step_fails_alone(tmp_path):
    """The step is taken, the other hooks see it, and the next evaluation of the hook is sound."""
    held_out = SimpleNamespace(layout=BatchLayout(0, 1, 1, 1))
    hooks = HookRunner(
        [SamplesSettings(every_steps=1), SamplesSettings(every_steps=1, budget_seconds=9_000)], held_out, tmp_path
    )
    first, other = Raising("before"), Raising("never")
    hooks._hooks = [(settings, hook) for (settings, _), hook in zip(hooks._hooks, (first, other), strict=True)]
    steps = []
    for step, when in enumerate(("before", "after", "never"), 1):
        first.when = when
        with hooks.during(SimpleNamespace(), step, last=False):
            steps.append(step)
        failed, sound = hooks.after(SimpleNamespace(device=torch.device("cpu")), step, last=False)
        assert sound.metrics["found"] == 1.0
        assert failed.failed == (when != "never")
        if failed.failed:
            assert failed.lines == [f"warning: evaluation by samples failed: ValueError: {when} the step"]
    assert steps == [1, 2, 3]


@torch.no_grad()
def test_hits_are_where_the_target_is_the_likeliest_id():
    """For a model whose head sees all positions, and for one whose head sees only the masked ones."""
    for name in ("t5", "bert"):
        model, inputs, labels = as_at_the_start(name), ids(4, 6), ids(4, 6, seed=1)
        labels[:, 4:] = -100
        labels[0, 0] = logits_of(model, inputs, labels)[0, 0].argmax()  # which T5 sees only after it
        evaluation = evaluated_alone(Standalone(TrainedModel(model, None)), None, {}, 4)
        _, hits = evaluation.losses_and_hits({"encoder_input_ids": inputs, "labels": labels})
        assert hits[0, 0]
        assert torch.equal(hits, logits_of(model, inputs, labels).argmax(dim=-1) == labels)


@torch.no_grad()
def test_hits_need_the_logits_of_a_few_targets_at_a_time(monkeypatch):
    """Of 24 targets, in chunks of 5: the hits and losses are those of one chunk."""
    model, inputs, labels = as_at_the_start("t5"), ids(4, 6), ids(4, 6, seed=1)
    labels[0, 0] = logits_of(model, inputs, labels)[0, 0].argmax()
    evaluation = evaluated_alone(Standalone(TrainedModel(model, None)), None, {}, 4)
    losses, hits = evaluation.losses_and_hits({"encoder_input_ids": inputs, "labels": labels})
    (head,) = (module for module in model.modules() if isinstance(module, Head))
    logits, sizes = head._logits, []
    monkeypatch.setattr(head, "_logits", lambda x: sizes.append(len(x)) or logits(x))
    monkeypatch.setattr(arithmetic, "LOGITS_PER_CHUNK", 5 * len(head.weight))
    in_chunks, again = evaluation.losses_and_hits({"encoder_input_ids": inputs, "labels": labels})
    assert sizes == [5, 5, 5, 5, 4]
    torch.testing.assert_close(in_chunks["labels"], losses["labels"])
    assert torch.equal(again, hits)
    assert hits[0, 0]


@torch.no_grad()
def test_what_is_recorded_of_a_model_is_of_none_other():
    """Hits of two models, one inside the block of the other, and nothing after the blocks."""
    models = [as_at_the_start(name) for name in ("t5", "decoder_only")]
    inputs = ids(4, 6)
    with contextlib.ExitStack() as stack:
        hits = [stack.enter_context(recording_hits(model)) for model in models]
        models[1](encoder_input_ids=inputs, labels=inputs)
        assert [len(found) for found in hits] == [0, 1]
    models[1](encoder_input_ids=inputs, labels=inputs)
    assert len(hits[1]) == 1


@pytest.mark.slow
def test_samples_are_a_table_that_grows(small_corpus, tmp_path):
    """At ZeRO-3, then on one rank."""
    hooks = [{"hook": "samples", "every_steps": 2, "number": 3}]
    path = run_file(tmp_path, small_corpus, evaluation=hooks, deepspeed=SHARDED)
    assert train_ranks(path, 2, stop=5) == [75, 75]
    assert train_ranks(path, 1) == [0]
    assert read_metrics(tmp_path / "run")[-1].metrics["evaluation/samples/seconds"] > 0
    content = json.loads((tmp_path / "run/artifacts/evaluation/samples.json").read_text())
    columns = ["step", "corpus", "given", "written", "original"]
    assert content["columns"] == columns
    samples = [dict(zip(columns, row, strict=True)) for row in content["data"]]
    assert [row["step"] for row in samples] == [step for step in (2, 4, 6, 8) for _ in range(3)]
    for row in samples:
        begin = row["given"].partition("<extra_id_0>")[0].strip()
        assert row["written"].startswith(f"{begin} [")
        assert row["original"].startswith(begin)


def test_a_checkpoint_is_evaluated_as_in_its_run(small_corpus, tmp_path):
    """With the run's corpora or given ones, on one rank and on two, of which rank 0 prints."""
    hooks = [{"hook": "validation_loss"}]
    path = run_file(tmp_path, small_corpus, evaluation=hooks, run={"max_steps": 2})
    assert train_ranks(path, 2) == [0, 0]
    logged = read_metrics(tmp_path / "run")[-1].metrics
    wanted = {name: value for name, value in logged.items() if name.startswith("validation/")}
    alone = run_forked("evaluate", tmp_path / "run", "--suite", "full", "--json", "--out", tmp_path / "out")
    assert alone.returncode == 0, alone.stderr
    found = json.loads(alone.stdout)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)
    assert (tmp_path / "out/samples.json").exists()
    samples = run_forked("evaluate", tmp_path / "run", "--hook", "{hook: samples, number: 2}")
    assert samples.stdout.count("sample of small: ") == 2
    first, second = on_ranks(2, evaluated, checkpoint_in(tmp_path / "run"), [small_corpus], joined=False)
    assert second == ""
    on_two = json.loads(first)
    assert {name: on_two[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(UserError, match=f"^--corpus: {small_corpus} and {small_corpus} are both named 'small'; "):
        evaluated(checkpoint_in(tmp_path / "run"), [small_corpus, small_corpus])
    for hook, line in (
        ("lss", "error: --hook: expected one of validation_loss,"),
        ("text_to_text", "error: --hook text_to_text: corpus: small has no text-to-text pairs"),
        ("{hook: text_to_text, metrics: [bleu", "error: "),
    ):
        wrong = run_forked("evaluate", tmp_path / "run", "--hook", hook)
        assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1)
        assert wrong.stderr.startswith(line)
    done_here("pretrain", "picture", tmp_path / "run")
    assert (tmp_path / "run/picture.png").read_bytes().startswith(b"\x89PNG")
