"""The families that transformers lacks, loaded from the modelling files in their exports.

test_exports.py compares their logits, losses, gradients and greedy texts.
"""

import functools
import os
import subprocess
import sys

import pytest
import torch

from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.sentencepiece import SentencePiece
from pretrain.generation.decoding import generate
from pretrain.generation.settings import GenerationSettings
from pretrain.generation.texts import padded
from pretrain.huggingface import export
from pretrain.models import FAMILIES, build, parse
from tests.pretrain.exported import randomise
from tests.pretrain.test_exports import CASES, ids, loaded_by_transformers
from tests.slow import slow
from tests.tables import each

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("modules_of_transformers")

KINDS = ["modern, local and global", "modern, plain", "vanilla", "double decoder", "Yan 2024"]
QUICK = {KINDS[0], KINDS[3], KINDS[4]}
PROMPTS = [[5, 6, 7, 8, 9, 10, 40, 41], [11], [12, 13, 14], [15, 16]]


@pytest.fixture(scope="module")
def tokenizer(spiece):
    return Tokenizer(SentencePiece.read(spiece), [], sentinels=20)


@pytest.fixture(scope="module")
def exported(tokenizer, tmp_path_factory, modules_of_transformers):
    """For a kind: a model in which every weight matters, the directory of its export, and what transformers loads."""

    @functools.cache
    def of(kind):
        family, settings = CASES[kind]
        marks = {"vocab_size": tokenizer.size, "pad_id": tokenizer.vocabulary.pad, "eos_id": tokenizer.vocabulary.eos}
        config = parse({"family": family, **marks, **settings, "dropout_rate": 0.1})
        model, out = randomise(build(config), std=0.4), tmp_path_factory.mktemp("exported") / "out"
        export(model.state_dict(), config, tokenizer, out)
        return model, out, loaded_by_transformers(out)

    return of


def each_kind(kinds=KINDS):
    return each("kind", [kind for one in kinds for kind in ([one] if one in QUICK else slow(one))])


@each_kind()
def test_beams_of_a_padded_batch_are_those_of_our_own_generation(kind, exported):
    model, _, loaded = exported(kind)
    answers = FAMILIES[model.config.family].generates == "answers"
    inputs, mask = padded(PROMPTS, model.config.pad_id, left=not answers)
    settings = {"max_new_tokens": 12, "min_new_tokens": 10, "num_beams": 3, "no_repeat_ngram_size": 2}
    ours = generate(model.double(), inputs, mask, GenerationSettings(**settings))
    start = 1 if answers else inputs.size(1)
    for use_cache in (True, False) if kind == "Yan 2024" else (True,):
        theirs = loaded.double().generate(inputs, attention_mask=mask, do_sample=False, use_cache=use_cache, **settings)
        length = min(ours.size(1), theirs.size(1) - start)
        assert theirs[:, start : start + length].tolist() == ours[:, :length].tolist()
    assert len({tuple(row) for row in ours.tolist()}) > 1
    model.float()
    loaded.float()


@each_kind(KINDS[:4])
def test_every_weight_gets_a_gradient_in_training(kind, exported):
    _, _, loaded = exported(kind)
    row = ids(2, 24)
    loaded.train()
    loaded(input_ids=row, labels=row).loss.backward()
    assert all(parameter.grad.any() for _, parameter in loaded.named_parameters())
    loaded.eval().zero_grad()


@each_kind(KINDS[:3])
@torch.no_grad()
def test_a_decoder_reads_rows_padded_on_the_left_and_goes_on_from_a_cache(kind, exported):
    _, _, loaded = exported(kind)
    inputs, targets = ids(1, 9), ids(1, 7, seed=1)
    expected = loaded(input_ids=inputs, decoder_input_ids=targets)
    shifted = torch.nn.functional.pad(targets, (3, 0))
    mask = (torch.arange(10) >= 3).long()[None]
    found = loaded(input_ids=inputs, decoder_input_ids=shifted, decoder_attention_mask=mask)
    torch.testing.assert_close(found.logits[:, 3:], expected.logits, rtol=0, atol=2e-5)
    later = loaded(
        decoder_input_ids=targets[:, -1:], encoder_outputs=(expected.encoder_last_hidden_state,),
        past_key_values=loaded(input_ids=inputs, decoder_input_ids=targets[:, :-1]).past_key_values,
    )  # fmt: skip
    torch.testing.assert_close(later.logits, expected.logits[:, -1:], rtol=0, atol=2e-5)


@torch.no_grad()
def test_the_double_decoder_generates_by_blocks_and_no_decoder_with_a_static_cache(exported):
    """Its cache goes on with several tokens at once; without a cache, blocks would move with every token."""
    model, _, loaded = exported("double decoder")
    prompt, more = ids(2, 5), ids(2, 9, seed=1)
    ours, theirs = model.new_cache(), loaded(prompt, use_cache=True).past_key_values
    model.decode(prompt, ours)
    found = loaded(more, past_key_values=theirs)
    assert found.past_key_values.get_seq_length() == 14
    torch.testing.assert_close(found.logits, model.decode(more, ours), rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="generation needs use_cache=True"):
        loaded.generate(prompt, max_new_tokens=3, use_cache=False)
    with pytest.raises(ValueError, match="static cache is not supported"):
        exported("Yan 2024")[2].generate(prompt, max_new_tokens=3, cache_implementation="static")


@each("kind", slow(KINDS[0], KINDS[3], KINDS[4]))
def test_the_directory_stands_on_its_own(kind, exported, tokenizer, tmp_path):
    """It works in another process without our packages, as for anyone who receives the directory."""
    model, out, _ = exported(kind)
    answers = FAMILIES[model.config.family].generates == "answers"
    code = (
        "import sys, transformers; sys.modules.update(pretrain=None, data_pipeline=None)\n"
        f"kind = transformers.AutoModelFor{'Seq2Seq' if answers else 'Causal'}LM\n"
        f"model = kind.from_pretrained({str(out)!r}, trust_remote_code=True)\n"
        f"tokenizer = transformers.AutoTokenizer.from_pretrained({str(out)!r}, trust_remote_code=True)\n"
        "inputs = tokenizer('You may reproduce', return_tensors='pt')\n"
        "print(inputs.input_ids[0].tolist(), model.generate(**inputs, do_sample=False, max_new_tokens=5)[0].tolist())"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    given = [*tokenizer.encode(["You may reproduce"])[0], *([tokenizer.vocabulary.eos] if answers else [])]
    generated = generate(model, torch.tensor([given]), None, GenerationSettings(max_new_tokens=5))[0].tolist()
    read = [model.config.pad_id] if answers else given
    assert done.stdout.strip().splitlines()[-1] == f"{given} {[*read, *generated]}"
