"""Packages that offer an objective, a source, a rule, a step, a family, a wrapper and an optimizer, and what happens
without them."""

import json
import os
import sys
import sysconfig
from pathlib import Path
from subprocess import run as run_program

import pytest
import torch
from safetensors.torch import save_file

from data_pipeline.base.errors import UserError
from data_pipeline.base.packages import Kinds, missing, missing_under, offered
from data_pipeline.corpus.objectives.objective import Objective
from data_pipeline.dedup.registry import STEPS
from data_pipeline.sources.format import Format
from data_pipeline.sources.formats import FORMATS
from data_pipeline.text.step import Step
from pretrain.config.evaluation import HOOKS, HookSettings
from pretrain.config.model_config import ModelConfig
from pretrain.config.models import OFFERED
from pretrain.config.optimizers import OPTIMIZERS
from pretrain.config.optimizers.optimizer import OptimizerConfig
from pretrain.config.wrappers import WrapperSettings
from pretrain.models import FAMILIES
from tests.conftest import TOP, write_corpus_file
from tests.conftest import run as run_command
from tests.support.in_process import refused_here, run_here
from tests.support.runs import MODEL, install, install_page, losses, run_file
from tests.support.small_runs import run_config
from tests.support.tables import each

LINES = [f"{number} Lines of Words, in a Row" for number in range(200)]
FORTUNES = ["The River runs to the Sea", "HASTE MAKES WASTE", "Anna sings in Ulm", *LINES, f"{LINES[7]} again"]

# A second family, which transformers lacks, with a modelling file of its own.
BROUGHT = {
    "brought/settings.py": """
from typing import Literal

from my_package.settings import TemperedConfig


class BroughtConfig(TemperedConfig):
    offers = {"model": "brought.model.Brought"}
    family: Literal["brought"] = "brought"
""",
    "brought/model.py": """
from dataclasses import replace
from pathlib import Path

from brought.settings import BroughtConfig
from my_package.model import Tempered
from pretrain.models.state_dict_adapter import vocabulary
from pretrain.models.t5 import HF_MODELS as T5_MODELS

T5 = T5_MODELS[0]
CLASSES = {"AutoConfig": "modeling_brought.Config", "AutoModelForSeq2SeqLM": "modeling_brought.Brought"}


class Brought(Tempered):
    pass


def from_hf(saved, tensors):
    tied = "lm_head.weight" not in tensors
    return {**vocabulary(saved), "feed_forward": saved["feed_forward_proj"], "tie_embeddings": tied}


HF_MODELS = [
    replace(
        T5,
        config_class=BroughtConfig,
        model_type="brought",
        class_name="AutoModelForSeq2SeqLM",
        names={**T5.names, "temperature": "temperature"},
        config_to_hf=lambda config: {**T5.config_to_hf(config), "auto_map": CLASSES},
        config_from_hf=from_hf,
        code=(Path(__file__).with_name("modeling_brought.py"),),
    )
]
""",
    "brought/modeling_brought.py": """
from torch import nn, ones
from transformers import T5Config, T5ForConditionalGeneration


class Config(T5Config):
    model_type = "brought"


class Brought(T5ForConditionalGeneration):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.temperature = nn.Parameter(ones(1))
        self.lm_head.register_forward_pre_hook(lambda _, given: (given[0] * self.temperature,))
""",
}
EXPORT = """
import sys
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM

from pretrain.engine.checkpoint.index import checkpoint_in
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.export import export, import_
from pretrain.models import build, parse

run, out = map(Path, sys.argv[1:])
trained = TrainedModel.open(checkpoint_in(run))
state = {**trained.model.state_dict(), "temperature": torch.tensor([1.75])}
inputs, labels = torch.arange(3, 23).view(2, 10), torch.arange(30, 40).view(2, 5)
for family in ("tempered", "brought"):
    config = parse({**trained.model.config.model_dump(), "family": family})
    model = build(config).eval()
    model.load_state_dict(state)
    export(state, config, trained.tokenizer, out / family)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(out / family, trust_remote_code=family == "brought").eval()
    with torch.no_grad():
        ours = model.decode(torch.cat([torch.full((2, 1), config.pad_id), labels[:, :-1]], dim=1), model.encode(inputs))
        torch.testing.assert_close(theirs(input_ids=inputs, labels=labels).logits, ours, rtol=1e-5, atol=1e-5)
    print(type(theirs).__name__, import_(out / family, out / f"{family} again").family)
"""


def test_what_a_package_offers_is_built_trained_exported_and_missed(small_corpus, tmp_path, monkeypatch):
    settings = install_page("how-to/extend", tmp_path, monkeypatch)
    command = [sys.executable, "-c", "import my_package.settings"]  # the commands below import in the right order
    done = run_program(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stderr.endswith("; import pretrain.config before my_package.settings\n")
    (tmp_path / "fortunes.txt").write_text("\n%\n".join(FORTUNES))
    settings["sources"][0]["path"] = str(tmp_path / "fortunes.txt")
    tokenizer = {"path": str(small_corpus / "tokenizer/spiece.model"), "sentinels": 40}
    split = {"by": "position", "validation_fraction": 0.1}
    output = {"output": str(tmp_path / "corpus")}
    settings |= {"cleaning": None, "dedup": None, "tokenizer": tokenizer, "split": split, **output}
    path = write_corpus_file(tmp_path / "corpus.yaml", **settings)
    done = run_command("data-pipeline", "build", path)
    assert done.returncode == 0, done.stderr
    dropped = json.loads((tmp_path / "corpus/report.json").read_text())["documents"]["dropped"]
    assert dropped == {"shouting": 1, "same_opening": 1}
    run = run_file(tmp_path / "run", tmp_path / "corpus", model={**MODEL, "family": "tempered"})
    done = run_command("pretrain", "train", run)
    assert done.returncode == 0, done.stderr
    assert len(losses(run)) == 8

    (tmp_path / "second").mkdir()
    for name, code in BROUGHT.items():
        (tmp_path / "second" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "second" / name).write_text(code)
    install(
        monkeypatch,
        tmp_path / "second",
        "brought",
        {"encdec_pretrain.families": {"brought": "brought.settings:BroughtConfig"}},
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    done = run_program(
        [sys.executable, "-c", EXPORT, run.parent / "run", tmp_path / "out"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["T5ForConditionalGeneration t5", "Brought brought"]

    # this process has no such packages
    checkpoint, corpus = run.parent / "run/checkpoints/step-00000008", tmp_path / "corpus"
    family = "no installed package offers 'tempered' (entry point encdec_pretrain.families)"
    objective = "no installed package offers 'capitals' (entry point encdec_pretrain.objectives)"
    was = "it was my_package 1.0; install that"
    for place in (run.parent / "run", checkpoint):
        line = refused_here(2, "pretrain", "generate", place, "text")
        assert line == f"error: {checkpoint}/index.json: identity.model.family: {family}; {was}"
    line = refused_here(2, "data-pipeline", "show", corpus)
    assert line == f"error: {corpus}/manifest.json: rows.objective: {objective}; {was}"
    line = refused_here(2, "pretrain", "train", run)
    assert line.startswith(f"error: {run}: model.family: expected one of t5, bart, ")
    assert line.endswith(f", got 'tempered'; {family}")
    named = [("sources", "fortunes"), ("steps", "quiet"), ("steps", "openings"), ("objectives", "capitals")]
    lines = run_here("data-pipeline", "build", path).stderr.splitlines()
    for (kinds, name), line in zip(named, lines, strict=True):
        assert f"no installed package offers {name!r} (entry point encdec_pretrain.{kinds})" in line


REFUSED = """
import sys
from tests.support.in_process import refused_here

print(refused_here(2, "pretrain", "train", sys.argv[1]))
print(refused_here(2, "pretrain", "import", sys.argv[2], "out"))
print(refused_here(2, "pretrain", "train", sys.argv[3], "optimizer={name: lion, learning_rate: 1.0e-4}"))
"""


def test_what_an_example_offers_is_missed_with_the_command_that_installs_it(tmp_path):
    """A family in a run file, and in an export, which has its family's name; an optimizer. All else is installed."""
    site, export = tmp_path / "site", tmp_path / "export"
    for folder in (site, export):
        folder.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "double_decoder" not in path.name and "lion" not in path.name:
            (site / path.name).symlink_to(path)
    (export / "config.json").write_text('{"model_type": "double_decoder"}')
    save_file({"one": torch.zeros(1)}, export / "model.safetensors")
    run = TOP / "configs/experiments/comparison/double-decoder.yaml"
    paths = (
        TOP,
        TOP / "examples/diagnostics",
        TOP / "examples/molecules",
        site,
    )  # -S reads no .pth file, such as those of editable packages
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    quickstart = TOP / "configs/runs/quickstart.yaml"
    command = [sys.executable, "-S", "-c", REFUSED, run, export, quickstart]
    done = run_program(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    way = f": pip install -e {TOP}/examples/double_decoder"
    assert first.startswith(f"error: {run}: model.family: expected one of t5, bart, ")
    missing = "no installed package offers 'double_decoder' (entry point encdec_pretrain.families)"
    assert first.endswith(f", got 'double_decoder'; {missing}{way}")
    assert second.startswith(f"error: {export}/config.json: model_type is 'double_decoder', not one of t5, ")
    assert second.endswith(way)
    missing = "no installed package offers 'lion' (entry point encdec_pretrain.optimizers)"
    assert third == (
        f"error: {quickstart}: optimizer.name: expected one of adamw, adamw_scale, adafactor, muon, got 'lion'; "
        f"{missing}: pip install -e {TOP}/examples/lion"
    )


def test_a_hook_of_an_example_that_is_not_installed_is_missed_with_the_command_that_installs_it():
    way = f": pip install -e {TOP}/examples/diagnostics"
    missing = "no installed package offers 'norms' (entry point encdec_pretrain.hooks)"
    assert missing_under(["evaluation", 0], "norms") == missing + way


def test_a_command_of_an_example_that_is_not_installed_is_missed_with_the_command_that_installs_it():
    way = f": pip install -e {TOP}/examples/diagnostics"
    missed = "no installed package offers 'attention' (entry point encdec_pretrain.commands)"
    assert missing("commands", "attention") == missed + way


def test_a_wrapper_that_no_package_offers_is_missed_with_the_command_that_installs_an_example():
    absent = "no installed package offers '{}' (entry point encdec_pretrain.wrappers)"
    with pytest.raises(UserError) as refused:
        run_config(wrapper={"name": "nowhere", "teacher": "t"})
    assert str(refused.value) == f"run.yaml: wrapper: name: {absent.format('nowhere')}; there is distillation"
    way = f": pip install -e {TOP}/examples/distillation"
    assert missing("wrappers", "distillation") == absent.format("distillation") + way


OTHERS = """
from typing import Literal

from data_pipeline.dedup.step import KeyStep
from data_pipeline.corpus.objectives.span_corruption import SpanCorruption
from data_pipeline.sources.format import Format
from pretrain.config.evaluation import SamplesSettings
from pretrain.config.models import T5Config
from pretrain.config.optimizers.adamw import AdamWConfig


class MyT5(T5Config):
    pass


class MyOther(T5Config):
    family: Literal["mine"] = "mine"


class Yours(T5Config):
    family: Literal["mine"] = "mine"


class MySpans(SpanCorruption):
    pass


class MySamples(SamplesSettings):
    pass


class MyAdamW(AdamWConfig):
    pass


class MyText(Format):
    pass


class MyLines(KeyStep):
    step: Literal["lines"] = "lines"
"""
SHIPPED_NAMES = {
    "families": FAMILIES.keys() - OFFERED.keys(),
    "hooks": HOOKS,
    "optimizers": OPTIMIZERS,
    "sources": FORMATS,
    "steps": STEPS,
}


@each(
    "kinds, base, key, given, said",
    [
        ("families", ModelConfig, "family", {"t5": "MyT5"}, "of names_1 1.0 has a name that what ships has already"),
        ("objectives", Objective, "name", {"span_corruption": "MySpans"}, "has a name that what ships has already"),
        ("hooks", HookSettings, "hook", {"samples": "MySamples"}, "has a name that what ships has already"),
        ("optimizers", OptimizerConfig, "name", {"adamw": "MyAdamW"}, "has a name that what ships has already"),
        ("sources", Format, None, {"text": "MyText"}, "has a name that what ships has already"),
        ("steps", Step, "step", {"lines": "MyLines"}, "has a name that what ships has already"),
        (
            "families",
            ModelConfig,
            "family",
            {"mine": "Yours"},
            "of names_1 1.0 has a name that another package has already",
        ),
        ("families", ModelConfig, "family", {"other": "Yours"}, "has 'mine' as its family; expected 'other'"),
        ("families", ModelConfig, "family", {"lines": "MyLines"}, "is no subclass of ModelConfig"),
        ("wrappers", WrapperSettings, None, {"mine": "MyLines"}, "is no subclass of WrapperSettings"),
    ],
)
def test_a_name_that_is_taken_is_refused_in_a_line(kinds, base, key, given, said, tmp_path, monkeypatch):
    """Two packages; the first has nothing but a family "mine"."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "names_0.py").write_text(OTHERS)
    families = {"mine": "MyOther"}
    for number, (group, entries) in enumerate((("families", families), (kinds, given))):
        values = {name: f"names_0:{value}" for name, value in entries.items()}
        install(monkeypatch, tmp_path, f"names_{number}", {f"encdec_pretrain.{group}": values})
    shipped = SHIPPED_NAMES.get(kinds, ["span_corruption"])
    with pytest.raises(UserError) as refused:
        offered(kinds, base, shipped, key)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_package_that_can_not_be_imported_is_refused_where_it_is_named_and_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    install(monkeypatch, tmp_path, "broken", {"encdec_pretrain.optimizers": {"broken": "broken.settings:Broken"}})
    kinds = Kinds("optimizers", OptimizerConfig, "name", {"adamw": "pretrain.config.optimizers.adamw:AdamWConfig"})
    assert next(iter(kinds)) == "adamw"
    assert "broken" in kinds
    assert kinds["adamw"] is OPTIMIZERS["adamw"]
    with pytest.raises(UserError, match=r"^encdec_pretrain.optimizers: broken = broken.settings:Broken can't be imp"):
        kinds["broken"]
