"""Exports of encoders get the heads of transformers' tasks; docs/how-to/fine-tune-an-encoder.md does what it says."""

import re
from pathlib import Path

import pytest
import torch

from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.sentencepiece import SentencePiece
from pretrain.huggingface import export
from tests.conftest import run
from tests.pretrain.small_models import as_at_the_start, ids
from tests.tables import each

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/fine-tune-an-encoder.md").read_text()
HEADS = {"SequenceClassification": "classifier", "TokenClassification": "classifier", "QuestionAnswering": "qa_outputs"}


@each("name", ["bert", "roberta"])
def test_an_exported_encoder_gets_a_head(name, spiece, tmp_path):
    tokenizer = Tokenizer(SentencePiece.read(spiece), ["<s>", "<mask>"], sentinels=20)
    model, inputs = as_at_the_start(name, vocab_size=tokenizer.size), ids(2, 9)
    export(model.state_dict(), model.config, tokenizer, tmp_path / "out")
    for task, head in HEADS.items():
        kind = getattr(transformers, f"AutoModelFor{task}")
        loaded, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
        new = {f"{head}.weight", f"{head}.bias"}
        if task == "SequenceClassification" and name == "roberta":  # without next sentences there is no pooler
            new |= {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
        assert (set(report["missing_keys"]), list(report["mismatched_keys"])) == (new, [])
        states = loaded.eval().base_model(inputs).last_hidden_state
        torch.testing.assert_close(states, model.encode(inputs), rtol=0, atol=2e-5)
        sum(one.square().sum() for one in loaded(inputs).to_tuple()).backward()
        assert all(one.grad.any() for one in loaded.base_model.encoder.parameters() if one.dim() > 1), task


@pytest.mark.slow
def test_the_page_fine_tunes_an_encoder(tmp_path, monkeypatch, capsys):
    for folder in ("configs", "data_pipeline"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    fewer = ["run.max_steps=20", "checkpoint.every_steps=20", "evaluation=[]", "tracking.mlflow=null"]
    for line in re.findall(r"(?m)^    (\S.*)$", PAGE.split("```")[0]):
        command, *arguments = line.split()
        done = run(command, *arguments, *(fewer if arguments[0] == "train" else []))
        assert done.returncode == 0, done.stderr
    capsys.readouterr()
    (code,) = re.findall(r"(?ms)^```python\n(.*?)^```", PAGE)
    exec(compile(code, "fine_tune.py", "exec"), {})
    (share,) = re.findall(r"right: (\d+\.\d)%", capsys.readouterr().out)
    assert float(share) > 100 * 929 / 1189  # what the answer "Old Testament" gets
