"""MOSES' metrics as the wheel computes them, blanks and how they are judged, and the hook on a model."""

import gzip
import json
import random
from collections import Counter
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from molecules import decoration
from molecules.__main__ import moses_smiles, read_samples
from molecules.hook import Moses, filled, metric_name
from molecules.metrics import INSTALL, as_floats, columns, measured
from molecules.settings import MosesSettings

from data_pipeline.base.config_file import check
from data_pipeline.corpus import open_corpus
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import Answers
from tests.support.builds import built, write_corpus_file
from tests.support.small_evaluations import T5, evaluation_of

pytestmark = pytest.mark.skipif(not (find_spec("moses") and find_spec("rdkit")), reason=f"needs {INSTALL}")
BROKEN = ["", "c1ccccc", "C(C)(C)(C)(C)C", "CC("]
# by molsets' get_all_metrics, with the wheel's own test statistics, for `sample()`
BY_THE_WHEEL = {
    "valid": 0.98,
    "unique@1000": 1.0,
    "unique@10000": 1.0,
    "FCD/Test": 6.966109966341193,
    "SNN/Test": 1.0,
    "Frag/Test": 0.9892494954182948,
    "Scaf/Test": 0.2828075347118406,
    "FCD/TestSF": 7.279949352966625,
    "SNN/TestSF": 0.5798963361552784,
    "Frag/TestSF": 0.9892231880482896,
    "Scaf/TestSF": 0.0,
    "IntDiv": 0.8540386314046526,
    "IntDiv2": 0.8363408417812572,
    "Filters": 1.0,
    "logP": 0.06536480386261528,
    "SA": 0.034050741174510187,
    "QED": 0.011634255226476362,
    "weight": 1.4300864602267187,
    "Novelty": 1.0,
}


def sample() -> list[str]:
    return [*random.Random(0).sample(moses_smiles("test"), 196), *BROKEN]


def test_metrics_are_those_of_the_wheels_own_code():
    found = measured(sample())
    expected = {name: BY_THE_WHEEL[name] for name in found}
    assert [*found] == columns()
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_all_columns_are_those_of_the_wheels_own_code():
    found = measured(sample(), everything=True)
    assert [*found] == columns(everything=True)
    assert found == pytest.approx(BY_THE_WHEEL, rel=1e-6)


def test_counts_become_floats_whose_products_do_not_overflow():
    found = as_floats({"frag": Counter(a=2_000_000_000, b=3), "mu": [1]})
    assert found == {"frag": {"a": 2e9, "b": 3.0}, "mu": [1]}
    assert {type(count) for count in found["frag"].values()} == {float}


def test_without_two_valid_molecules_there_is_nothing_else_to_measure():
    assert measured([*BROKEN, "CCO"]) == {"valid": pytest.approx(0.2)}


def test_a_blank_and_its_rest_are_the_molecule():
    smiles = random.Random(1).sample(moses_smiles("test_scaffolds"), 200)
    for blank in decoration.BLANKS.values():
        blanks = [blank(one, random.Random(one)) for one in smiles]
        assert sum(one is not None for one in blanks) > 150
        for one, whole in zip(blanks, smiles, strict=True):
            if one is not None:
                assert one.before + one.middle + one.after == whole
                assert one.middle
                assert one.prompt == f"{one.before}<extra_id_0>{one.after}"
    for one in filter(None, (decoration.branch(smile, random.Random(smile)) for smile in smiles)):
        assert (one.before[-1], one.after[0], one.middle.count("(")) == ("(", ")", one.middle.count(")"))
    assert decoration.branch("c1ccc(-c2ccccc2)cc1", random.Random(0)).middle == "-c2ccccc2"
    assert decoration.branch("c1cc(C2CC2)c(OCc3ccccc3)cc1", random.Random(0)) is not None
    assert decoration.branch("CC(C1)CC1", random.Random(0)) is None  # the ring closes outside
    assert decoration.branch("CCO", random.Random(0)) is None


def test_answers_are_judged_by_validity_scaffold_and_the_molecule_itself():
    blanks = [decoration.Blank("c1ccc(", "O", ")cc1"), decoration.Blank("C", "CC", "N")]
    spans = [["O", "O", "C(=O", "F"], ["CC", "=", "(", "C"]]
    # 3 and 3 are valid (C=N, too); the second molecule has no scaffold; 3 are the molecules; 2 and 3 differ
    assert decoration.judged(blanks, spans) == ["75.0", "37.5", "37.5", "2.5"]


def test_samples_are_read_from_text_and_from_answers(tmp_path):
    (tmp_path / "one.txt").write_text("CCO\n\nCC\n")
    (tmp_path / "one.txt.gz").write_bytes(gzip.compress(b"CCO\n\nCC\n"))
    answers = [{"text": "<extra_id_0>", "generated": f"<extra_id_0>{one}"} for one in ("CCO", "", "CC")]
    (tmp_path / "one.jsonl").write_text("".join(json.dumps(one) + "\n" for one in answers))
    for name in ("one.txt", "one.txt.gz", "one.jsonl"):
        assert list(read_samples(tmp_path / name)) == ["CCO", "", "CC"]
    assert filled("c1ccc(<extra_id_0>)cc1", "<extra_id_0>O") == "c1ccc(O)cc1"
    assert filled("", "CCO") == "CCO"
    assert (metric_name("unique@10000"), metric_name("FCD/TestSF")) == ("unique_at_10000", "fcd_testsf")


@pytest.fixture
def evaluation(tmp_path):
    """The evaluation of a model with random weights, whose tokens are the symbols of 400 training molecules."""
    (tmp_path / "train.txt").write_text("".join(f"{one}\n" for one in moses_smiles("train")[:400]))
    source = {"format": "text", "path": str(tmp_path / "train.txt"), "options": {"sample_by": "line"}}
    changes = {"sources": [source], "tokenizer": {"kind": "symbols", "sentinels": 16}, "cleaning": {"profile": "none"}}
    corpus = open_corpus(built(write_corpus_file(tmp_path / "molecules.yaml", output=str(tmp_path / "out"), **changes)))
    return evaluation_of(T5, corpus.tokenizer, {})[1]


def test_the_hook_measures_what_a_model_writes(evaluation):
    settings = check({"samples": 600, "max_new_tokens": 3}, MosesSettings, "hook")
    result = Moses(settings).evaluate(evaluation)
    table = result.tables["moses"]
    assert len(table) == 10
    with evaluation.whole_model() as model:
        trained = TrainedModel(model, evaluation.held_out.tokenizer)
        generation = GenerationSettings(max_new_tokens=3, temperature=1.0)
        smiles = [
            filled("<extra_id_0>", one.generated)
            for one in Answers(trained, ["<extra_id_0>"], generation, samples=600).following(0)
        ]
    assert [row["molecule"] for row in table] == smiles[:10]
    assert result.metrics == {f"moses/{metric_name(name)}": value for name, value in measured(smiles).items()}
    assert "600 molecules" in result.lines[0]


@pytest.mark.slow
def test_a_model_that_writes_training_molecules_has_the_floor_of_fcd_and_nothing_new(evaluation, monkeypatch):
    smiles = random.Random(0).sample(moses_smiles("train"), 30_000)
    answers = SimpleNamespace(following=lambda start: [SimpleNamespace(generated=one) for one in smiles[start:]])
    monkeypatch.setattr("molecules.hook.Answers", lambda *arguments, **options: answers)
    found = Moses(check({"samples": 30_000}, MosesSettings, "hook")).evaluate(evaluation).metrics
    unique = dict.fromkeys(("moses/unique_at_1000", "moses/unique_at_10000"), 1)
    expected = {"moses/valid": 1, **unique, "moses/fcd_test": 0.0499, "moses/fcd_testsf": 0.5269}
    assert found == pytest.approx({**expected, "moses/novelty": 0.0001}, abs=5e-5)  # recorded to four decimals
