"""Who sees whom, generation from caches, boundaries, FLOPs, settings, and the export."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import torch.nn.functional as F
import yaml
from double_decoder.model import DoubleDecoder, visible_in_blocks
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from data_pipeline.base.config_file import load
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from pretrain.config import RunConfig
from pretrain.evaluate.generation.decoding import generate
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.export import export, read
from pretrain.models import build, meta_model, parse
from pretrain.models.flops import Sizes, count_flops, matrices

HERE = Path(__file__).parent
SIZES = {"d_model": 32, "d_ff": 48, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2}


def made(std: float | None = 0.2, **changes: Any) -> DoubleDecoder:
    """With `std`, a model in fp64 in which every weight matters: gains lie around their first values."""
    torch.manual_seed(0)
    model = build(parse({"family": "double_decoder", "vocab_size": 300, **SIZES, **changes})).eval()
    assert isinstance(model, DoubleDecoder)
    if std is None:
        return model
    for parameter in model.parameters():
        drawn = std * torch.randn_like(parameter)
        parameter.data = drawn if parameter.dim() > 1 else parameter.data + drawn
    return model.double()


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(5, 200, shape, generator=torch.Generator().manual_seed(seed))


def test_who_sees_whom_worked_by_hand():
    """Six tokens, blocks 0 0 1 1 2 2. The first token's state is a sink."""
    row = made().row(ids(1, 6), boundaries=torch.tensor([[2, 4]]))
    assert row.blocks.tolist() == [[0, 0, 1, 1, 2, 2]]
    own, across = ([query.nonzero().flatten().tolist() for query in mask[0, 0]] for mask in visible_in_blocks(row))
    assert own == [[0], [0, 1], [2], [2, 3], [4], [4, 5]]
    assert across == [[0], [0], [0, 1], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]


@torch.no_grad()
@pytest.mark.parametrize("prompt", [1, 2, 7])
def test_a_cache_changes_no_logits_and_the_encoder_reads_a_block_once_it_is_full(prompt):
    model, row = made(block_length=3, num_key_value_heads=2, activation="swiglu"), ids(2, 18)
    boundaries = torch.arange(prompt - 1, 18, 3).expand(2, -1)
    expected = model.decode(row, boundaries=boundaries)[:, prompt - 1 :]
    read = []
    model.encoder.register_forward_pre_hook(lambda _, given: read.append(given[0].size(1)))
    cache = model.new_cache()
    pieces = [model.decode(row[:, :prompt], cache), model.decode(row[:, prompt : prompt + 4], cache)]
    pieces += [model.decode(row[:, place : place + 1], cache) for place in range(prompt + 4, 18)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=0, atol=1e-10)
    closed = (18 - prompt) // 3
    # a prompt at once, the rest of its block, blocks
    assert read == [prompt, 2, *[3] * (closed - 1)]


def test_boundaries_follow_from_seed_and_step_and_each_texts_length():
    model = made().train()
    counts, places = set(), set()
    for step in range(300):
        model.begin_step(5, step)
        first = model.row(ids(1, 40)).blocks[0]
        counts.add(len(model._drawn))
        places |= {place for place in range(1, 40) if first[place] != first[place - 1]}
        assert first[-1] <= 7
    assert counts == set(range(2, 8))
    assert places == set(range(2, 39))
    drawn = model._drawn
    model.begin_step(6, 299)
    assert model._drawn != drawn
    model.begin_step(5, 299)
    assert model._drawn == drawn
    mask = (torch.arange(40) < torch.tensor([[40], [11], [3]])).long()
    together = model.row(ids(3, 40), mask).blocks
    for number, length in enumerate((40, 11, 3)):
        assert torch.equal(together[number, :length], model.row(ids(1, length)).blocks[0])
    blocks = model.eval().row(ids(1, 23)).blocks[0]
    assert torch.bincount(blocks).tolist() == [6, 4, 4, 4, 5]  # at equal distances: 4 is the mean of 2 to 7, rounded


def test_flops_are_those_of_products_and_of_pairs_that_a_mask_shows():
    """torch's products are over all pairs, twice as many as the convention counts in the decoder."""
    model = made(std=None)
    row = ids(1, 20)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(row, row)["labels"].sum().backward()
    hidden = 12 * 32 * 2 * 20**2
    assert counter.get_total_flops() - count_flops(model, Sizes.of_example(20, 20)) == hidden
    of_products = sum(6 * 20 * weight.numel() for _, rows, weight in matrices(model) if rows in ("inputs", "targets"))
    assert count_flops(model, Sizes.of_example(20, 20)) - of_products == 12 * 32 * 4 * 20**2  # the pairs of four layers
    seen = model.row(row)
    first = int((seen.blocks == 0).sum())  # those see the first token and its state
    assert sum(int(mask.sum()) for mask in visible_in_blocks(seen)) == 20 * 21 // 2 + first


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [({"num_heads": 32}, "1 is odd"), ({"least_boundaries": 8}, "8 is above most_boundaries")],
)
def test_impossible_settings_are_refused(wrong, expected):
    with pytest.raises(ValidationError, match=expected):
        made(**wrong)


def test_the_run_file_is_valid_and_its_model_has_the_size_that_it_names():
    """50,257 ids by 768 units; q, k, v, o of 768² and two matrices of 768 × 3072 in each of 12 layers; a norm before
    each of two sublayers, of 768 numbers; the last norms, that of the encoder with a bias."""
    assert load(HERE.parent / "configs/double-decoder-small-c4.yaml", [], RunConfig).model.vocab_size == 32_000
    path = HERE.parent / "configs/double-decoder-small.yaml"
    (settings,) = yaml.safe_load(path.read_text()).values()
    size = meta_model(parse(settings)).num_parameters()
    assert size == 50_257 * 768 + 12 * (4 * 768**2 + 2 * 768 * 3072 + 2 * 768) + 3 * 768
    assert f" {size:,} parameters" in path.read_text()


@pytest.mark.parametrize("first", ["double_decoder.settings", "pretrain.config"])
def test_either_package_may_be_imported_first(first):
    code = f"import {first}, sys; from pretrain.config.models import OFFERED; print(*OFFERED, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["double_decoder", "False"], done.stderr


LOADED = """
import sys
sys.modules.update(pretrain=None, data_pipeline=None, double_decoder=None)
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
rows = load_file(sys.argv[2])["rows"]
with torch.no_grad():
    found = model(rows, labels=rows)
answers = model.generate(rows[:, :7], do_sample=False, use_cache=True, max_new_tokens=9, min_new_tokens=9)
save_file({"logits": found.logits, "loss": found.loss, "answers": answers[:, 7:].contiguous()}, sys.argv[3])
"""


def test_an_export_is_the_training_model_where_none_of_these_packages_is(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        input=str(HERE.parent / "README.md"), model_prefix=str(tmp_path / "spiece"), vocab_size=150,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, num_threads=1, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    tokenizer = Tokenizer(SentencePiece.read(tmp_path / "spiece.model"), [], sentinels=60)
    model = made(vocab_size=tokenizer.size, block_length=3, num_key_value_heads=2).float()
    out, rows = tmp_path / "out", ids(2, 20)
    export(model.state_dict(), model.config, tokenizer, out)
    save_file({"rows": rows}, tmp_path / "rows")
    command = [sys.executable, "-c", LOADED, *map(str, (out, tmp_path / "rows", tmp_path / "found"))]
    done = subprocess.run(command, env={**os.environ, "HF_HOME": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "found")
    with torch.no_grad():
        logits = model.decode(rows)
    assert logits.std() > 0.1  # the comparison is not one of zeros
    torch.testing.assert_close(found["logits"], logits, rtol=0, atol=2e-5)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    torch.testing.assert_close(found["loss"], loss, rtol=0, atol=1e-5)
    answers = generate(model, rows[:, :7], None, GenerationSettings(max_new_tokens=9, min_new_tokens=9))
    assert found["answers"].tolist() == answers.tolist()

    for auto_map in ({}, {"AutoConfig": "configuration.DoubleDecoderConfig"}):  # the second: of when the family shipped
        saved = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps({**saved, "auto_map": {**saved["auto_map"], **auto_map}}))
        config, state, _ = read(out)
        assert config == model.config
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items() if name in state)
