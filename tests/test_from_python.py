"""What the packages offer to Python code: each name, each example of its page, and that the caller's process stays as
it was."""

import gc
import json
import logging
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
import torch
import yaml

import data_pipeline
import launch
import pretrain
from data_pipeline.base.processes import handlers_kept
from data_pipeline.corpus import open_corpus
from data_pipeline.loading.batch_layout import IGNORE_INDEX, BatchLayout
from data_pipeline.loading.batches import TrainingBatches
from data_pipeline.loading.reader import Reader
from data_pipeline.loading.stream import Stream
from pretrain.training.callback import Callback
from tests.conftest import TOP, write_c4, write_corpus_file
from tests.support.in_process import done_here
from tests.support.rank_processes import PROCESSES
from tests.support.runs import MODEL, run_file, train
from tests.support.tables import each

PAGE = (TOP / "docs/how-to/use-from-python.md").read_text(encoding="utf-8")
SLOW = ("numpy", "pyarrow", "pydantic", "omegaconf", "fsspec", "torch", "ray", "mlflow", "deepspeed", "psutil", "typer")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def process_state() -> list[object]:
    """What a library must leave to its caller."""
    draws = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    of_torch = [
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.nn.functional.linear,
        float(torch.tensor(1e-40) * 1),  # 0 where denormal numbers count as 0
        torch.distributed.is_initialized(),
    ]
    handlers = [signal.getsignal(number) for number in SIGNALS], signal.pthread_sigmask(signal.SIG_BLOCK, ())
    levels = [logging.getLogger(name).level for name in ("DeepSpeed", "mlflow")]
    searched = gc.isenabled(), gc.get_freeze_count() > 0
    return [handlers, levels, Path.cwd(), warnings.filters[:], *of_torch, *draws, *searched]


def examples_of(heading: str) -> str:
    """The code under a heading of the page."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return "\n".join(re.findall(r"(?ms)^```python\n(.*?)^```", section))


def test_an_import_takes_no_library_that_only_work_needs():
    code = f"import sys, data_pipeline, pretrain, launch; sys.exit(' '.join({{*{SLOW}}} & {{*sys.modules}}) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_public_name_is_there_and_documented():
    for package in (data_pipeline, pretrain, launch):
        for name in package.__all__:
            assert getattr(package, name).__doc__, name
        assert set(package.__all__) <= set(dir(package))
        with pytest.raises(AttributeError, match="'nothing'"):
            package.nothing  # noqa: B018


def test_handlers_that_a_library_sets_are_restored():
    before = process_state()
    with handlers_kept():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        assert process_state() != before
    assert process_state() == before


def test_the_pages_examples_of_runs_and_models(small_corpus, tmp_path, monkeypatch, capsys):
    """The losses of the run are those of a loop of one's own over the same rows, from one of its checkpoints."""
    monkeypatch.chdir(tmp_path)
    settings = {"seed": 5, "max_steps": 99, "directory": "run"}
    run_file(tmp_path, small_corpus, run=settings, model={**MODEL, "dropout_rate": 0.0})
    corpus, found = data_pipeline.open(small_corpus), {}
    before = process_state()
    exec(examples_of("Runs and models"), found)
    assert process_state() == before
    run = found["run"]
    assert run.state == "finished"
    assert [path.name for path in run.checkpoints] == ["step-00000004", "step-00000008"]
    losses = run.metrics().set_index("step")["train/loss"]
    assert losses.index.tolist() == list(range(1, 9))
    model, tokenizer = pretrain.load(run.checkpoints[0])
    batch = next(islice(corpus.loader("train", 16, seed=5, lanes=8), 4, None))
    losses_of_labels = model.train()(**batch)["labels"]
    assert losses_of_labels.shape == batch["labels"].shape
    own = float(losses_of_labels.detach().sum() / (batch["labels"] != IGNORE_INDEX).sum())
    assert own == pytest.approx(losses[5], rel=1e-5)
    done_here("pretrain", "export", str(run.checkpoints[0]), "exported")
    again, other = pretrain.load("exported")
    weights = again.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    text = "The <extra_id_0> is red."
    assert other.encode_with_sentinels(text) == tokenizer.encode_with_sentinels(text)
    (answer,) = model.generate([text], max_new_tokens=8)
    assert model.training
    asked = ("pretrain", "generate", "exported", text, "--max-new-tokens", "8", "--jsonl")
    assert json.loads(done_here(*asked))["whole"] == answer.whole
    capsys.readouterr()
    assert launch.local(json.loads(Path("run.yaml").read_text()), run={"max_steps": 8}) == run
    assert "8" in capsys.readouterr().out


class AtStep(Callback):
    """Does something after a step of this process; step 0: before the first."""

    do: ClassVar[Callable[[], object]]

    def __init__(self, step: int):
        self._step = step

    def before_training(self, trainer):
        if self._step == 0:
            AtStep.do()

    def after_step(self, trainer, result):
        if result.step == self._step:
            AtStep.do()


CALLBACK = [{"name": f"{__name__}:AtStep", "step": 3}]


@pytest.fixture(scope="module")
def by_command(small_corpus, tmp_path_factory):
    """A run of eight steps that `pretrain train` has made."""
    folder = tmp_path_factory.mktemp("command")
    train(run_file(folder, small_corpus))
    return pretrain.Run(folder / "run")


def of_run(run: pretrain.Run) -> list[object]:
    """What a run has computed: its losses, and the weights of its last checkpoint."""
    losses = run.metrics().set_index("step")["train/loss"].to_dict()
    weights = pretrain.load(run.checkpoints[-1])[0].state_dict()
    return [losses, {name: tensor.tolist() for name, tensor in weights.items()}]


def in_a_new_process(function: Callable[..., None], *arguments: object) -> None:
    """Runs `function` where nothing has used PyTorch yet, whose threads would keep what they were started with."""
    process = PROCESSES.Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0


@each("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops_a_run_of_this_process_and_a_second_call_resumes_it(
    small_corpus, tmp_path, by_command, number
):
    config = {**json.loads(run_file(tmp_path, small_corpus).read_text()), "callbacks": CALLBACK}
    in_a_new_process(stop_and_resume, config, number)
    assert of_run(pretrain.Run(tmp_path / "run")) == of_run(by_command)


def stop_and_resume(config: dict[str, object], number: signal.Signals) -> None:
    AtStep.do = partial(signal.raise_signal, number)
    received: list[int] = []
    signal.signal(number, lambda number, frame: received.append(number))
    before, environment = process_state(), {**os.environ}
    run = pretrain.train(config)
    assert (process_state(), {**os.environ}) == (before, environment)
    assert (run.state, [path.name for path in run.checkpoints]) == ("stopped", ["step-00000004"])
    assert received == [number] * (number != signal.SIGINT)  # Ctrl-C is over when the run has stopped
    assert pretrain.train(config) == run
    assert process_state() == before
    assert run.state == "finished"


def test_other_loops_have_the_losses_of_a_run(small_corpus, tmp_path):
    (tmp_path / "corpus").symlink_to(small_corpus)
    shared = {"model": {**MODEL, "dropout_rate": 0.0}, "batch": {"global_batch_size": 16, "micro_batch_size": 16}}
    run_file(tmp_path, small_corpus, run={"seed": 5, "max_steps": 2, "directory": "run"}, **shared)
    in_a_new_process(train_in_other_loops, tmp_path)


def train_in_other_loops(folder: Path) -> None:
    os.chdir(folder)
    pretrain.train("run.yaml")
    optimizer = {"learning_rate": 1e-3, "weight_decay": 0.0, "gradient_clipping": 0.0}
    changes = {"optimizer": optimizer, "schedule": {"name": "constant", "warmup_steps": 0}, "data": {"lanes": 64}}
    run = {"directory": "again", "max_steps": 4}
    again = pretrain.train("run.yaml", run=run, checkpoint={"init_from": "run"}, **changes)
    expected = again.metrics()["train/loss"].tolist()
    found = {"corpus": data_pipeline.open("corpus"), "islice": islice, "pretrain": pretrain}
    exec(examples_of("Other training loops"), found)
    assert found["losses"] == 3 * expected
    exported = pretrain.load("exported")[0].state_dict()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in found["model"].state_dict().items())


@each("error", [RuntimeError("boom"), KeyboardInterrupt(), data_pipeline.FailedError("disk: full")])
def test_an_error_in_a_run_of_this_process_is_raised_and_leaves_the_directory_free(small_corpus, tmp_path, error):
    in_a_new_process(fail_and_train, run_file(tmp_path, small_corpus, callbacks=CALLBACK), error)


def fail_and_train(path: Path, error: BaseException) -> None:
    def fail() -> None:
        raise error

    AtStep.do = fail
    before = process_state()
    with pytest.raises(type(error)) as raised:
        pretrain.train(path)
    assert raised.value is error
    assert process_state() == before
    if isinstance(error, RuntimeError):
        limit = torch.compiler.config.recompile_limit
        with pytest.raises(RuntimeError):
            pretrain.train(path, compute={"compile": True}, callbacks=[{**CALLBACK[0], "step": 0}])
        assert torch.compiler.config.recompile_limit == limit
        offloaded = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
        with pytest.raises(RuntimeError):
            pretrain.train(path, deepspeed=offloaded, callbacks=[{**CALLBACK[0], "step": 0}])
        assert process_state() == before
    AtStep.do = int
    assert pretrain.train(path, stop_at_step=np.int64(4)).state == "stopped"


class Counts(Callback):
    """Counts the steps that it has seen, also over a checkpoint, and starts a second run in the first."""

    def __init__(self, path: Path):
        self.path, self.seen, self.said = path, 0, list[str]()

    def after_step(self, trainer, result):
        self.seen += 1
        if result.step == 1:
            self.start_another()
            thread = threading.Thread(target=self.start_another)
            thread.start()
            thread.join()

    def start_another(self):
        try:
            pretrain.train(self.path, run={"directory": f"{self.path.parent}/another"})
        except data_pipeline.UserError as error:
            self.said.append(str(error))

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state.get("seen", 0)


def test_an_object_is_a_callback_and_one_thread_trains_at_a_time(small_corpus, tmp_path):
    in_a_new_process(train_in_a_thread, run_file(tmp_path, small_corpus))


def train_in_a_thread(path: Path) -> None:
    counts, runs = Counts(path), []
    thread = threading.Thread(
        target=lambda: runs.append(pretrain.train(path, stop_at_step=4, callbacks=[*CALLBACK, counts]))
    )
    AtStep.do = int
    thread.start()
    thread.join()
    (run,) = runs
    assert (run.state, counts.seen) == ("stopped", 4)
    assert repr(run) == f"Run('{path.parent}/run': stopped)"
    assert len(counts.said) == 2
    assert all(said.startswith("this process trains already, in another thread or around") for said in counts.said)
    again = Counts(path)
    config = {**json.loads(path.read_text()), "callbacks": (again,)}
    assert pretrain.train(config) == run
    assert (run.state, again.seen, again.said) == ("finished", 8, [])


def test_the_pages_examples_of_corpora_and_the_command_builds_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_c4(tmp_path / "c4-0.json.gz", records=120)
    write_corpus_file(tmp_path / "corpus.yaml", output="elsewhere")
    ray.shutdown()  # an earlier test may have left it, and it draws from Python's generator by itself
    before, found = process_state(), {}
    exec(examples_of("Corpora"), found)
    assert process_state() == before
    printed = capsys.readouterr().out
    assert "torch.Size([8, " in printed
    assert "<extra_id_0>" in printed
    taken, resumed = list(islice(found["corpus"].loader("train", 8, ranks=2, seed=1), 4)), next(iter(found["resumed"]))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in taken[3].items())
    done_here("data-pipeline", "build", "corpus.yaml", "tokenizer.vocab_size=400", "output=again")
    assert Path("again/manifest.json").read_bytes() == Path("corpus/manifest.json").read_bytes()
    config = yaml.safe_load(Path("corpus.yaml").read_text())
    again = data_pipeline.build(config, tokenizer={"vocab_size": 400}, output="again", repair=True)
    assert again.manifest == found["corpus"].manifest


def test_documents_are_those_of_the_files(small_corpus):
    corpus = data_pipeline.open(small_corpus)
    stored = pq.read_table(small_corpus / "documents").to_pylist()
    assert sorted(one.id for one in corpus.documents()) == sorted(row["id"] for row in stored)
    for split, entry in corpus.manifest.splits.items():
        found = list(corpus.documents(split))
        assert len(found) == entry.documents
        assert {one.id: one.text for one in found} == {
            row["id"]: row["text"] for row in stored if row["split"] == split
        }


def merged(inputs: list[int], targets: list[int], sentinels: range, eos: int) -> list[int]:
    """The row that span corruption was applied to: each sentinel of the inputs stands for its span of the targets."""
    spans: dict[int, list[int]] = {}
    for token in targets:
        if token in sentinels:
            span = spans.setdefault(token, [])
        elif token != eos:
            span.append(token)
    return [one for token in inputs if token != eos for one in spans.get(token, [token])]


@each("epoch", [0, 1])
def test_examples_restore_the_rows_and_the_function_makes_them(small_corpus, epoch):
    corpus = data_pipeline.open(small_corpus)
    vocabulary = corpus.tokenizer.vocabulary
    found = list(islice(corpus.examples("train", epoch), 20))
    rows = Reader(corpus, "train").tokens(np.arange(20)).values.tolist()
    restored = [merged(one.inputs, one.targets, vocabulary.sentinel_ids, vocabulary.eos) for one in found]
    assert restored == rows
    assert found != list(islice(corpus.examples("train", 1 - epoch), 20))
    settings = corpus.objective.model_dump(exclude={"name"})
    apply = data_pipeline.objective("span_corruption", corpus.tokenizer, seed=corpus.manifest.seed, **settings)
    for one, row in zip(found, rows, strict=True):
        assert apply(row, one.row, epoch) == (one.inputs, one.targets)
        assert (one.inputs_text, one.targets_text) == tuple(map(corpus.tokenizer.decode, (one.inputs, one.targets)))


def test_every_objective_of_one_text_is_a_function(small_corpus):
    tokenizer = data_pipeline.open(small_corpus).tokenizer
    (tokens,) = tokenizer.encode(["Thank you for inviting me to your party last week"])
    eos = tokenizer.vocabulary.eos
    inputs, targets = data_pipeline.objective("prefix_lm", tokenizer, packed=False)(tokens)
    assert [*inputs[:-1], *targets[:-1], inputs[-1], targets[-1]] == [*tokens, eos, eos]
    inputs, targets = data_pipeline.objective("causal_lm", tokenizer)(tokens)
    assert (inputs, targets) == (tokens[:-1], tokens[1:])
    # T5's example: 15 % of 20 tokens in spans of 3 is one span
    inputs, targets = data_pipeline.objective("span_corruption", tokenizer, inputs_length=64)((tokens * 2)[:20])
    assert (len(inputs), len(targets)) == (20 - 3 + 1 + 1, 1 + 3 + 1)


def test_ranks_and_a_new_process_have_the_rows_of_training(small_corpus):
    stream = Stream([open_corpus(small_corpus)], [1.0], 3, 8)
    whole = [TrainingBatches(stream, BatchLayout(0, 1, 12, 1)).loader(6, 0)]
    expected = [batch["labels"] for steps in whole for (batch,) in steps]
    corpus = data_pipeline.open(small_corpus)
    loaders = [corpus.loader("train", 6, rank=rank, ranks=2, seed=3, lanes=8) for rank in range(2)]
    for step, (first, second) in enumerate(islice(zip(*loaders, strict=False), 3)):
        assert torch.equal(torch.cat([first["labels"], second["labels"]]), expected[step])
    code = (
        "import sys, json, itertools, data_pipeline\n"
        "state = json.load(sys.stdin)\n"
        "loader = data_pipeline.open(sys.argv[1]).loader('train', 12, seed=3, lanes=8, state=state)\n"
        "print(json.dumps([batch['labels'].tolist() for batch in itertools.islice(loader, 3)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(small_corpus)],
        input=json.dumps(loaders[1].state_dict()), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == [labels.tolist() for labels in expected[3:]]


def test_a_script_whose_workers_would_start_it_again_is_told_so(small_corpus, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, data_pipeline\n"
        "try:\n"
        "    next(iter(data_pipeline.open(sys.argv[1]).loader('train', 2, workers=1)))\n"
        "except data_pipeline.FailedError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, script, small_corpus], capture_output=True, text=True)
    (line,) = done.stdout.splitlines()
    assert line.startswith("data.workers: ")
    assert line.endswith('`if __name__ == "__main__":` alone')


def test_held_out_rows_are_passed_once_and_continue(small_corpus):
    corpus = data_pipeline.open(small_corpus)
    targets = sum(len(one.targets) for one in corpus.examples("validation"))
    loader = corpus.loader("validation", 4)
    for _ in range(2):
        assert sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in loader) == targets
    first = next(iter(loader))
    rest = corpus.loader("validation", 3, state=loader.state_dict())
    left = [int((batch["labels"] != IGNORE_INDEX).sum()) for batch in (first, *rest)]
    assert sum(left) == targets
    again = list(loader)  # from the first row, although the last pass wasn't finished
    assert torch.equal(again[0]["labels"], first["labels"])
    assert len(again) == len(loader) == math.ceil(corpus.rows("validation") / 4)
    assert len(corpus.loader("train", 5, ranks=3)) == math.ceil(corpus.rows("train") / 15)
    assert len(list(rest)) == len(rest) == math.ceil(corpus.rows("validation") / 3)


def test_workers_prepare_held_out_batches_as_they_do_training_batches(small_corpus):
    corpus = data_pipeline.open(small_corpus)
    before, alone = {*multiprocessing.active_children()}, list(corpus.loader("validation", 4))
    batches = iter(corpus.loader("validation", 4, workers=2))
    made = [next(batches)]
    assert len({*multiprocessing.active_children()} - before) == 2
    made += batches
    for found, wanted in zip(made, alone, strict=True):
        assert found.keys() == wanted.keys()
        assert all(found[name].equal(wanted[name]) for name in wanted)
