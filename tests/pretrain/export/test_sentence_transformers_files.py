"""Files for sentence-transformers."""

import json

import pytest
import torch

from data_pipeline.base.errors import UserError
from pretrain.export import export
from tests.support.exported import randomise
from tests.support.in_process import done_here, refused_here
from tests.support.small_exports import files_of, tokenizer_of
from tests.support.small_models import as_at_the_start
from tests.support.tables import each

transformers = pytest.importorskip("transformers")


def test_an_export_is_for_sentence_transformers_too(checkpoint, tmp_path):
    done_here("pretrain", "export", checkpoint, tmp_path / "plain")
    done_here("pretrain", "export", checkpoint, tmp_path / "out", "--for", "sentence-transformers")
    plain, found = files_of(tmp_path / "plain"), files_of(tmp_path / "out")
    assert plain.items() <= found.items()
    assert found.keys() - plain.keys() == {"modules.json", "sentence_bert_config.json", "1_Pooling/config.json"}
    line = refused_here(2, "pretrain", "export", checkpoint, tmp_path / "other", "--for", "ctranslate2")
    assert line == "error: --for: expected sentence-transformers, got 'ctranslate2'; others read an export as it is"


EMBEDDED = {"t5": 32, "t5, in every layer": 32, "t5gemma, unbalanced": 48, "t5gemma2": 32, "bert": 32, "roberta": 32}
TEXTS = ["Unless required by <extra_id_0> law", "You may add Your own notice", "a"]


def exported_for_sentence_transformers(name, spiece, folder):
    tokenizer = tokenizer_of(spiece, 20, ["<s>", "<mask>"])
    model = randomise(as_at_the_start(name, vocab_size=tokenizer.size, pad_vocab_to_multiple_of=64))
    usage = export(model.state_dict(), model.config, tokenizer, folder, embeds=True)
    assert usage.endswith(", or with SentenceTransformer")
    return model, folder


@each("name, width", EMBEDDED.items())
def test_sentence_transformers_gets_its_files(name, width, spiece, tmp_path):
    _, folder = exported_for_sentence_transformers(name, spiece, tmp_path / "out")
    first, second = json.loads((folder / "modules.json").read_text())
    assert (first["path"], first["type"]) == ("", "sentence_transformers.models.Transformer")
    assert (second["path"], second["type"]) == ("1_Pooling", "sentence_transformers.models.Pooling")
    pooling = json.loads((folder / "1_Pooling/config.json").read_text())
    assert pooling == {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}


@pytest.mark.slow
@each("name", EMBEDDED)
def test_sentence_transformers_embeds_by_the_mean_of_the_encoders_states(name, spiece, tmp_path):
    """Of all tokens, EOS included, for texts of several lengths in one batch."""
    library = pytest.importorskip("sentence_transformers")  # python -m checks.serving installs it
    model, folder = exported_for_sentence_transformers(name, spiece, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = library.SentenceTransformer(str(folder), device="cpu").encode(TEXTS, convert_to_tensor=True)
    with torch.no_grad():
        states = [model.encode(torch.tensor([tokenizer(text).input_ids]))[0] for text in TEXTS]
    torch.testing.assert_close(found, torch.stack([one.mean(0) for one in states]), rtol=0, atol=2e-5)


@each("name", ["bart", "vanilla", "modern", "llama", "autoregressive, plain"])
def test_what_sentence_transformers_would_not_embed_with_the_encoder_is_refused(name, spiece, tmp_path):
    model = as_at_the_start(name, vocab_size=tokenizer_of(spiece, 20, ["<s>"]).size)
    with pytest.raises(UserError, match="it embeds with the encoder of T5, T5Gemma or BERT, not with ") as refused:
        export(model.state_dict(), model.config, tokenizer_of(spiece, 20, ["<s>"]), tmp_path / "out", embeds=True)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()
