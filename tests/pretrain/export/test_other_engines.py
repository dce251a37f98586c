"""Exports in engines other than transformers: the same answers, with the same probabilities; and encoders alone."""

import json
import re

import ctranslate2
import pytest
import torch
import transformers
from ctranslate2.converters import TransformersConverter

from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import _answer, answer_texts
from pretrain.export import export
from tests.conftest import TOP, run
from tests.support.exported import randomise
from tests.support.small_models import as_at_the_start, ids
from tests.support.tables import each

TEXTS = ["Unless required by <extra_id_0> law", "You may add Your own notice", "a"]
SENTINELS = 20
STEPS = 8


KINDS = {"v1.0": "t5, tied", "v1.1": "t5", "bart": "bart"}


def model_of(tokenizer, kind, **changes):
    """A model whose logits matter: large enough that an output scaled by √32 shows."""
    ids = {"vocab_size": tokenizer.size, "pad_id": tokenizer.vocabulary.pad, "eos_id": tokenizer.vocabulary.eos}
    return randomise(as_at_the_start(KINDS[kind], **ids, **changes), std=0.3)


def tokenizer_of(spiece, kind):
    return Tokenizer(SentencePiece.read(spiece), ["<s>"] if kind == "bart" else [], SENTINELS)


def exported(tmp_path, spiece, kind, **changes):
    tokenizer = tokenizer_of(spiece, kind)
    model = model_of(tokenizer, kind, **changes)
    export(model.state_dict(), model.config, tokenizer, tmp_path / "exported")
    return model, tmp_path / "exported"


def for_ctranslate2(folder, spiece, kind, monkeypatch, **changes):
    """A model, and the copy of its export that the code of docs/reference/serving.md writes for CTranslate2."""
    model, _ = exported(folder, spiece, kind, **changes)
    page = (TOP / "docs/reference/serving.md").read_text().split("## CTranslate2")[1].split("\n## ")[0]
    (code,) = re.findall(r"(?ms)^```python\n(.*?)^```", page)
    monkeypatch.chdir(folder)
    exec(compile(code, "for_ctranslate2.py", "exec"), {})
    return model, folder / "for-ctranslate2"


def in_ctranslate2(tmp_path, directory):
    """The export in `directory`, converted and opened as docs/reference/serving.md says, and its tokenizer."""
    TransformersConverter(str(directory)).convert(str(tmp_path / "converted"), quantization="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    translator = ctranslate2.Translator(str(tmp_path / "converted"), inter_threads=1, intra_threads=1)
    return translator, lambda text: tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)


def largest_difference(tmp_path, directory, model):
    """By how much CTranslate2's log-probabilities of some tokens, for each text by itself, differ from ours at most."""
    translator, encode = in_ctranslate2(tmp_path, directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    sources = [tokenizer(text).input_ids for text in TEXTS]
    labels = torch.randint(3, 300, (len(TEXTS), STEPS), generator=torch.Generator().manual_seed(0))
    theirs = translator.score_batch(
        [encode(text) for text in TEXTS],
        [tokenizer.convert_ids_to_tokens(tokens) for tokens in labels],
    )
    with torch.no_grad():
        ours = [-model(torch.tensor([ids]), labels[[row]])["labels"][0] for row, ids in enumerate(sources)]
    return max(
        (torch.tensor(there.log_probs[:STEPS]) - here).abs().max().item()
        for there, here in zip(theirs, ours, strict=True)
    )


@each("kind", ["v1.0", "bart"])
def test_ctranslate2_reads_exports_with_the_same_probabilities(kind, spiece, tmp_path):
    model, directory = exported(tmp_path, spiece, kind)
    assert largest_difference(tmp_path, directory, model) < 1e-4


@each("kind", ["v1.0", "v1.1", "bart"])
def test_ctranslate2_reads_the_pages_copy_with_the_same_probabilities(kind, spiece, tmp_path, monkeypatch):
    model, directory = for_ctranslate2(tmp_path, spiece, kind, monkeypatch)
    assert largest_difference(tmp_path, directory, model) < 1e-4


@pytest.mark.slow
@each("kind", ["v1.0", "v1.1", "bart"])
def test_answers_by_ctranslate2_are_those_of_pytorch(kind, spiece, tmp_path, monkeypatch):
    """Beams without rows that pad the vocabulary: CTranslate2 doesn't have them, and random ones are likely."""
    for beams, multiple in ((1, 128), (3, 1)):
        folder = tmp_path / str(beams)
        folder.mkdir()
        model, directory = for_ctranslate2(folder, spiece, kind, monkeypatch, pad_vocab_to_multiple_of=multiple)
        translator, encode = in_ctranslate2(folder, directory)
        theirs = translator.translate_batch(
            [encode(text) for text in TEXTS], beam_size=beams, max_decoding_length=9, max_input_length=0
        )
        tokenizer = tokenizer_of(spiece, kind)
        settings = GenerationSettings(max_new_tokens=9, num_beams=beams)
        ours = answer_texts(TrainedModel(model, tokenizer), TEXTS, settings)
        ids = {
            name: id_ for id_, name in enumerate(json.loads((folder / "converted/shared_vocabulary.json").read_text()))
        }
        found = [[ids[token] for token in one.hypotheses[0]] for one in theirs]
        assert [_answer(tokenizer, "", [], row, continues=False).generated for row in found] == [
            one.generated for one in ours
        ]


def test_the_mark_at_an_answers_beginning_is_no_text(spiece):
    tokenizer = tokenizer_of(spiece, "bart")
    ids = tokenizer.encode(["a license"])[0]
    assert _answer(tokenizer, "a", [], [tokenizer.vocabulary.bos, *ids], continues=False).generated == "a license"


def test_ctranslate2_scales_the_outputs_of_every_t5(spiece, tmp_path):
    """Why the page writes a copy: when this fails, CTranslate2 reads the export of every T5 right."""
    model, directory = exported(tmp_path, spiece, "v1.1")
    assert largest_difference(tmp_path, directory, model) > 1


# ---- encoders


@each("kind", ["v1.1", "bart"])
def test_an_encoder_alone_gives_the_same_states(kind, spiece, tmp_path):
    tokenizer = tokenizer_of(spiece, kind)
    model = model_of(tokenizer, kind)
    export(model.state_dict(), model.config, tokenizer, tmp_path / "out")
    cls = transformers.BartModel if kind == "bart" else transformers.T5EncoderModel
    loaded, report = cls.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    loaded = loaded.encoder if kind == "bart" else loaded
    ids = torch.arange(3, 43).view(2, 20)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    with torch.no_grad():
        found = loaded.eval()(input_ids=ids, attention_mask=mask).last_hidden_state
        expected = model.encode(ids, mask)
    torch.testing.assert_close(found[mask == 1], expected[mask == 1], rtol=0, atol=1e-4)


# ---- fine-tuning of encoders, and docs/how-to/fine-tune-an-encoder.md, which does what it says


HEADS = {"SequenceClassification": "classifier", "TokenClassification": "classifier", "QuestionAnswering": "qa_outputs"}


@each("name", ["bert", "roberta"])
def test_an_exported_encoder_gets_a_head(name, spiece, tmp_path):
    tokenizer = Tokenizer(SentencePiece.read(spiece), ["<s>", "<mask>"], SENTINELS)
    model, inputs = as_at_the_start(name, vocab_size=tokenizer.size), ids(2, 9)
    export(model.state_dict(), model.config, tokenizer, tmp_path / "out")
    for task, head in HEADS.items():
        kind = getattr(transformers, f"AutoModelFor{task}")
        loaded, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
        new = {f"{head}.weight", f"{head}.bias"}
        if task == "SequenceClassification":  # the export has no pooler
            new |= {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
        assert (set(report["missing_keys"]), list(report["mismatched_keys"])) == (new, [])
        states = loaded.eval().base_model(inputs).last_hidden_state
        torch.testing.assert_close(states, model.encode(inputs), rtol=0, atol=2e-5)
        sum(one.square().sum() for one in loaded(inputs).to_tuple()).backward()
        assert all(one.grad.any() for one in loaded.base_model.encoder.parameters() if one.dim() > 1), task


@pytest.mark.slow
def test_the_page_fine_tunes_an_encoder(tmp_path, monkeypatch, capsys):
    page = (TOP / "docs/how-to/fine-tune-an-encoder.md").read_text()
    for folder in ("configs", "data_pipeline"):
        (tmp_path / folder).symlink_to(TOP / folder)
    monkeypatch.chdir(tmp_path)
    fewer = ["run.max_steps=20", "checkpoint.every_steps=20", "evaluation=[]", "tracking.mlflow=null"]
    for line in re.findall(r"(?m)^    (\S.*)$", page.split("```")[0]):
        command, *arguments = line.split()
        done = run(command, *arguments, *(fewer if arguments[0] == "train" else []))
        assert done.returncode == 0, done.stderr
    capsys.readouterr()
    (code,) = re.findall(r"(?ms)^```python\n(.*?)^```", page)
    exec(compile(code, "fine_tune.py", "exec"), {})
    (share,) = re.findall(r"right: (\d+\.\d)%", capsys.readouterr().out)
    assert float(share) > 100 * 929 / 1189  # what the answer "Old Testament" gets
