"""The autoregressive encoder-decoder, compared with a slow one written from its definition, and its properties."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from pretrain.models import AutoregressiveConfig, build
from pretrain.models.autoregressive import CausalConvolution, PositionMatrix, RunningMean
from tests.pretrain.exported import randomise
from tests.pretrain.small_models import AUTOREGRESSIVE_VARIANTS, ids, made
from tests.tables import each

VOCABULARY = 19


def tiny(**changes):
    sizes = {"d_model": 8, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 3}
    limit = {} if changes.get("positions") == "rotary" and "max_positions" not in changes else {"max_positions": 12}
    return AutoregressiveConfig(**{"vocab_size": VOCABULARY, **sizes, **limit, **changes})


# The definition, row by row and head by head.


def reference(weights, config, tokens):
    """The logits of one row of tokens, and its embedding loss before the coefficient."""
    table = weights.get("position_embedding.weight")
    length = len(tokens)

    def linear(name, x):
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def norm(name, x):
        centred = x - x.mean(-1, keepdim=True)
        y = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights.get(f"{name}.weight", 1.0)
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def turned(x):
        if config.positions == "learned":
            return x
        half = x.size(1) // 2
        speeds = torch.tensor([10_000 ** (-i / half) for i in range(half)], dtype=torch.float64)
        turns = torch.arange(length)[:, None] * speeds
        pairs = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(turns), turns)
        return torch.cat([pairs.real, pairs.imag], dim=1)

    def attention(name, x, memory, heads):
        queries, keys, values = linear(f"{name}.q", x), linear(f"{name}.k", memory), linear(f"{name}.v", memory)
        width, joined = config.d_model // heads, []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            scores = turned(queries[:, part]) @ turned(keys[:, part]).T / math.sqrt(width)
            shares = scores.exp() * torch.ones(length, length).tril()
            joined.append(shares @ values[:, part] / shares.sum(dim=1, keepdim=True))
        return linear(f"{name}.o", torch.cat(joined, dim=1))

    def feed_forward(name, x):
        inner = linear(f"{name}.wi", x)
        return linear(f"{name}.wo", inner * (1 + torch.erf(inner / math.sqrt(2))) / 2)

    embeddings = weights["embedding.weight"][tokens]
    if config.positions == "learned":
        embeddings = embeddings + table[:length]
    h = embeddings
    for i in range(config.num_encoder_layers):
        layer = f"encoder.{i}"
        x = norm(f"{layer}.self_attention_norm", h)
        h = h + attention(f"{layer}.self_attention", x, x, config.num_heads)
        h = h + feed_forward(f"{layer}.feed_forward", norm(f"{layer}.feed_forward_norm", h))
    encoder_out = h
    h = linear("bridge.linear", norm("bridge.norm", h) if config.bridge_norm else h)
    if config.add_positions:
        h = h + table[1 : length + 1]
    for i in range(config.num_decoder_layers):
        layer = f"decoder.{i}"
        for kind in {"original": ["self", "cross"], "alternate": ["cross", "self"]}[config.order]:
            x = norm(f"{layer}.{kind}_attention_norm", h)
            memory = x if kind == "self" else norm(f"{layer}.encoder_norm", encoder_out)
            heads = config.num_heads if kind == "self" else config.num_cross_heads or 2 * config.num_heads
            h = h + attention(f"{layer}.{kind}_attention", x, memory, heads)
        h = h + feed_forward(f"{layer}.feed_forward", norm(f"{layer}.feed_forward_norm", h))
    h = norm("final_norm", h)
    if config.subtract_positions != "none":
        h = h - table[1 : length + 1]
    if config.subtract_positions == "with_norm":
        h = norm("subtracted_norm", h)
    logits = h @ weights["embedding.weight"].T
    return logits, embedding_loss(config.embedding_loss, embeddings, encoder_out, norm, weights)


def embedding_loss(settings, embeddings, encoder_out, norm, weights):
    if settings is None:
        return None
    embeddings = embeddings.detach() if settings.detach == "embedding" else embeddings
    encoder_out = encoder_out.detach() if settings.detach == "encoder_out" else encoder_out
    if settings.embedding_norm == "before_mean":
        embeddings = norm("embedding_loss.embedding_norm", embeddings)
    outputs = norm("embedding_loss.encoder_norm", encoder_out) if settings.encoder_norm else encoder_out
    table = weights.get("embedding_loss.aggregation.weight")
    distances = []
    for t, out in enumerate(outputs):
        if settings.aggregation == "mean":
            aggregate = sum(embeddings[: t + 1]) / (t + 1)
        elif settings.aggregation == "matrix":
            aggregate = sum(table[t, s] * embeddings[s] for s in range(t + 1))
        else:
            aggregate = sum(table[back] * embeddings[t - back] for back in range(min(len(table), t + 1)))
        if settings.embedding_norm == "after_mean":
            aggregate = norm("embedding_loss.embedding_norm", aggregate)
        cosines = [aggregate @ one / (aggregate @ aggregate).sqrt() / (one @ one).sqrt() for one in outputs[: t + 1]]
        shares, others = (one.exp() / one.exp().sum() for one in (aggregate, out))
        distances.append(
            {
                "mse": ((aggregate - out) ** 2).sum() / len(out),
                "l1": (aggregate - out).abs().sum() / len(out),
                "cosine": 1 - (cosines[t] + 1) / 2,
                "log_cosine": -((cosines[t] + 1) / 2).log(),
                "kl": (shares * (shares / others).log()).sum(),
                "contrastive": sum((10 * (one - cosines[t])).exp() for one in cosines).log(),
            }[settings.kind]
        )
    return sum(distances) / len(distances)


def compare(config):
    """Compares logits, both losses and the gradient of their sum, for two rows."""
    model = randomise(build(config), std=0.4).double()
    tokens, labels = ids(2, 4, vocabulary=VOCABULARY), ids(2, 4, seed=1, vocabulary=VOCABULARY)
    weights = {name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()}
    rows = [reference(weights, config, row) for row in tokens]
    logits = torch.stack([logits for logits, _ in rows])
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    close = {"rtol": 0, "atol": 1e-9 if config.positions == "learned" else 1e-6}  # rotary angles are in fp32
    found = model.decode(tokens)
    torch.testing.assert_close(found, logits, **close)
    losses = model.train()(tokens, labels)  # "labels" in fp32, like all softmaxes
    assert losses["labels"].mean().item() == pytest.approx(expected.item(), abs=1e-5)
    total = F.cross_entropy(found.flatten(0, 1), labels.flatten())
    if config.embedding_loss:
        scaled = config.embedding_loss.coefficient * (rows[0][1] + rows[1][1]) / 2
        torch.testing.assert_close(losses["embedding_loss"].mean(), scaled, **close)
        expected, total = expected + scaled, total + losses["embedding_loss"].mean()
    else:
        assert losses.keys() == {"labels"}
    expected.backward()
    total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == weights.keys()
    for name, gradient in gradients.items():
        assert gradient is not None, f"{name} has no part in the losses"
        torch.testing.assert_close(gradient, weights[name].grad, **close)


@each("order, subtract", product(["original", "alternate"], ["without_norm", "none", "with_norm"]))
def test_the_model_is_as_defined(order, subtract):
    for add, bridge_norm, bias in product([False, True], repeat=3):
        config = {"order": order, "subtract_positions": subtract, "add_positions": add, "bridge_norm": bridge_norm}
        compare(tiny(num_decoder_layers=2, num_encoder_layers=1, bias=bias, **config))


@each("changes", AUTOREGRESSIVE_VARIANTS.values())
def test_variants_are_as_defined(changes):
    compare(tiny(**changes))


NORMS = {"embedding_norm": ["before_mean", "after_mean", "none"], "encoder_norm": [True, False]}
NORMS |= {"learned_norms": [True, False], "detach": ["encoder_out", "embedding", "none"]}
KERNELS = {"mean": None, "convolution": 3, "matrix": None}
LOSSES = [
    *({"kind": kind, "coefficient": 1.5, **dict(zip(NORMS, values, strict=True))}
      for kind, *values in product(["mse", "cosine", "log_cosine"], *NORMS.values())),
    *({"kind": kind, "detach": "none", "aggregation": aggregation, "kernel_size": size}
      for kind, (aggregation, size) in product(["l1", "kl", "contrastive", "mse", "cosine"], KERNELS.items())),
]  # fmt: skip


@each("loss", LOSSES)
def test_the_embedding_loss_is_as_defined(loss):
    compare(tiny(num_decoder_layers=1, num_encoder_layers=1, embedding_loss=loss))


# What each position sees.


def test_positions_of_segments_count_anew_where_none_are_given():
    model = made("autoregressive, best").train()
    batch = {"encoder_input_ids": ids(1, 6), "labels": ids(1, 6, seed=1)}
    batch["encoder_segment_ids"] = torch.tensor([[1, 1, 1, 2, 2, 0]])
    counted, given = model(**batch), model(**batch, encoder_positions=torch.tensor([[0, 1, 2, 0, 1, 0]]))
    assert torch.equal(counted["labels"], given["labels"])
    assert torch.equal(counted["embedding_loss"], given["embedding_loss"])


@each("kind, sizes, expected", [(RunningMean, (), [2, 3, 6, 8]), (PositionMatrix, (4, 4), [2, 3, 6, 8]),
                                (CausalConvolution, (2, 1), [1, 3, 3, 8])])  # fmt: skip
def test_aggregations_start_as_means_and_begin_anew_in_each_segment(kind, sizes, expected):
    segments = torch.tensor([[1, 1, 2, 2]])
    seen = (segments[:, None] == segments[..., None]).tril()
    assert kind(*sizes)(torch.tensor([[[2.0], [4.0], [6.0], [10.0]]]), seen).flatten().tolist() == expected


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match="13 tokens exceed the model's 12 learned positions"):
        made("autoregressive, plain", max_positions=12).decode(ids(1, 13))
    made("autoregressive, rotary").decode(ids(1, 73))


def test_evaluation_is_without_embedding_loss():
    model, batch = made("autoregressive, best"), (ids(2, 6), ids(2, 6, seed=1))
    assert model.train()(*batch).keys() == {"labels", "embedding_loss"}
    assert model.eval()(*batch).keys() == {"labels"}
