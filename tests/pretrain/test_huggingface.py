"""Exported checkpoints, as transformers loads them."""

from pathlib import Path

import pytest
import sentencepiece
import torch

from data_pipeline.errors import UserError
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.sentencepiece import SentencePiece
from pretrain.generation import generate
from pretrain.huggingface import export, load_state
from pretrain.models import T5Config, build
from pretrain.models.loss import shift_right

transformers = pytest.importorskip("transformers")

LICENSE = Path(__file__).parents[2] / "LICENSE"
PIECES = 300
SENTENCES = [
    "Unless required by applicable law or agreed to in writing, software is distributed on an AS IS basis.",
    'You may add Your own "copyright" statement;  two  spaces\tand a tab.',
    "Naïve façades of Ångström: ½ of the ﬁnal ＷＩＤＥ text, 日本語 too.",
    " \n ",
    "",
]


@pytest.fixture(scope="module")
def spiece(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    sentencepiece.SentencePieceTrainer.train(
        input=str(LICENSE),
        model_prefix=str(folder / "spiece"),
        vocab_size=PIECES,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return folder / "spiece.model"


def tokenizer_of(spiece, sentinels=100, special_tokens=()):
    return Tokenizer(SentencePiece.read(spiece), special_tokens, sentinels)


def new_model(tied=False, sentinels=100, multiple=1):
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=PIECES + sentinels,
        pad_vocab_to_multiple_of=multiple,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_heads=4,
        num_encoder_layers=2,
        num_decoder_layers=3,
        feed_forward="relu" if tied else "gated-gelu",
        tie_embeddings=tied,
        dropout_rate=0.1,
    )
    return build(config).eval()


@pytest.mark.parametrize("tied", [True, False], ids=["v1.0", "v1.1"])
@pytest.mark.parametrize("multiple", [1, 128])
def test_transformers_computes_the_same(tied, multiple, spiece, tmp_path):
    model = new_model(tied, multiple=multiple)
    export(model.state_dict(), model.config, tokenizer_of(spiece), tmp_path / "out")
    loaded, report = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert torch.equal(loaded.shared.weight, model.embedding.weight)
    assert torch.equal(loaded.encoder.embed_tokens.weight, model.embedding.weight)
    assert torch.equal(loaded.decoder.embed_tokens.weight, model.embedding.weight)
    assert torch.equal(loaded.lm_head.weight, loaded.shared.weight) == tied

    inputs, labels = torch.arange(3, 43).view(2, 20), torch.arange(50, 66).view(2, 8)
    with torch.no_grad():
        expected = model.decode(shift_right(labels, 0), model.encode(inputs))
        found = loaded(input_ids=inputs, labels=labels)
    torch.testing.assert_close(found.logits, expected, rtol=0, atol=1e-4)
    if multiple == 1:  # transformers would also generate the rows that pad the vocabulary
        generated = loaded.generate(
            inputs,
            do_sample=False,
            num_beams=1,
            max_new_tokens=10,
            use_cache=False,  # transformers 5 sizes its cache by the encoder's layers, and here the decoder has more
        )
        assert generated[:, 1:].tolist() == generate(model, inputs, max_length=10).tolist()


@pytest.mark.parametrize("tied", [True, False], ids=["v1.0", "v1.1"])
def test_round_trip(tied, spiece, tmp_path):
    model = new_model(tied)
    export(model.state_dict(), model.config, tokenizer_of(spiece), tmp_path / "out")
    config, state = load_state(tmp_path / "out")
    assert config == model.config
    expected = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_a_checkpoint_saved_again_by_transformers_keeps_its_two_matrices(spiece, tmp_path):
    model = new_model()
    export(model.state_dict(), model.config, tokenizer_of(spiece), tmp_path / "out")
    transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    config, state = load_state(tmp_path / "again")
    assert config == model.config
    assert torch.equal(state["lm_head.weight"], model.lm_head.weight)


@pytest.mark.parametrize("sentinels", [100, 20])
def test_tokenizer_has_the_ids_of_sentencepiece(sentinels, spiece, tmp_path):
    model = new_model(sentinels=sentinels)
    export(model.state_dict(), model.config, tokenizer_of(spiece, sentinels), tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(spiece))
    size = PIECES + sentinels
    assert len(tokenizer) == size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    names = [f"<extra_id_{k}>" for k in range(sentinels)]
    assert tokenizer.convert_tokens_to_ids(names) == [size - 1 - k for k in range(sentinels)]
    lines = LICENSE.read_text(encoding="utf-8").splitlines()
    for text in SENTENCES + lines:
        assert tokenizer(text).input_ids == [*processor.encode(text), 1]

    masked = "Subject to the <extra_id_0> of this License, each <extra_id_1> hereby grants"
    first, second, third = "Subject to the", "of this License, each", "hereby grants"
    assert tokenizer(masked).input_ids == [
        *processor.encode(first), size - 1, *processor.encode(second), size - 2, *processor.encode(third), 1
    ]  # fmt: skip
    assert tokenizer.decode(processor.encode(lines[-1])) == processor.decode(processor.encode(lines[-1]))


def test_files(spiece, tmp_path):
    model = new_model()
    export(model.state_dict(), model.config, tokenizer_of(spiece), tmp_path / "deep" / "out")
    assert {path.name for path in (tmp_path / "deep" / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "spiece.model",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_what_stands_there_is_not_overwritten(spiece, tmp_path):
    model = new_model()
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UserError, match="exists already"):
        export(model.state_dict(), model.config, tokenizer_of(spiece), tmp_path)
    (tmp_path / "empty").mkdir()
    export(model.state_dict(), model.config, tokenizer_of(spiece), tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").exists()


def test_a_failed_export_leaves_nothing(spiece, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr("pretrain.huggingface.directory.save_file", fail)
    model = new_model()
    with pytest.raises(OSError, match="no space"):
        export(model.state_dict(), model.config, tokenizer_of(spiece), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_together_is_refused(spiece, tmp_path):
    model = new_model()
    with pytest.raises(UserError, match="300 pieces, 0 special tokens and 99 sentinels make 399 ids"):
        export(model.state_dict(), model.config, tokenizer_of(spiece, 99), tmp_path / "out")
    state = model.state_dict()
    del state["encoder.final_norm.weight"]
    with pytest.raises(UserError, match=r"encoder\.final_norm\.weight is missing"):
        export(state, model.config, tokenizer_of(spiece), tmp_path / "out")
    with pytest.raises(UserError, match=r"special tokens can't be exported yet; the tokenizer has \[R\]"):
        export(model.state_dict(), model.config, tokenizer_of(spiece, 99, ["[R]"]), tmp_path / "out")
