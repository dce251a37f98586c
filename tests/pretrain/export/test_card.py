"""Model cards, compared with the files that they tell of."""

import hashlib
import shutil

import pytest
import yaml
from huggingface_hub import ModelCard

from data_pipeline.corpus import open_corpus
from pretrain.export import card, import_
from pretrain.export.card import Lineage
from pretrain.models.state_dict_adapter import hf_models
from pretrain.run.metrics_file import read_metrics
from tests.support.forked import run_forked
from tests.support.in_process import done_here
from tests.support.runs import run_file
from tests.support.small_exports import new_model


@pytest.fixture(scope="module")
def run(small_corpus, tmp_path_factory):
    """A finished run of 8 steps."""
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
    found = facts(text)
    assert metadata == {"language": ["en"], "library_name": "transformers", "tags": ["t5", "encdec-pretrain"]}
    assert text.strip().startswith("# a-run\n")
    assert "8 steps on 128 rows." in text
    digest = hashlib.sha256((small_corpus / "manifest.json").read_bytes()).hexdigest()
    assert "128 rows read.\n\n- c4, en\n" in text
    assert f"- sha256 of the corpus's manifest: `{digest}`" in text
    metrics = read_metrics(run)
    loss = metrics[-1].metrics["validation/small/loss"]
    assert float(found["validation/small/loss"][0]) == pytest.approx(loss, rel=1e-5)
    settings = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert settings["run"] == {"seed": 11, "max_steps": 8}
    assert settings["model"]["d_model"] == 32
    assert str(run.parent) not in text  # no path of this machine


def test_the_card_has_nothing_of_later_steps_and_of_what_is_not_known(run, tmp_path):
    _, text = exported(run / "checkpoints/step-00000004", tmp_path / "out")
    assert "4 steps on 64 rows." in text
    assert "## Evaluation" not in text  # at step 8 alone
    import_(tmp_path / "out", tmp_path / "imported")
    metadata, text = exported(tmp_path / "imported", tmp_path / "again")
    assert "language" not in metadata
    for absent in ("## Training", "## Evaluation", "## Settings", "None"):
        assert absent not in text
    assert "## How to load it" in text


def test_the_card_of_a_run_from_other_weights_names_them_without_their_path(run, small_corpus, tmp_path):
    checkpoint, model = tmp_path / "step-00000008", new_model()
    shutil.copytree(run / "checkpoints/step-00000008", checkpoint)

    def text() -> str:
        lineage = card.lineage(checkpoint)
        return card.page(lineage, model.config, hf_models("t5")[0], open_corpus(small_corpus).tokenizer)

    assert "parameters, pretrained with encdec-pretrain.\n\n## How to load it" in text()
    config = yaml.safe_load((checkpoint / "config.yaml").read_text())
    config["checkpoint"]["init_from"] = "/home/ada/imported/t5-small"
    (checkpoint / "config.yaml").write_text(yaml.safe_dump(config))
    assert "parameters, trained with encdec-pretrain.\n\nStarts from: `t5-small`.\n" in text()
    assert "/home/ada" not in text()
    assert "base_model" not in text()


def test_the_card_names_the_datasets_of_the_hub_that_a_corpus_is_built_from(small_corpus):
    corpus, model = open_corpus(small_corpus), new_model()
    corpus.manifest.config["sources"][0]["commits"] = {"datasets/allenai/c4": "0" * 40, "me/texts": "1" * 40}
    lineage = Lineage(sources=corpus.manifest.config["sources"])
    page = card.page(lineage, model.config, hf_models("t5")[0], corpus.tokenizer)
    assert ModelCard(page).data.to_dict()["datasets"] == ["allenai/c4"]
