"""The autoregressive encoder-decoder, compared with a slow one written from its definition, and its properties."""

import math
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pretrain.models import AutoregressiveConfig, build, outline
from pretrain.models.autoregressive import running_mean
from pretrain.models.model import Sizes
from tests.pretrain.placed import placed
from tests.slow import slow

VOCABULARY = 19
PUBLISHED = Path(__file__).parents[2] / "configs/models/autoregressive-yan2024.yaml"
MSE = {"kind": "mse"}
BEST = {"subtract_positions": "without_norm", "embedding_loss": {"kind": "mse", "coefficient": 8.0}}
# Every option is on in one of them, in combinations that differ as much as possible.
VARIANTS = {
    "plain": {},
    "best": BEST,
    "alternate": {"order": "alternate", "subtract_positions": "with_norm", "add_positions": True, "bias": True},
    "bridge norm": {"bridge_norm": True, "add_positions": True, "embedding_loss": {"kind": "cosine"}},
    "cross bias": {"cross_attention_bias": True, "num_cross_heads": 2, "subtract_positions": "without_norm"},
    "rotary": {"positions": "rotary", "max_positions": None, "num_cross_heads": 2, "embedding_loss": MSE},
    "rotary, alternate": {"positions": "rotary", "max_positions": None, "num_cross_heads": 1, "order": "alternate"},
}
FIRST = ("best", "alternate", "rotary")
OTHERS = [name for name in VARIANTS if name not in FIRST]
every_variant = pytest.mark.parametrize(
    "changes", [VARIANTS[name] for name in FIRST] + slow(*(VARIANTS[name] for name in OTHERS)), ids=[*FIRST, *OTHERS]
)


def tiny(**changes):
    sizes = {"d_model": 8, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 3, "max_positions": 12}
    return AutoregressiveConfig(**{"vocab_size": VOCABULARY, **sizes, **changes})


def ids(*shape, seed=0, vocabulary=VOCABULARY):
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def randomised(config, seed=0):
    """A model in fp64 in which every weight matters."""
    torch.manual_seed(seed)
    model = build(config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm.weight" in name), std=0.4)
    return model


def published(**changes):
    return AutoregressiveConfig(**{**yaml.safe_load(PUBLISHED.read_text())["model"], **changes})


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
    return logits, embedding_loss(config.embedding_loss, embeddings, encoder_out, norm)


def embedding_loss(settings, embeddings, encoder_out, norm):
    if settings is None:
        return None
    embeddings = embeddings.detach() if settings.detach == "embedding" else embeddings
    encoder_out = encoder_out.detach() if settings.detach == "encoder_out" else encoder_out
    distances = []
    if settings.embedding_norm == "before_mean":
        embeddings = norm("embedding_loss.embedding_norm", embeddings)
    for t in range(len(embeddings)):
        mean = sum(embeddings[: t + 1]) / (t + 1)
        if settings.embedding_norm == "after_mean":
            mean = norm("embedding_loss.embedding_norm", mean)
        out = norm("embedding_loss.encoder_norm", encoder_out[t]) if settings.encoder_norm else encoder_out[t]
        if settings.kind == "mse":
            distances.append(((mean - out) ** 2).sum() / len(mean))
        else:
            cosine = mean @ out / (mean @ mean).sqrt() / (out @ out).sqrt()
            distances.append(1 - (cosine + 1) / 2 if settings.kind == "cosine" else -((cosine + 1) / 2).log())
    return sum(distances) / len(distances)


def leaves(model):
    return {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}


def compare(config):
    """Compares logits, both losses and the gradient of their sum, for two rows."""
    model, tokens, labels = randomised(config), ids(2, 4), ids(2, 4, seed=1)
    weights = leaves(model)
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


@pytest.mark.parametrize("subtract", ["without_norm", *slow("none", "with_norm")])
@pytest.mark.parametrize("order", ["original", *slow("alternate")])
def test_the_model_is_as_defined(order, subtract):
    for add, bridge_norm, bias in product([False, True], repeat=3):
        config = {"order": order, "subtract_positions": subtract, "add_positions": add, "bridge_norm": bridge_norm}
        compare(tiny(num_decoder_layers=2, num_encoder_layers=1, bias=bias, **config))


@every_variant
def test_variants_are_as_defined(changes):
    compare(tiny(**changes))


@pytest.mark.parametrize("detach", ["encoder_out", *slow("embedding", "none")])
@pytest.mark.parametrize("kind", ["mse", "cosine", "log_cosine"])
def test_the_embedding_loss_is_as_defined(kind, detach):
    for norm, encoder_norm, learned in product(["before_mean", "after_mean", "none"], [True, False], [True, False]):
        loss = {"kind": kind, "detach": detach, "embedding_norm": norm, "encoder_norm": encoder_norm}
        loss["learned_norms"] = learned
        compare(tiny(num_decoder_layers=1, num_encoder_layers=1, embedding_loss={**loss, "coefficient": 1.5}))


@pytest.mark.parametrize("changes", [VARIANTS["alternate"], VARIANTS["rotary"]], ids=["learned", "rotary"])
def test_gradients_are_finite_differences(changes):
    """Of both losses, along a random direction of each parameter; in double precision."""
    loss = {"kind": "log_cosine", "detach": "none"}
    model = randomised(tiny(**{**changes, "num_encoder_layers": 1, "num_decoder_layers": 1, "embedding_loss": loss}))
    tokens, labels = ids(2, 5), ids(2, 5, seed=1)

    def losses():
        next_token = F.cross_entropy(model.decode(tokens).flatten(0, 1), labels.flatten())
        return torch.stack([next_token, model(tokens, labels)["embedding_loss"].sum()])

    names, parameters = zip(*model.train().named_parameters(), strict=True)
    gradients = [torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True) for loss in losses()]
    generator, step = torch.Generator().manual_seed(0), 1e-6
    for number, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        direction = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        with torch.no_grad():
            parameter.add_(step * direction)
            above = losses()
            parameter.sub_(2 * step * direction)
            below = losses()
            parameter.add_(step * direction)
        expected = torch.stack([(of_loss[number] * direction).sum() for of_loss in gradients])
        torch.testing.assert_close((above - below) / (2 * step), expected, atol=1e-7, rtol=1e-5, msg=name)


# Numbers of the publication.


def test_published_parameter_counts():
    """The counts are V·d + L(12d² + 2d) + L(16d² + 4d) + d² + d, and 4d for the embedding loss; the author leaves out
    positions."""

    def counted(config):
        model = outline(config)
        return model.num_parameters() - model.position_embedding.weight.numel(), model.position_embedding.num_embeddings

    assert counted(published()) == (15_763_500, 201)
    assert counted(published(subtract_positions="none")) == (15_763_500, 200)
    assert counted(published(embedding_loss=None)) == (15_763_500 - 4 * 150, 201)
    assert counted(published(embedding_loss={"kind": "mse", "learned_norms": False})) == (15_763_500 - 4 * 150, 201)


def test_standard_deviations_at_the_start():
    torch.manual_seed(0)
    model = build(published(vocab_size=2000, d_model=160, num_encoder_layers=2, num_decoder_layers=8, bias=True))
    residual = {"encoder": 0.02 / math.sqrt(4), "decoder": 0.02 / math.sqrt(16)}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert parameter.unique().tolist() == [float(name.endswith("norm.weight"))]
        else:
            ends_a_branch = name.endswith(("o.weight", "wo.weight"))
            std = residual[name.split(".")[0]] if ends_a_branch else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name


@pytest.mark.parametrize("changes", [{}, {"order": "alternate", "bias": True, "subtract_positions": "with_norm"}])
@pytest.mark.parametrize(("d_model", "vocabulary"), [(160, 1100), (320, 5000)])
def test_first_loss_is_that_of_a_uniform_guess(changes, d_model, vocabulary):
    torch.manual_seed(0)
    sizes = {"d_model": d_model, "num_encoder_layers": 3, "num_decoder_layers": 3, "vocab_size": vocabulary}
    model = build(published(**sizes, **changes)).eval()
    with torch.no_grad():
        losses = model(ids(4, 100, vocabulary=vocabulary), ids(4, 100, seed=1, vocabulary=vocabulary))["labels"]
    assert losses.mean().item() == pytest.approx(math.log(vocabulary), abs=0.3)


def test_flops_of_the_published_model():
    model = outline(published())
    matrices = 50_257 * 150 + 13 * (12 + 16) * 150**2 + 150**2
    assert model.flops(Sizes.of_example(200, 200)) == 6 * matrices * 200 + 12 * 150 * 39 * 200**2


# What each position sees.


@every_variant
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_no_output_sees_a_later_token(changes, data):
    config = tiny(**changes)
    model = randomised(config)
    length = data.draw(st.integers(2, 12))
    place = data.draw(st.integers(1, length - 1))
    tokens, labels = ids(2, length), ids(2, length, seed=1)
    changed = tokens.clone()
    changed[:, place] = (changed[:, place] + data.draw(st.integers(1, VOCABULARY - 1))) % VOCABULARY
    before, after = model.decode(tokens), model.decode(changed)
    torch.testing.assert_close(before[:, :place], after[:, :place], rtol=0, atol=0)
    assert (before[:, place:] != after[:, place:]).any(dim=-1).all()
    if config.embedding_loss:
        before, after = (model(one, labels)["embedding_loss"] for one in (tokens, changed))
        torch.testing.assert_close(before[:, :place], after[:, :place], rtol=0, atol=1e-12)
        assert (before[:, place:] != after[:, place:]).all()


@every_variant
@settings(max_examples=5, deadline=None)
@given(lengths=st.lists(st.integers(1, 5), min_size=2, max_size=4), padding=st.integers(0, 3))
def test_examples_of_a_packed_row_do_not_see_each_other(changes, device, lengths, padding):
    model = placed(randomised(tiny(**changes)).train(), device)
    examples = [(ids(1, length, seed=i), ids(1, length, seed=9 + i)) for i, length in enumerate(lengths)]
    alone = [model(*example) for example in examples]
    sum(loss.sum() for losses in alone for loss in losses.values()).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()

    fill = torch.zeros(1, padding, dtype=torch.long)
    segments = torch.tensor([[i + 1 for i, length in enumerate(lengths) for _ in range(length)] + [0] * padding])
    positions = torch.tensor([[place for length in lengths for place in range(length)] + [0] * padding])
    packed = model(
        torch.cat([tokens for tokens, _ in examples] + [fill], dim=1),
        torch.cat([labels for _, labels in examples] + [fill - 100], dim=1),
        encoder_attention_mask=(segments > 0).long(),
        encoder_segment_ids=segments,
        encoder_positions=positions,
        decoder_segment_ids=segments,
        decoder_positions=positions,
    )
    sum(loss.sum() for loss in packed.values()).backward()
    for name, losses in packed.items():
        together = torch.cat([one[name] for one in alone] + [fill.to(losses.dtype)], dim=1)
        torch.testing.assert_close(losses, together, rtol=0, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-5)


def test_positions_of_segments_count_anew_where_none_are_given():
    model = randomised(tiny(**BEST)).train()
    batch = {"encoder_input_ids": ids(1, 6), "labels": ids(1, 6, seed=1)}
    batch["encoder_segment_ids"] = torch.tensor([[1, 1, 1, 2, 2, 0]])
    counted, given = model(**batch), model(**batch, encoder_positions=torch.tensor([[0, 1, 2, 0, 1, 0]]))
    assert torch.equal(counted["labels"], given["labels"])
    assert torch.equal(counted["embedding_loss"], given["embedding_loss"])


def test_running_mean():
    x = torch.tensor([[[2.0], [4.0], [6.0], [10.0]]])
    assert running_mean(x).flatten().tolist() == [2.0, 3.0, 4.0, 5.5]
    assert running_mean(x, torch.tensor([[1, 1, 2, 2]])).flatten().tolist() == [2.0, 3.0, 6.0, 8.0]


def test_padding_costs_nothing_and_changes_nothing(device):
    model = placed(randomised(tiny(**BEST)).train(), device)
    tokens, labels = ids(2, 8), ids(2, 8, seed=1)
    mask = torch.ones(2, 8).long()
    mask[1, 5:] = 0
    losses = model(tokens, labels.masked_fill(mask == 0, -100), encoder_attention_mask=mask)
    whole, short = model(tokens[:1], labels[:1]), model(tokens[1:, :5], labels[1:, :5])
    assert losses.keys() == {"labels", "embedding_loss"}
    for name in losses:
        torch.testing.assert_close(losses[name][:1], whole[name], rtol=0, atol=1e-6)
        torch.testing.assert_close(losses[name][1:, :5], short[name], rtol=0, atol=1e-6)
        assert losses[name][1, 5:].tolist() == [0.0, 0.0, 0.0]


def test_a_row_of_padding_alone_gives_finite_gradients(device):
    model = placed(build(tiny(**BEST)).train(), device)
    losses = model(ids(1, 4), torch.full((1, 4), -100), encoder_attention_mask=torch.zeros(1, 4).long())
    sum(loss.sum() for loss in losses.values()).backward()
    assert [loss.unique().tolist() for loss in losses.values()] == [[0.0], [0.0]]
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# Decoding.


@every_variant
def test_cached_decoding_equals_recomputation(changes, device):
    model, tokens = placed(randomised(tiny(**changes)).eval(), device), ids(3, 12)
    whole = model.decode(tokens)
    assert whole.std() > 0.5  # the comparison is not one of zeros
    cache = model.new_cache()
    pieces = [model.decode(piece, cache) for piece in tokens.split([1, 1, 3, 1, 4, 2], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-12)
    assert {one.length for layer in cache for one in layer} == {12}


@every_variant
def test_prompts_padded_on_the_left_give_the_logits_of_each_alone(changes, device):
    model = placed(randomised(tiny(**changes)).eval(), device)
    lengths, tokens = [9, 4, 1], ids(3, 9)
    mask = (torch.arange(9) >= 9 - torch.tensor(lengths)[:, None]).long()
    more = ids(3, 3, seed=1)
    whole = model.decode(torch.cat([tokens, more], dim=1), attention_mask=F.pad(mask, (0, 3), value=1))
    cache = model.new_cache()
    first = model.decode(tokens, cache, mask)
    steps = [model.decode(more[:, i : i + 1], cache, F.pad(mask, (0, i + 1), value=1)) for i in range(3)]
    stepwise = torch.cat([first, *steps], dim=1)
    for row, length in enumerate(lengths):
        alone = model.decode(torch.cat([tokens[row, 9 - length :], more[row]])[None])[0]
        torch.testing.assert_close(whole[row, 9 - length :], alone, rtol=0, atol=1e-12)
        torch.testing.assert_close(stepwise[row, 9 - length :], alone, rtol=0, atol=1e-12)


def test_rows_of_a_cache_can_be_chosen():
    model, tokens = randomised(tiny(**BEST)).eval(), ids(3, 5)
    cache, rows = model.new_cache(), torch.tensor([2, 2, 0])
    model.decode(tokens[:, :4], cache)
    for one in (one for layer in cache for one in layer):
        one.select(rows)
    chosen = tokens[rows]
    torch.testing.assert_close(model.decode(chosen[:, 4:], cache), model.decode(chosen)[:, 4:], rtol=0, atol=1e-12)


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match="13 tokens exceed the model's 12 learned positions"):
        build(tiny()).decode(ids(1, 13))
    build(tiny(positions="rotary", max_positions=None, num_cross_heads=2)).decode(ids(1, 13))


# Training and evaluation.


def test_evaluation_is_without_embedding_loss_and_dropout():
    torch.manual_seed(0)
    model = build(tiny(dropout_rate=0.5, **BEST))
    same = build(tiny(**BEST)).eval()
    same.load_state_dict(model.state_dict())
    batch = ids(2, 6), ids(2, 6, seed=1)
    trained = model.train()(*batch)
    assert not torch.equal(trained["labels"], model(*batch)["labels"])
    assert not torch.equal(trained["embedding_loss"], model(*batch)["embedding_loss"])
    evaluated = model.eval()(*batch)
    assert evaluated.keys() == {"labels"}
    assert torch.equal(evaluated["labels"], same(*batch)["labels"])


def test_z_loss_is_part_of_training_only():
    model = build(tiny(z_loss=0.1))
    batch = ids(2, 5), ids(2, 5, seed=1)
    assert (model.train()(*batch)["labels"] > model.eval()(*batch)["labels"]).all()


@every_variant
def test_bfloat16_weights_give_nearly_the_same_losses(changes):
    torch.manual_seed(0)
    model = build(tiny(**changes)).train()
    batch = {"encoder_input_ids": ids(4, 10), "labels": ids(4, 10, seed=1)}
    batch["encoder_segment_ids"] = torch.tensor([[1] * 6 + [2] * 4]).expand(4, 10)
    exact = model(**batch)
    rounded = model.bfloat16()(**batch)
    for name, losses in rounded.items():
        assert losses.dtype == torch.float32
        assert losses.mean().item() == pytest.approx(exact[name].mean().item(), rel=0.02)


@pytest.mark.slow
def test_the_graph_is_whole_for_the_compiler():
    torch.manual_seed(0)
    model = build(tiny(num_encoder_layers=1, num_decoder_layers=1, **BEST)).train()
    batch = ids(2, 9), ids(2, 9, seed=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for name, losses in compiled(*batch).items():
        torch.testing.assert_close(losses, model(*batch)[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_heads": 3}, "num_heads 3 doesn't divide d_model 8; num_cross_heads 6 doesn't divide d_model 8"),
        ({"num_heads": 8}, "num_cross_heads 16 doesn't divide d_model 8"),
        ({"max_positions": None}, "max_positions is missing"),
        ({"positions": "rotary"}, "max_positions is for learned positions"),
        ({"positions": "rotary", "max_positions": None, "num_heads": 4}, "num_cross_heads 8 makes heads of 1"),
        ({"positions": "rotary", "max_positions": None, "add_positions": True}, "need learned positions"),
        ({"positions": "rotary", "max_positions": None, "subtract_positions": "with_norm"}, "need learned positions"),
        ({"embedding_loss": {"kind": "mse", "coefficient": 0}}, "greater than 0"),
        ({"embedding_loss": {"kind": "mae"}}, "'mse', 'cosine' or 'log_cosine'"),
        ({"order": "ALT"}, "'original' or 'alternate'"),
        ({"d_modle": 3}, "d_modle"),
    ],
)
def test_an_unknown_or_impossible_setting_is_refused(wrong, message):
    with pytest.raises(ValidationError, match=message):
        tiny(**wrong)


def test_a_config_comes_back_from_a_checkpoint_as_it_was():
    config = tiny(**BEST)
    assert AutoregressiveConfig.model_validate(config.model_dump()) == config
