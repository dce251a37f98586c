"""The autoregressive encoder-decoder in transformers, loaded from the modelling files in its export."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from data_pipeline.foundation.errors import UserError
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.byte_level_bpe import ByteLevelBPE
from pretrain.checkpoint.trained import TrainedModel
from pretrain.huggingface import export, import_, load_state
from pretrain.models import AutoregressiveConfig, build

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("modules_of_transformers")

BEST = {"subtract_positions": "without_norm", "embedding_loss": {"kind": "mse", "coefficient": 8.0}}


@pytest.fixture(scope="module")
def tokenizer(byte_level_bpe):
    return Tokenizer(ByteLevelBPE.read(byte_level_bpe / "gpt2"), [], 0)


def exported(tokenizer, out, **changes):
    """A model in which every weight matters, and the model that transformers loads from its export."""
    end = tokenizer.vocabulary.eos
    sizes = {"d_model": 16, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 3, "max_positions": 40}
    config = AutoregressiveConfig(
        vocab_size=tokenizer.size, pad_id=end, eos_id=end, **{"dropout_rate": 0.1, **sizes, **changes}
    )
    torch.manual_seed(0)
    model = build(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm.weight" in name), std=0.4)
    export(model.state_dict(), config, tokenizer, out)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, trust_remote_code=True, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return model, loaded


def prompts(lengths, vocabulary):
    """(ids, mask), padded on the left."""
    longest = max(lengths)
    ids = torch.randint(0, vocabulary, (len(lengths), longest), generator=torch.Generator().manual_seed(0))
    return ids, (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()


@torch.no_grad()
def greedy(model, ids, mask, steps):
    """The tokens that our own model generates, with its cache."""
    cache, tokens, generated = model.new_cache(), ids, []
    finished = torch.zeros(len(ids), 1, dtype=torch.bool)
    for _ in range(steps):
        logits = model.decode(tokens, cache, mask)[:, -1, : model.config.vocab_size]
        tokens = logits.argmax(dim=-1, keepdim=True).masked_fill(finished, model.config.pad_id)
        finished |= tokens == model.config.eos_id
        mask = F.pad(mask, (0, 1), value=1)
        generated.append(tokens)
    return torch.cat(generated, dim=1)


def test_beams_are_the_same_with_and_without_a_cache(tokenizer, tmp_path):
    _, loaded = exported(tokenizer, tmp_path / "out", **BEST)
    ids, mask = prompts([7, 3], tokenizer.size)
    with_cache, without = (
        loaded.generate(ids, attention_mask=mask, num_beams=3, do_sample=False, max_new_tokens=8, use_cache=use_cache)
        for use_cache in (True, False)
    )
    assert with_cache.tolist() == without.tolist()


def test_round_trip(tokenizer, tmp_path):
    model, loaded = exported(tokenizer, tmp_path / "out", **BEST)
    imported = import_(tmp_path / "out", tmp_path / "checkpoint")
    trained = TrainedModel.open(tmp_path / "checkpoint")
    assert imported == model.config
    expected, found = model.state_dict(), trained.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    loaded.save_pretrained(tmp_path / "again")  # transformers doesn't use the embedding loss
    config, state = load_state(tmp_path / "again")
    assert config == model.config.model_copy(update={"embedding_loss": None})
    assert all(torch.equal(state[name], expected[name]) for name in state)


def test_an_output_matrix_of_its_own_is_refused(tokenizer, tmp_path):
    exported(tokenizer, tmp_path / "out")
    path = tmp_path / "out/model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["embedding.weight"] + 1}, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lm_head\.weight differs from embedding\.weight"):
        load_state(tmp_path / "out")


@pytest.mark.slow
def test_the_directory_stands_on_its_own(tokenizer, tmp_path):
    """It works in another process without our packages, as for anyone who receives the directory."""
    model, _ = exported(tokenizer, tmp_path / "out", **BEST)
    code = (
        "import sys, torch, transformers; sys.modules.update(pretrain=None, data_pipeline=None)\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained('out', trust_remote_code=True)\n"
        "tokenizer = transformers.AutoTokenizer.from_pretrained('out', trust_remote_code=True)\n"
        "inputs = tokenizer('Thank you for', return_tensors='pt')\n"
        "print(inputs.input_ids[0].tolist(), model.generate(**inputs, do_sample=False, max_new_tokens=5)[0].tolist())"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    ids = torch.tensor(list(tokenizer.encode(["Thank you for"])), dtype=torch.long)
    generated = greedy(model, ids, torch.ones_like(ids), steps=5)
    assert done.stdout.strip().splitlines()[-1] == f"{ids[0].tolist()} {[*ids[0].tolist(), *generated[0].tolist()]}"


def test_ids_that_pad_the_vocabulary_are_never_generated(tokenizer, tmp_path):
    exported(tokenizer, tmp_path / "out", pad_vocab_to_multiple_of=128)
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert saved["suppress_tokens"] == list(range(50_257, 50_304))


def test_a_static_cache_is_refused(tokenizer, tmp_path):
    _, loaded = exported(tokenizer, tmp_path / "out", **BEST)
    with pytest.raises(ValueError, match="static cache is not supported"):
        loaded.generate(torch.tensor([[5, 6]]), max_new_tokens=3, cache_implementation="static")
