"""A decoder with subtracted positions, and a decoder whose inputs see one another: prefix LM without an encoder."""

import numpy as np
import torch

from data_pipeline.corpus.example_rows import balanced
from data_pipeline.corpus.objectives.language_modelling import PrefixLM
from data_pipeline.corpus.objectives.text_to_text import InOneRow
from data_pipeline.loading.batches import as_batch
from pretrain.evaluate.generation.decoding import generate
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import padded
from pretrain.models import build, parse
from pretrain.models.attention import AttentionInputs
from tests.support.example_rows import VOCABULARY as IDS
from tests.support.example_rows import ragged_rows
from tests.support.small_models import ids, made
from tests.support.tables import each


@each("norm", [False, True])
def test_the_position_of_the_next_token_is_subtracted_from_the_output(norm):
    """Logits are (final_norm(h) − table[1..T]) · embeddingᵀ, with a layer norm of the difference if asked for; so a
    model that doesn't subtract gives h, and the rest follows by hand."""
    model = made("decoder_only, subtracted, with norm" if norm else "decoder_only, subtracted").float()
    plain = made("decoder_only").float()
    weights = model.state_dict()
    assert weights["decoder.positions.weight"].shape == (65, 32)  # one row more than tokens
    shared = {name: weight for name, weight in weights.items() if "subtracted" not in name}
    plain.load_state_dict({**shared, "decoder.positions.weight": weights["decoder.positions.weight"][:64]})
    inputs = ids(2, 9)
    x = plain.decoder(plain.embedding(inputs)) - weights["decoder.positions.weight"][1:10]
    if norm:
        gain, bias = (weights[f"decoder.subtracted_norm.{kind}"] for kind in ("weight", "bias"))
        x = gain * (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() + bias
    torch.testing.assert_close(model.decode(inputs), x @ weights["embedding.weight"].T, rtol=0, atol=1e-4)


PREFIX_LM = {"family": "decoder_only", "d_model": 32, "d_ff": 64, "num_heads": 4, "num_layers": 2, "init_std": 0.3}
ROTARY = {"positions": "rotary", "norm": "rms", "qk_norm": True, "activation": "swiglu", "biases": False}
LEARNED = {"positions": "learned", "max_positions": 128}


def prefix_lm(prefix="bidirectional", **settings):
    torch.manual_seed(0)
    ids = {"vocab_size": IDS.size, "pad_id": IDS.pad, "eos_id": IDS.eos}
    return build(parse({**PREFIX_LM, **ids, "prefix_attention": prefix, **settings})).eval()


def examples(lengths=(30, 9, 17, 30)):
    rows, keys = ragged_rows([*lengths])
    return InOneRow(of=PrefixLM(length=30)).apply(rows, keys, IDS, {})


@each("settings", [ROTARY, LEARNED])
def test_losses_depend_on_every_token_of_the_prefix_and_on_no_later_one(settings):
    """The gradient of each loss with respect to the tokens' vectors says what it has seen."""
    subject = prefix_lm(**settings)
    batch = as_batch(examples((30,)), IDS.pad)
    prefix = int(batch["prefix_mask"].sum())
    vectors = subject.embedding(batch["encoder_input_ids"]).detach().requires_grad_()
    states = subject.decoder(vectors, _inputs(batch))
    weights = torch.randn(states.size(-1))  # the sum of a layer norm's output has no gradient
    for place in range(vectors.size(1)):
        (seen,) = torch.autograd.grad(states[0, place] @ weights, vectors, retain_graph=True)
        found = seen[0].abs().sum(dim=1).gt(0).nonzero().flatten().tolist()
        assert found == [*range(max(place + 1, prefix))]


def _inputs(batch):
    return AttentionInputs(**{key: value for key, value in batch.items() if key not in ("encoder_input_ids", "labels")})


def test_a_causal_decoder_reads_the_same_rows_without_seeing_ahead():
    batch = as_batch(examples(), IDS.pad)
    causal, bidirectional = prefix_lm("causal", **ROTARY), prefix_lm(**ROTARY)
    without = {name: tensor for name, tensor in batch.items() if name != "prefix_mask"}
    assert torch.equal(causal(**batch)["labels"], causal(**without)["labels"])
    assert not torch.allclose(bidirectional(**batch)["labels"], causal(**batch)["labels"])


@each("settings", [ROTARY, LEARNED])
def test_packed_rows_give_the_same_losses(settings):
    subject, apart = prefix_lm(**settings), examples()
    alone = subject(**as_batch(apart, IDS.pad))["labels"]
    packed = subject(**as_batch(balanced(apart, 2), IDS.pad))["labels"]
    losses = [np.sort(found[found != 0].detach().numpy()) for found in (alone, packed)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


def test_generation_reads_a_prompt_as_training_reads_inputs():
    """The likeliest tokens after prompts of different lengths are those that the loss of the whole row prefers."""
    subject = prefix_lm(**ROTARY)
    prompts = [[5, 9, 11, 4, 1], [7, 8, 1]]
    ids, mask = padded(prompts, IDS.pad, left=True)
    settings = GenerationSettings(max_new_tokens=6)
    written = generate(subject, ids, mask, settings).tolist()
    for prompt, row in zip(prompts, written, strict=True):
        for count, token in enumerate(row):
            whole = torch.tensor([[*prompt, *row[:count]]])
            seen = (torch.arange(whole.size(1)) < len(prompt)).long()[None]
            inputs = {"prefix_mask": seen}
            logits = subject.lm_head(subject.decoder(subject.embedding(whole), _inputs(inputs)))[0, -1]
            assert int(logits[: IDS.size].argmax()) == token
            if token == IDS.eos:
                break
