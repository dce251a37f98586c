"""Exports in engines other than transformers: the same answers, with the same probabilities; and encoders alone."""

import json
import re

import ctranslate2
import pytest
import torch
import transformers
from ctranslate2.converters import TransformersConverter

from data_pipeline.base.errors import UserError
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import _answer, answer_texts
from pretrain.export import export, load_state
from pretrain.models import build
from tests.conftest import TOP, run
from tests.pretrain.exported import randomise
from tests.pretrain.small_models import as_at_the_start, ids
from tests.tables import each

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


def exported(tmp_path, spiece, kind, engine, **changes):
    tokenizer = tokenizer_of(spiece, kind)
    model = model_of(tokenizer, kind, **changes)
    export(model.state_dict(), model.config, tokenizer, tmp_path / engine, engine=engine)
    return model, tmp_path / engine


def in_ctranslate2(tmp_path, directory):
    """The export in `directory`, converted and opened as docs/how-to/export-and-import.md says, and its tokenizer."""
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


@each(
    "kind, engine",
    [("v1.0", "transformers"), ("v1.0", "ctranslate2"), ("v1.1", "ctranslate2"), ("bart", "transformers")],
)
def test_ctranslate2_gives_the_same_probabilities(kind, engine, spiece, tmp_path):
    model, directory = exported(tmp_path, spiece, kind, engine)
    assert largest_difference(tmp_path, directory, model) < 1e-4


@each("kind", ["v1.0", "v1.1", "bart"])
def test_answers_by_ctranslate2_are_those_of_pytorch(kind, spiece, tmp_path):
    """Beams without rows that pad the vocabulary: CTranslate2 doesn't have them, and random ones are likely."""
    for beams, multiple in ((1, 128), (3, 1)):
        folder = tmp_path / str(beams)
        model, directory = exported(folder, spiece, kind, "ctranslate2", pad_vocab_to_multiple_of=multiple)
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
        assert [_answer(tokenizer, "", [], row, causal=False).generated for row in found] == [
            one.generated for one in ours
        ]


def test_the_mark_at_an_answers_beginning_is_no_text(spiece):
    tokenizer = tokenizer_of(spiece, "bart")
    ids = tokenizer.encode(["a license"])[0]
    assert _answer(tokenizer, "a", [], [tokenizer.vocabulary.bos, *ids], causal=False).generated == "a license"


def test_ctranslate2_scales_the_outputs_of_every_t5(spiece, tmp_path):
    """Why there is an export for it: when this fails, CTranslate2 reads the export for transformers right too."""
    model, directory = exported(tmp_path, spiece, "v1.1", "transformers")
    assert largest_difference(tmp_path, directory, model) > 1


def test_a_head_rewritten_for_ctranslate2_gives_the_same_logits(spiece, tmp_path):
    model, directory = exported(tmp_path, spiece, "v1.1", "ctranslate2", pad_vocab_to_multiple_of=128)
    saved = json.loads((directory / "config.json").read_text())
    assert saved["vocab_size"] == model.config.vocab_size == 320  # padding is gone: rows that nobody trained
    assert saved["n_positions"] == 512
    sentinels = json.loads((directory / "added_tokens.json").read_text())
    assert (sentinels["<extra_id_0>"], sentinels["<extra_id_19>"]) == (319, 300)
    config, state = load_state(directory)
    assert config.scale_outputs
    again = build(config).eval()
    again.load_state_dict(state)
    inputs, targets = torch.arange(3, 23).view(1, 20), torch.arange(50, 58).view(1, 8)
    with torch.no_grad():
        expected = model.decode(targets, model.encode(inputs))[..., :320]
        torch.testing.assert_close(again.decode(targets, again.encode(inputs)), expected, rtol=1e-5, atol=1e-5)


@each(
    "name, options, why",
    [
        ("bart", {"engine": "onnx"}, "can be .* transformers, ctranslate2, not for 'onnx'"),
        ("vanilla", {"engine": "ctranslate2"}, "can be exported for transformers, not for 'ctranslate2'"),
    ],
)
def test_what_an_engine_can_not_run_is_not_exported(name, options, why, spiece, tmp_path):
    tokenizer = tokenizer_of(spiece, "v1.0")
    model = as_at_the_start(name, vocab_size=tokenizer.size)
    with pytest.raises(UserError, match=f"--for: .*{why}"):
        export(model.state_dict(), model.config, tokenizer, tmp_path / "out", **options)
    assert not any(tmp_path.iterdir())


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
        if task == "SequenceClassification" and name == "roberta":  # without next sentences there is no pooler
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
