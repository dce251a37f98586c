"""Generation against recomputation without a cache, and against transformers."""

import pytest
import torch

from data_pipeline.vocabulary import Vocabulary
from pretrain.generation import fill_in, generate, sample, split_spans
from pretrain.huggingface import load_state
from pretrain.models import T5Config, build

VOCABULARY = Vocabulary(100, (3, 90), pad=0, eos=1, unk=2, first_sentinel=99, sentinels=10)
TINY = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = build(T5Config(**TINY, pad_vocab_to_multiple_of=64, num_encoder_layers=2, num_decoder_layers=2))
    with torch.no_grad():  # attention that matters, and outputs that vary
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
    return model.eval()


@pytest.fixture
def inputs():
    ids = torch.randint(3, 100, (4, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    mask[3, 5:] = 0
    return ids, mask


def test_cached_decoding_equals_recomputation(model, inputs):
    ids, mask = inputs
    targets = torch.randint(3, 100, (4, 140), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states = model.encode(ids, mask)
        whole = model.decode(targets, states, mask)
        cache = model.new_cache()
        pieces = [model.decode(piece, states, mask, cache) for piece in targets.split([1, 1, 1, 7, 1, 129], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-5)


def test_greedy_equals_the_likeliest_token_of_a_recomputed_prefix(model, inputs):
    ids, mask = inputs
    generated = generate(model, ids, mask, max_length=15)
    prefix = torch.cat([torch.zeros(4, 1, dtype=torch.long), generated], dim=1)
    with torch.no_grad():
        logits = model.decode(prefix[:, :-1], model.encode(ids, mask), mask)[..., :100]
    for row, likeliest in zip(generated.tolist(), logits.argmax(dim=-1).tolist(), strict=True):
        length = row.index(1) + 1 if 1 in row else len(row)
        assert row[:length] == likeliest[:length]


@pytest.mark.parametrize("scaled", [True, False], ids=["v1.0", "v1.1"])
def test_greedy_equals_transformers(scaled, tmp_path, inputs):
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        **TINY, num_layers=2, feed_forward_proj="gated-gelu", tie_word_embeddings=scaled, decoder_start_token_id=0
    )
    torch.manual_seed(3)
    reference = transformers.T5ForConditionalGeneration(config)
    for name, parameter in reference.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("layer_norm" in name), std=0.4)
    reference.save_pretrained(tmp_path)
    config, state = load_state(tmp_path)
    model = build(config)
    model.load_state_dict(state)
    ids, mask = inputs
    expected = reference.eval().generate(
        ids, attention_mask=mask, do_sample=False, num_beams=1, max_new_tokens=25, eos_token_id=1, pad_token_id=0
    )
    assert generate(model, ids, mask, max_length=25).tolist() == expected[:, 1:].tolist()


def test_a_row_ends_with_eos_and_then_padding(model, inputs):
    ids, mask = inputs
    with torch.no_grad():
        model.lm_head.weight[1] = model.lm_head.weight[3:100].mean(dim=0) * 3  # eos is likely now and then
    generated = generate(model, ids, mask, max_length=60, temperature=3.0, seed=4).tolist()
    ended = [row for row in generated if 1 in row]
    assert ended
    assert all(set(row[row.index(1) + 1 :]) <= {0} for row in ended)
    everyone = generate(model, ids, mask, max_length=60, temperature=3.0, seed=4, stop_early=False)
    assert everyone.shape == (4, 60)
    assert everyone[:, : len(generated[0])].tolist() == generated


def test_padding_rows_of_the_vocabulary_are_never_generated(model, inputs):
    with torch.no_grad():
        model.lm_head.weight[100:] = 50.0
    assert generate(model, *inputs, max_length=20, temperature=5.0).max() < 100


def test_a_seed_repeats_and_another_differs(model, inputs):
    def draw(seed):
        return generate(model, *inputs, max_length=20, temperature=1.5, seed=seed).tolist()

    assert draw(1) == draw(1) != draw(2)


def test_generation_leaves_the_mode_as_it_was(model, inputs):
    generate(model.train(), *inputs, max_length=2)
    assert model.training


PROBABILITIES = torch.tensor([0.1, 0.5, 0.15, 0.25])  # from likely to unlikely: 1, 3, 2, 0


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({}, [0.1, 0.5, 0.15, 0.25]),
        ({"top_k": 2}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_p": 0.5}, [0, 1, 0, 0]),
        ({"top_p": 0.6}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.8, "top_k": 3}, [0, 0.5 / 0.9, 0.15 / 0.9, 0.25 / 0.9]),
    ],
)
def test_sampled_shares(settings, shares):
    draws = (torch.arange(10_000) / 10_000)[:, None]  # every quantile once
    tokens = sample(PROBABILITIES.log().expand(10_000, 4), draws, **settings)
    counted = torch.bincount(tokens.flatten(), minlength=4) / 10_000
    torch.testing.assert_close(counted, torch.tensor(shares, dtype=torch.float32), rtol=0, atol=2e-4)


def test_spans_are_split_at_sentinels():
    assert split_spans([99, 5, 6, 98, 7, 1, 0, 0], VOCABULARY) == {99: [5, 6], 98: [7]}


def test_the_marks_are_the_vocabularys():
    others = Vocabulary(100, (4, 90), pad=1, eos=2, unk=3, bos=0, first_sentinel=99, sentinels=10)
    assert split_spans([99, 5, 0, 98, 7, 2, 1], others) == {99: [5, 0], 98: [7]}


def test_malformed_targets_give_what_can_be_read():
    assert split_spans([], VOCABULARY) == {}
    assert split_spans([8, 99, 98, 7, 99, 5], VOCABULARY) == {99: [], 98: [7]}
    assert split_spans([99, 5, 1, 98, 6], VOCABULARY) == {99: [5]}


def test_spans_go_back_where_their_sentinels_stand():
    assert fill_in([10, 99, 11, 12, 98, 1, 0], {99: [5, 6], 98: [7]}, VOCABULARY) == [10, 5, 6, 11, 12, 7]
    assert fill_in([10, 99, 11, 98], {98: [7]}, VOCABULARY) == [10, 11, 7]
