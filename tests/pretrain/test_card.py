"""The model card of an export, compared with the files it tells of."""

import hashlib
import json

import pytest
import yaml
from huggingface_hub import ModelCard

from pretrain.checkpoint.trained import TrainedModel
from pretrain.huggingface import import_
from pretrain.huggingface.card import LICENCES
from pretrain.models.flops import Sizes, count_flops
from pretrain.run.metrics_file import read_metrics
from tests.in_process import done_here
from tests.pretrain.forked import run_forked
from tests.pretrain.runs import run_file
from tests.tables import each


@pytest.fixture(scope="module")
def run(small_corpus, tmp_path_factory):
    """A finished run of 8 steps, with a password in its run file."""
    folder = tmp_path_factory.mktemp("card")
    path = run_file(folder, small_corpus, run={"name": "a-run", "seed": 11})
    done = run_forked("train", path)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def exported(checkpoint, out, *options):
    done_here("pretrain", "export", checkpoint, out, *options)
    card = ModelCard((out / "README.md").read_text(encoding="utf-8"))
    return card.data.to_dict(), card.text


def facts(text):
    """The cells of all tables of two columns or more: the last ones by the first."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines}


def test_the_card_has_the_figures_of_run_and_corpus(run, small_corpus, tmp_path):
    metadata, text = exported(run, tmp_path / "out")
    manifest = json.loads((small_corpus / "manifest.json").read_text())
    report = json.loads((small_corpus / "report.json").read_text())
    found, train = facts(text), manifest["splits"]["train"]
    assert metadata == {"language": ["en"], "library_name": "transformers", "tags": ["t5", "encdec-pretrain"]}
    assert text.strip().startswith("# a-run\n")
    rows = 8 * 16
    assert found["steps"] == ["8"]
    assert found["tokens of text read"] == [f"{rows * train['tokens'] / train['rows']:,.0f}"]
    model = TrainedModel.open(run / "checkpoints/step-00000008").model
    objective = manifest["rows"]["objective"]
    inputs = objective["inputs_length"]
    targets = manifest["rows"]["raw_length"] - inputs + 2 * round(0.15 * manifest["rows"]["raw_length"] / 3) + 2
    flops = float(found["FLOPs of training, with rows at full length"][0])
    assert flops == pytest.approx(rows * count_flops(model, Sizes.of_example(inputs, targets)), rel=0.05)
    assert found["sha256 of its manifest"] == [
        f"`{hashlib.sha256((small_corpus / 'manifest.json').read_bytes()).hexdigest()}`"
    ]
    documents = report["documents"]
    assert found["documents"][0] == f"{documents['kept']:,} of {documents['read']:,} kept"
    assert LICENCES["c4"] in text
    assert all(one["sha256"] in text for one in manifest["inputs"])
    metrics = read_metrics(run)
    loss = metrics[-1].metrics["validation/small/loss"]
    assert float(found["validation/small/loss"][0]) == pytest.approx(loss, rel=1e-5)
    assert f"{metrics[0].metrics['train/loss']:.4f} at step 1" in text
    settings = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert settings["run"] == {"seed": 11, "max_steps": 8}
    assert settings["model"]["d_model"] == 32
    assert str(run.parent) not in text  # no path of this machine


def test_the_card_has_nothing_of_later_steps_and_of_what_is_not_known(run, tmp_path):
    _, text = exported(run / "checkpoints/step-00000004", tmp_path / "out")
    assert facts(text)["steps"] == ["4"]
    assert "at step 4." in text
    assert "## Evaluation" not in text  # at step 8 alone
    import_(tmp_path / "out", tmp_path / "imported")
    metadata, text = exported(tmp_path / "imported", tmp_path / "again")
    assert "language" not in metadata
    for absent in ("## Training", "## Evaluation", "## Settings", "tokens of text", "None"):
        assert absent not in text
    assert "## How to load it" in text


@each(
    "options, there, absent",
    [
        ((), "export it again with `--for ctranslate2`", "ct2-transformers-converter"),
        (("--for", "ctranslate2"), "ct2-transformers-converter --model DIRECTORY", "export it again"),
        (("--encoder-only",), "T5EncoderModel.from_pretrained", "T5ForConditionalGeneration"),
    ],
)
def test_the_card_says_how_to_load_what_was_exported(options, there, absent, run, tmp_path):
    metadata, text = exported(run, tmp_path / "out", *options)
    assert there in text
    assert absent not in text
    assert metadata.get("pipeline_tag") == ("feature-extraction" if "--encoder-only" in options else None)
