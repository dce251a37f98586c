"""Generation, compared with recomputation without a cache and with transformers."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from data_pipeline.base.errors import UserError
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from data_pipeline.text.vocabulary import Vocabulary
from pretrain.config.model_config import ModelConfig
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.trained import TrainedModel, save_weights
from pretrain.evaluate.generation.blanks import blank_out, likeliest_fillings
from pretrain.evaluate.generation.decoding import generate, repeating, sample, search, uniform_draws, warped
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import Answers, answer_texts, input_ids, padded, split_spans
from pretrain.loaded import PretrainedModel
from pretrain.models.functional.attention_backends import attention_weights
from pretrain.models.model import Model
from pretrain.models.stacks import EncoderDecoder
from tests.support.exported import in_transformers, randomise
from tests.support.runs import run_file
from tests.support.slow import slow
from tests.support.small_models import as_at_the_start
from tests.support.tables import each

VOCABULARY = Vocabulary(100, (3, 90), pad=0, eos=1, unk=2, first_sentinel=99, sentinels=10)


def random_model(name, std=0.3, **sizes):
    """In fp64, where attention matters and outputs vary: rounding never decides between two tokens."""
    return randomise(as_at_the_start(name, **sizes), std).double()


@pytest.fixture
def model(device):
    return random_model("t5", vocab_size=100, pad_vocab_to_multiple_of=64).to(device)


@pytest.fixture
def inputs(device):
    ids = torch.randint(3, 100, (4, 20), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    mask[3, 5:] = 0
    return ids, mask


def settings(**changes):
    return GenerationSettings(**{"max_new_tokens": 20, **changes})


def until_eos(row, eos=1):
    return row[: row.index(eos) + 1] if eos in row else row


def any_settings(rng):
    """Random settings, and the same for transformers, except for those that depend on the prompt."""
    beams, most = rng.choice([1, 2, 3, 5]), rng.choice([1, 4, 25])
    # 25 tokens that all differ are more than there are
    chosen = {
        "max_new_tokens": most,
        "num_beams": beams,
        "no_repeat_ngram_size": rng.choice([0, 2, 3, *[1] * (most < 25)]),
    }
    chosen["min_new_tokens"] = min(rng.choice([0, 0, 3, 8]), chosen["max_new_tokens"])
    if beams > 1:
        chosen["length_penalty"] = rng.choice([-1.0, 0.0, 0.6, 1.0, 2.5])
        chosen["early_stopping"] = rng.choice([False, True, "never"])
    return GenerationSettings(**chosen), {**chosen, "do_sample": False}


def rows_of(rng, number, causal):
    """Rows of different lengths, and the same rows padded."""
    rows = [[rng.randrange(2, 24) for _ in range(rng.randint(1, 9))] for _ in range(number)]
    return rows, *padded(rows, 0, left=causal)


@each(
    "family, seed, padding",
    [
        *itertools.product(("t5", "decoder_only"), (0,), (0, 16)),
        *slow(
            *itertools.product(("t5", "decoder_only"), (1, 2), (0, 16)),
            *itertools.product(("t5, tied", "bart"), (0, 1), (0, 16)),
        ),
    ],
)
def test_greedy_and_beam_search_equal_transformers(family, seed, padding, tmp_path):
    """Compares tokens up to EOS; after it, transformers' beam search fills with EOS if pad is 0.

    Transformers is told to suppress padding of the vocabulary, as exports tell it. It gets each prompt of a causal
    model alone: to its no-repeat rule and minimum length, the padding before a prompt is text.
    """
    rng = random.Random(f"{family} {seed}")
    ours = random_model(family, std=1.0, vocab_size=24, pad_vocab_to_multiple_of=24 + padding)  # the last are no tokens
    theirs = in_transformers(ours, tmp_path).double()
    causal = not isinstance(ours, EncoderDecoder)
    endings = []
    for _ in range(10):
        chosen, options = any_settings(rng)
        if padding:
            options["suppress_tokens"] = list(range(24, 24 + padding))
        rows, ids, mask = rows_of(rng, 4, causal)
        said = set(generate(ours, ids, mask, chosen).flatten().tolist()) - {0}
        eos = options["eos_token_id"] = rng.choice(sorted(said) or [1])  # one that occurs
        ours.config = ours.config.model_copy(update={"eos_id": eos})
        found = generate(ours, ids, mask, chosen).tolist()
        if causal:
            expected = []
            for row in rows:
                prompt = torch.tensor([row])
                generated = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
                expected.append(generated[0, len(row) :].tolist())
        else:
            if seed % 2:  # the same under its other name, which counts the decoder's start token
                options["min_length"] = options.pop("min_new_tokens") + 1
            options["decoder_start_token_id"] = ours.config.decoder_start_id
            mask = torch.ones_like(ids) if mask is None else mask
            expected = theirs.generate(ids, attention_mask=mask, **options)[:, 1:].tolist()
        assert [until_eos(row, eos) for row in found] == [until_eos(row, eos) for row in expected], (chosen, eos)
        endings += [eos in row for row in found]
    assert any(endings)
    assert not all(endings)  # others reached the maximum length


def test_returned_beams_and_their_scores_equal_those_of_transformers(tmp_path):
    model = random_model("t5", vocab_size=24, pad_vocab_to_multiple_of=24)  # small logits, for scores in fp32
    theirs = in_transformers(model, tmp_path).double()
    _, ids, _ = rows_of(random.Random(0), 4, causal=False)
    options = {"max_new_tokens": 7, "num_beams": 5, "num_return_sequences": 3, "length_penalty": 0.6}
    found = search(model, ids, None, GenerationSettings(**options))
    start = model.config.decoder_start_id
    expected = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, decoder_start_token_id=start, output_scores=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    rows = found.tokens.flatten(0, 1).tolist()
    assert [until_eos(row) for row in rows] == [until_eos(row) for row in expected.sequences[:, 1:].tolist()]
    torch.testing.assert_close(found.scores.flatten(), expected.sequences_scores.float())


class AfterEachToken(Model):
    """A model whose logits are those of the row of the token before them."""

    def __init__(self, logits):
        super().__init__()
        self.config = ModelConfig(family="after each token", vocab_size=len(logits))
        self.logits = logits

    def new_cache(self):
        return []

    def decode(self, tokens, cache, mask):
        return self.logits[tokens]


def test_when_beam_search_stops():
    """Two have ended after step 2, at -0.33 and -0.43; "2 4" is worth -3.51 / 2², but -3.51 / 10² if it gets there."""
    after_2 = [0, 0.9, 0, 0, 0.1]
    probabilities = torch.tensor([[0, 0.5, 0.3, 0.2, 0], [0, 1, 0, 0, 0], after_2, after_2, [0, 0, 0, 0, 1]])
    model = AfterEachToken(probabilities.clamp(min=1e-9).log())
    for early_stopping, tokens in {True: [2, 1], False: [2, 1], "never": [2, *9 * [4]]}.items():
        chosen = settings(max_new_tokens=10, num_beams=2, length_penalty=2.0, early_stopping=early_stopping)
        found = generate(model, torch.zeros(1, 1).long(), None, chosen)
        assert until_eos(found[0].tolist()) == tokens


def test_hypotheses_of_a_model_in_bf16_are_compared_in_fp32():
    chosen = settings(max_new_tokens=9, num_beams=2, length_penalty=0.6)
    for seed in range(100):
        logits = torch.randn(5, 5, generator=torch.Generator().manual_seed(seed)).mul(0.1).bfloat16()
        exact, found = (AfterEachToken(one) for one in (logits.double(), logits))
        texts = [generate(model, torch.zeros(1, 1).long(), None, chosen).tolist() for model in (exact, found)]
        assert texts[0] == texts[1], seed


PROMPTS = [[5, 6, 7, 8, 9, 10], [11], [12, 13, 14], [15, 16]]
ALIKE = (
    "t5",
    "autoregressive, best",
    "autoregressive, bridge norm",
    "autoregressive, rotary, alternate",
    "gemma 3",
    "double_decoder",
)


@each(
    "name, changes",
    [
        *itertools.product(ALIKE, ({}, {"num_beams": 3})),
        ("t5", {"num_beams": 3, "no_repeat_ngram_size": 2}),
        ("t5", {"temperature": 1.5}),
    ],
)
def test_a_row_is_the_same_alone_and_in_any_batch(name, changes, device):
    model = random_model(name, std=0.7, vocab_size=24).to(device)
    chosen = settings(**changes, seed=3)
    ids, mask = padded(PROMPTS, 0, left=not isinstance(model, EncoderDecoder))
    together = generate(model, ids.to(device), mask.to(device), chosen).tolist()
    assert len({tuple(row) for row in together}) == len(PROMPTS)
    for number, (prompt, row) in enumerate(zip(PROMPTS, together, strict=True)):
        alone = generate(model, torch.tensor([prompt], device=device), None, chosen, numbers=[number])[0].tolist()
        assert until_eos(row) == until_eos(alone)


@each("changes", [{}, {"num_beams": 3}, {"num_beams": 2, "early_stopping": True}, {"temperature": 2.0}])
def test_a_row_ends_with_eos_and_then_padding_and_leaves(model, inputs, changes, monkeypatch):
    chosen = settings(max_new_tokens=30, seed=4, **changes)
    eos = int(generate(model.train(), *inputs, chosen)[0, 5])  # a token that occurs
    assert model.training  # as it was
    monkeypatch.setattr(model, "config", model.config.model_copy(update={"eos_id": eos}))
    rows = []
    model.decoder.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    found = generate(model, *inputs, chosen)
    assert not found.is_inference()  # which a caller couldn't change
    ended = [row for row in found.tolist() if eos in row]
    assert ended
    assert all(set(row[row.index(eos) + 1 :]) <= {0} for row in ended)
    beams = chosen.num_beams
    assert rows[1] == 4 * beams
    assert 0 < rows[-1] < 4 * beams
    assert rows[1:] == sorted(rows[1:], reverse=True)
    rows.clear()
    ids, mask = inputs
    alone = generate(model, ids[:1], mask[:1], chosen)
    assert torch.equal(alone[0], found[0, : alone.size(1)])
    assert alone.size(1) <= len(rows) < 30  # a beam that is longer than the best may have to be seen out
    assert beams > 1 or len(rows) == alone.size(1)  # no more than this row needs


def test_draws_are_uniform_and_those_of_a_longer_run_begin_with_those_of_a_shorter():
    draws = uniform_draws(settings(max_new_tokens=500), range(200))
    assert 0 <= draws.min() < 1e-3
    assert 1 - 1e-3 < draws.max() < 1
    torch.testing.assert_close(torch.histc(draws, 10, 0, 1) / draws.numel(), torch.full((10,), 0.1), rtol=0, atol=5e-3)
    torch.testing.assert_close(uniform_draws(settings(max_new_tokens=3), [7]), draws[7:8, :3], rtol=0, atol=0)
    assert torch.equal(uniform_draws(settings(), [5, 2])[1], uniform_draws(settings(), [2])[0])
    assert not torch.equal(uniform_draws(settings(), [2]), uniform_draws(settings(seed=1), [2]))


def test_padding_before_a_prompt_repeats_nothing():
    assert repeating(torch.tensor([[-1, -1, 3, 2]]), 1, 5).tolist() == [[False, False, True, True, False]]


@each(
    "wrong, message",
    [
        ({"temperature": -1.0}, "greater than or equal to 0"),
        ({"temperature": float("nan")}, "finite"),
        ({"top_p": 0.0}, "greater than 0"),
        ({"max_new_tokens": 0}, "greater than 0"),
        ({"min_new_tokens": 21}, "21 exceeds max_new_tokens, 20"),
        ({"num_beams": 2, "temperature": 1.0}, "temperature must be 0"),
        ({"length_penalty": 2.0}, "num_beams must exceed 1"),
        ({"early_stopping": "never"}, "num_beams must exceed 1"),
        ({"num_beams": 2, "num_return_sequences": 3}, "3 exceeds num_beams, 2"),
        ({"num_beams": 2, "early_stopping": "soon"}, "expected true, false or never, got 'soon'"),
        ({"top_k": 5}, "temperature must exceed 0"),
        ({"beams": 5}, "Extra inputs"),
    ],
)
def test_settings_that_contradict_are_refused(wrong, message):
    with pytest.raises(ValidationError, match=message):
        settings(**wrong)


def test_what_a_model_cannot_do_is_refused(model, inputs):
    with pytest.raises(UserError, match="51 beams need twice as many ids, not 100"):
        generate(model, *inputs, settings(num_beams=51))
    learned = as_at_the_start("t5, learned", max_positions=20)
    generate(learned, *inputs, settings(max_new_tokens=20))
    with pytest.raises(UserError, match="21 tokens after 1 exceed the 20 that the model takes"):
        generate(learned, *inputs, settings(max_new_tokens=21))
    with pytest.raises(UserError, match="an input has 21 tokens, but the model takes 20 at most"):
        generate(learned, torch.ones(1, 21, dtype=torch.long))
    with pytest.raises(UserError, match="the family encoder_only don't generate"):
        generate(as_at_the_start("bert"), *inputs, settings())


class Hungry(AfterEachToken):
    def decode(self, tokens, cache, mask):
        return torch.empty(2**60)


def test_a_text_that_memory_is_too_small_for_is_refused_in_a_line():
    """4 heads of 300,000 × 300,000 biases in fp64: 2.88 TB, or as much again for the padding of the shorter text."""
    ids = torch.full((2, 300_000), 5)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    with pytest.raises(
        UserError, match=r"attention of 300,000 tokens to 300,000 needs 2\.9 TB of memory, and there are .*; give"
    ):
        generate(random_model("t5"), ids[:1])
    with pytest.raises(UserError, match=r" needs 8\.6 TB of memory"):
        generate(random_model("t5"), ids, mask)
    whole = torch.zeros(2, 4, 300_000, 1)
    with pytest.raises(UserError, match=r" needs 2\.9 TB of memory"):
        attention_weights(whole, whole, None, False, 1.0)
    with pytest.raises(
        UserError, match=r"too little memory for 2 texts of up to 300,000 tokens together: .*; give"
    ) as one:
        generate(Hungry(torch.zeros(5, 5)), ids)
    assert "\n" not in str(one.value)


def test_sampled_shares():
    shares = torch.tensor([0.1, 0.5, 0.0, 0.15, 0.25])
    draws = (torch.arange(10_000) / 10_000)[:, None]  # every quantile once
    counted = torch.bincount(sample(shares.log().expand(10_000, 5), draws).flatten(), minlength=5) / 10_000
    torch.testing.assert_close(counted, shares, rtol=0, atol=2e-4)


@each("temperature", [0.3, 1.7])
def test_sampling_leaves_out_what_transformers_leaves_out(temperature):
    """Compares the scores from which its `generate` samples, for 64 prompts; half of the 500 tokens are as likely as
    the others."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 500, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}
    reference = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=499, eos_token_id=499, pad_token_id=499)
    ).eval()
    with torch.no_grad():
        matrix = reference.transformer.wte.weight.normal_(std=0.4)
        matrix[250:] = matrix[:250]
    prompts = torch.randint(500, (64, 5))
    for top_k in (None, 1, 7, 600):
        for top_p in (1e-6, 0.5, 0.95, 1.0):
            theirs = reference.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=1, top_k=top_k or 0,
                top_p=top_p, temperature=temperature, output_scores=True, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
            settings = GenerationSettings(temperature=temperature, top_k=top_k, top_p=top_p)
            assert torch.equal(warped(theirs.logits[0], settings), theirs.scores[0])


def test_spans_are_split_at_sentinels():
    """By the vocabulary's marks; malformed targets give what can be read."""
    assert split_spans([99, 5, 6, 98, 7, 1, 0, 0], VOCABULARY) == {99: [5, 6], 98: [7]}
    others = Vocabulary(100, (4, 90), pad=1, eos=2, unk=3, bos=0, first_sentinel=99, sentinels=10)
    assert split_spans([99, 5, 0, 98, 7, 2, 1], others) == {99: [5, 0], 98: [7]}
    assert split_spans([], VOCABULARY) == {}
    assert split_spans([8, 99, 98, 7, 99, 5], VOCABULARY) == {99: [], 98: [7]}
    assert split_spans([99, 5, 1, 98, 6], VOCABULARY) == {99: [5]}


@pytest.fixture(scope="module")
def tokenizer(spiece):
    return Tokenizer(SentencePiece.read(spiece), (), 20)


@pytest.fixture
def trained(tokenizer):
    return TrainedModel(random_model("t5, learned", vocab_size=320), tokenizer)


LINES = ["The Work is provided.", "", "A <extra_id_0> license <extra_id_1> you."]


def test_texts_are_answered_in_order_whatever_the_batches(trained):
    chosen = settings(temperature=1.0)
    one = list(answer_texts(trained, LINES, chosen, batch_size=1))
    assert [written.text for written in one] == LINES
    assert list(answer_texts(trained, LINES, chosen, batch_size=2)) == list(answer_texts(trained, LINES, chosen)) == one
    again = list(answer_texts(trained, [LINES[0]] * 3, chosen))
    assert len({written.generated for written in again}) == 3  # each by its number
    assert one[0].whole == one[0].generated
    assert [written.has_blanks for written in one] == [False, False, True]
    assert one[2].whole.startswith("A [")


@pytest.fixture
def in_fp32(tokenizer):
    """As users sample: here rounding could decide between two tokens."""
    return TrainedModel(random_model("t5", std=0.5, vocab_size=320).float(), tokenizer)


def test_a_sample_depends_on_seed_text_and_number_alone(in_fp32):
    """To the bit, in fp32: batches have any size, and other texts of another length are in between."""
    chosen = settings(temperature=1.0, max_new_tokens=12)
    texts = ["The Work", "A <extra_id_0> license", "The Work"]
    whole = list(Answers(in_fp32, texts, chosen, samples=20).following(0))
    assert [(one.text, one.sample) for one in whole] == [(text, number) for text in texts for number in range(20)]
    assert len({one.generated for one in (*whole[:20], *whole[40:])}) > 30  # equal texts have different samples
    for size in (1, 3, 7, 64):
        assert list(Answers(in_fp32, texts, chosen, size, samples=20).following(0)) == whole
    assert list(Answers(in_fp32, texts, chosen, samples=20).following(37)) == whole[37:]
    assert list(Answers(in_fp32, texts[:1], chosen, samples=5).following(0)) == whole[:5]
    alone = list(Answers(in_fp32, texts[1:2], chosen, samples=20).following(0))
    assert alone == whole[20:40]
    other = list(Answers(in_fp32, texts[:1], settings(temperature=1.0, max_new_tokens=12, seed=1)).following(0))
    assert other[0].generated != whole[0].generated


def test_batches_hold_a_number_of_tokens(in_fp32, monkeypatch):
    texts = [LINES[0]] * 50 + [LINES[0] * 3] * 3
    rows = []
    monkeypatch.setattr("pretrain.evaluate.generation.texts._TOKENS", 1000)
    in_fp32.model.encoder.register_forward_pre_hook(lambda _, given: rows.append(tuple(given[0].shape[:2])))
    answers = list(answer_texts(in_fp32, texts, settings(max_new_tokens=20)))
    assert [one.text for one in answers] == texts
    assert sum(number for number, _ in rows) == 53
    assert all(number * (length + 20) <= 1000 for number, length in rows)
    assert len(rows) > 1
    assert all((number + 1) * (length + 20) > 1000 for number, length in rows[:-1])


def test_the_likeliest_fillings_of_a_blank_come_first(trained):
    """None of the empty filling and those of one token is likelier than what is found in its place. None is listed
    twice, though the empty filling and a lone mark of a word's beginning are both shown as []."""
    for fillings in likeliest_fillings(trained, LINES[2], 40):
        assert len({filling.text for filling in fillings}) == 40
    found = likeliest_fillings(trained, LINES[2], 3)
    assert [len(fillings) for fillings in found] == [3, 3]
    first = [filling.probability for filling in found[0]]
    assert first == sorted(first, reverse=True)
    model, tokenizer = trained.model, trained.tokenizer
    sentinel = tokenizer.vocabulary.first_sentinel
    ends = [tokenizer.vocabulary.eos, *tokenizer.vocabulary.sentinel_ids]
    words = list(range(2, 300))
    with torch.no_grad():
        states = model.encode(torch.tensor([tokenizer.encode_with_sentinels(LINES[2])]))
        prefixes = torch.tensor([[model.config.decoder_start_id, sentinel, word] for word in words])
        shares = model.decode(prefixes, states.expand(len(words), -1, -1)).softmax(dim=-1)
    of_one = shares[range(len(words)), 1, words] * shares[:, 2, ends].sum(dim=1)
    by_text = {"": float(shares[0, 1, ends].sum())}
    for word, share in zip(words, of_one.tolist(), strict=True):
        text = tokenizer.decode([word]).strip()
        by_text[text] = max(share, by_text.get(text, 0.0))
    short = sorted(by_text.values(), reverse=True)
    assert all(mine >= other - 1e-12 for mine, other in zip(first, short, strict=False))
    assert any(abs(mine - other) < 1e-12 for mine in first for other in short[:3])


def test_a_causal_model_goes_on_with_a_text(tokenizer):
    model = random_model("decoder_only, rotary", std=1.0, vocab_size=320)
    trained = TrainedModel(model, tokenizer)
    written = list(answer_texts(trained, ["The Work", ""], settings(max_new_tokens=5)))
    assert written[0].whole.startswith("The Work")
    assert written[0].whole != "The Work"
    prompt = torch.tensor([tokenizer.encode(["The Work"])[0]])
    new = until_eos(generate(model, prompt, None, settings(max_new_tokens=5))[0].tolist())
    assert written[0].generated == tokenizer.decode(new)
    sampled = settings(temperature=1.0)
    together, alone = (list(answer_texts(trained, LINES, sampled, batch_size=size)) for size in (3, 1))
    assert together == alone


@pytest.fixture(scope="module")
def with_marks(spiece):
    return Tokenizer(SentencePiece.read(spiece), ("<s>", "<mask>", "[R]"), 20)


def test_an_input_begins_and_ends_as_in_training(with_marks):
    """Only rows of denoising begin with BOS, as a BART does whose training is unknown. `in_one_row` has EOS behind an
    input. A text may begin with a mode token of UL2."""
    text, (ids,), vocabulary = "The Work", with_marks.encode(["The Work"]), with_marks.vocabulary
    eos, bos, mode = [vocabulary.eos], [vocabulary.bos], [vocabulary.special["[R]"]]
    for family, objective, expected in [
        ("bart", None, [*bos, *ids, *eos]),
        ("bart", "denoising", [*bos, *ids, *eos]),
        ("bart", "text_to_text", [*ids, *eos]),
        ("t5", None, [*ids, *eos]),
        ("decoder_only", None, ids),
        ("decoder_only", "in_one_row", [*ids, *eos]),
    ]:
        trained = TrainedModel(as_at_the_start(family, vocab_size=with_marks.size), with_marks, objective)
        assert input_ids(trained, text) == expected, (family, objective)
        if family == "t5":
            assert input_ids(trained, "[R] The Work") == [*mode, *expected]
            assert input_ids(trained, "[R]<extra_id_0>") == [*mode, vocabulary.first_sentinel, *eos]


def test_answers_are_formed_as_in_training(with_marks):
    """A decoder that was trained on `in_one_row` answers. Outputs that are allowed begin with BOS as targets do."""
    model = random_model("decoder_only", std=1.0, vocab_size=with_marks.size)
    (one,) = answer_texts(TrainedModel(model, with_marks, "in_one_row"), ["The Work"], settings(max_new_tokens=5))
    prompt = torch.tensor([with_marks.encode_with_sentinels("The Work")])
    new = until_eos(generate(model, prompt, None, settings(max_new_tokens=5))[0].tolist())
    assert one.generated == one.whole == with_marks.decode(new)
    bart = random_model("bart", vocab_size=with_marks.size)
    longest = len(with_marks.encode(["a license"])[0]) + 1
    for objective, begins in ((None, 1), ("text_to_text", 0)):
        trained = PretrainedModel(TrainedModel(bart, with_marks, objective))
        with pytest.raises(UserError, match=f"the longest output has {longest + begins} tokens with EOS"):
            trained.generate("x", allowed=["a license"], max_new_tokens=1)


def test_a_checkpoint_says_what_its_model_was_trained_on(with_marks, small_corpus, tmp_path):
    """A checkpoint of before goes by its run's `data.objective`, or by the run's corpora that are still the same."""
    model = as_at_the_start("bart", vocab_size=with_marks.size)
    parts = (model.config, model.state_dict(), with_marks)
    save_weights(*parts, tmp_path / "imported")
    origin = checkpoint_index.read(tmp_path / "imported")
    corpus = open_corpus(small_corpus)

    def of_run(data):
        return replace(origin, identity={**origin.identity, "data": data})

    here, moved = (run_file(tmp_path / name, folder) for name, folder in (("a", small_corpus), ("b", tmp_path / "no")))
    save_weights(*parts, tmp_path / "recorded", replace(origin, objective="denoising"))
    save_weights(*parts, tmp_path / "by_key", of_run({"objective": {"name": "denoising"}}))
    save_weights(*parts, tmp_path / "by_corpus", of_run({"train": [{"corpus": corpus.fingerprint}]}), here)
    save_weights(*parts, tmp_path / "other", of_run({"train": [{"corpus": "of another corpus"}]}), here)
    save_weights(*parts, tmp_path / "moved", of_run({"train": [{"corpus": corpus.fingerprint}]}), moved)
    for name, objective in (
        ("imported", None),
        ("recorded", "denoising"),
        ("by_key", "denoising"),
        ("by_corpus", corpus.objective.name),
        ("other", None),
        ("moved", None),
    ):
        assert TrainedModel.open(tmp_path / name).objective == objective, name


def test_blanks_are_whole_words_that_a_hash_chooses(small_corpus):
    corpus = open_corpus(str(small_corpus))
    pairs = blank_out(corpus, corpus.tokenizer, "span_corruption", 4, seed=0)
    for given, sentence in pairs:
        words, blanks = sentence.split(" "), [word for word in given.split(" ") if word.startswith("<")]
        assert blanks == [f"<extra_id_{number}>" for number in range(len(blanks))]
        assert 1 <= len(blanks) <= len(words) // 7
        assert all(left in (right, *blanks) for left, right in zip(given.split(" "), words, strict=True))
        assert all(right.isalpha() for left, right in zip(given.split(" "), words, strict=True) if left != right)
    assert blank_out(corpus, corpus.tokenizer, "span_corruption", 2, seed=0) == pairs[:2]
    assert blank_out(corpus, corpus.tokenizer, "span_corruption", 4, seed=1) != pairs


def test_blanks_are_masks_for_denoising_and_where_there_are_no_sentinels(small_corpus):
    """Of the words that are left, none has moved or changed."""
    corpus = open_corpus(str(small_corpus))
    pieces = corpus.tokenizer.model
    with_masks = Tokenizer(pieces, ["<mask>", "<s>"], 0)
    for given, sentence in (pairs := blank_out(corpus, with_masks, "span_corruption", 3, seed=0)):
        assert "<mask>" in given
        assert "<s>" not in given
        rest = iter(sentence.split())
        assert all(word in rest for word in given.split() if "<mask>" not in word)
        assert with_masks.vocabulary.mask in with_masks.encode_with_sentinels(given)
    assert len(pairs) == 3
    assert blank_out(corpus, Tokenizer(pieces, ["<mask>", "<s>"], 9), "denoising", 3, seed=0) == pairs
    with pytest.raises(UserError, match="neither"):
        blank_out(corpus, Tokenizer(pieces, [], 0), "span_corruption", 3, seed=0)
