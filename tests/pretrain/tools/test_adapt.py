"""A decoder-only model becomes an encoder-decoder: what is copied computes what it did."""

from pathlib import Path

import pytest
import torch

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.corpus import open_corpus
from pretrain import export as huggingface
from pretrain.config import RunConfig
from pretrain.engine.checkpoint.trained import TrainedModel, save_weights
from pretrain.models import DecoderOnlyConfig, build, stacks
from pretrain.tools.adapt import adapted, target
from tests.pretrain.export.test_export import ROTARY_DECODERS
from tests.support.exported import randomise
from tests.support.in_process import done_here, run_here
from tests.support.small_models import ids
from tests.support.tables import each

GPT2 = {"d_model": 48, "d_ff": 96, "num_heads": 4, "num_layers": 2, "max_positions": 40}
SOURCES = {**ROTARY_DECODERS, "GPT-2": GPT2}
PAIRS = [("Gemma 2", "t5gemma"), ("Gemma 3", "t5gemma2"), *((kind, "modern") for kind in SOURCES)]


def config(kind, **changes):
    return DecoderOnlyConfig(**{"vocab_size": 500, **SOURCES[kind], **changes})


def become(style, decoder, encoder=None, seed=0):
    """(the encoder-decoder, what became of the weights)"""
    made = target(style, decoder.config, encoder.config if encoder else None)
    result = adapted(made, (encoder or decoder).state_dict(), decoder.state_dict(), seed)
    model = build(made)
    assert not model.load_state_dict(result.state, strict=False).unexpected_keys
    return model.eval(), result


@each("kind, style", PAIRS)
@torch.no_grad()
def test_a_balanced_model_computes_what_its_decoder_did(kind, style, monkeypatch):
    decoder = randomise(build(config(kind)))
    model, _ = become(style, decoder)
    given = stacks.self_attention_mask
    merged = model.config.family == "t5gemma2"

    # with a causal mask, the encoder has the decoder's hidden states
    def causally(x, keys, seen, *others):
        mask = torch.ones(2, 30)  # a bias: encoders take no flag
        return given(x, keys, seen._replace(causal=True, key_mask=mask), *others)

    inputs = ids(2, 30)
    with monkeypatch.context() as patch:
        patch.setattr(stacks, "self_attention_mask", causally)
        patch.setattr(model.encoder, "kinds", model.decoder.kinds)
        expected = decoder.decoder(decoder.embedding(inputs))
        assert expected.std() > 0.1
        assert (model.encode(inputs) - expected).abs().max() <= 1e-5 * expected.abs().max()

    # each layer's cross-attention is its self-attention, and isn't idle; without it, the logits are the decoder's
    theirs = decoder.state_dict()
    for name, tensor in () if merged else model.state_dict().items():
        if "cross_attention" in name:
            stack, _, number, part, *rest = name.split(".")
            own = ".".join([part.replace("cross_attention", "attention"), *rest])
            assert torch.equal(tensor, theirs[f"{stack}.layers.{number}.{own}"]), name
    inputs, targets = ids(2, 9, seed=1), inputs
    states, expected = model.encode(inputs), decoder.decode(targets)
    assert expected.std() > 0.5
    assert (model.decode(targets, states) - expected).abs().max() > 0.01
    for layer in () if merged else model.decoder.layers:
        for parameter in layer.cross_attention.o.parameters():
            parameter.zero_()
    found = model.decode(targets, states, torch.zeros_like(inputs) if merged else None)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@each("kind, style", [("Gemma 2", "t5gemma"), ("Llama", "modern"), ("Qwen3", "modern")])
def test_an_encoder_of_another_size_gets_new_cross_attention_that_the_seed_decides(kind, style):
    decoder = randomise(build(config(kind)))
    encoder = randomise(build(config(kind, d_model=64, d_ff=80, num_layers=2)))
    (model, result), (again, _), (other, _) = (become(style, decoder, encoder, seed) for seed in (0, 0, 1))
    new = {name for name, origin in result.origins.items() if origin is None}
    assert new == {name for name, _ in model.named_parameters() if "cross_attention" in name}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    matrix = "decoder.layers.0.cross_attention.k.weight"
    assert model.state_dict()[matrix].shape == (decoder.config.kv_heads * decoder.config.d_kv, 64)
    assert not torch.equal(model.state_dict()[matrix], other.state_dict()[matrix])
    assert torch.equal(model.encoder.layers[1].feed_forward.wo.weight, encoder.decoder.layers[1].feed_forward.wo.weight)
    assert torch.equal(model.embedding.weight, encoder.embedding.weight)
    assert torch.equal(model.decoder_embedding.weight, decoder.embedding.weight)
    assert torch.equal(model.lm_head.weight, decoder.lm_head.weight)


def test_matrices_of_tokens_get_further_rows():
    decoder = randomise(build(config("Gemma 2")))
    made = target("t5gemma", decoder.config).model_copy(update={"vocab_size": 520})
    result = adapted(made, decoder.state_dict(), decoder.state_dict())
    assert result.new == {"embedding.weight": 20 * 48, "lm_head.weight": 20 * 48}
    assert torch.equal(result.state["embedding.weight"][:500], decoder.embedding.weight)
    assert result.state["embedding.weight"][500:].std().item() == pytest.approx(0.02, rel=0.1)


GPT, LLAMA, GEMMA2, GEMMA3 = map(config, ("GPT-2", "Llama", "Gemma 2", "Gemma 3"))


@each(
    "style, decoder, encoder, expected",
    [
        ("t5gemma", GPT, None, "have positions: learned, activation: gelu_tanh, norm: layer.*; use --style modern"),
        ("t5gemma", LLAMA, None, "norm: rms, norm_after: false, scale_embedding: false, tie_embeddings: false; use"),
        ("t5gemma2", GEMMA2, None, "qk_norm: false, attention_softcap: 5.0, output_softcap: 3.0; use --style t5gemma"),
        ("t5gemma", GEMMA3, None, "can't have qk_norm: true; use --style t5gemma2 or modern"),
        ("modern", config("Qwen3"), config("Qwen3", rope_base=1e4), "share these settings: rope_base is 10000"),
        ("modern", config("GPT-2", positions="alibi", max_positions=None), None, "no style can"),
        ("t5gemma2", GEMMA3, GEMMA3, "both stacks have one width"),
    ],
)  # fmt: skip
def test_what_a_style_cannot_be_is_refused(style, decoder, encoder, expected):
    with pytest.raises(UserError, match=expected):
        target(style, decoder, encoder)


# ---- as users do


@pytest.fixture(scope="module")
def gemma(small_corpus, tmp_path_factory):
    """(a decoder with Gemma 2's layers and the corpus's tokenizer, its directory for transformers)"""
    tokenizer = open_corpus(str(small_corpus)).tokenizer
    vocabulary = tokenizer.vocabulary
    marks = {"pad_id": vocabulary.pad, "eos_id": vocabulary.eos}
    decoder = randomise(build(config("Gemma 2", vocab_size=tokenizer.size, num_layers=2, **marks)), std=0.05)
    out = tmp_path_factory.mktemp("decoders") / "gemma"
    huggingface.export(decoder.state_dict(), decoder.config, tokenizer, out)
    return decoder, out


def test_a_checkpoint_of_ours_and_another_encoder(gemma, tmp_path):
    decoder, directory = gemma
    tokenizer = huggingface.read(directory)[2]
    small = randomise(build(decoder.config.model_copy(update={"d_model": 32, "num_layers": 1})))
    save_weights(small.config, small.state_dict(), tokenizer, tmp_path / "small")
    told = done_here(
        "pretrain", "adapt", directory, tmp_path / "out", "--style", "t5gemma", "--encoder", tmp_path / "small"
    )
    model = TrainedModel.open(tmp_path / "out").model
    assert torch.equal(model.encoder.final_norm.weight, small.decoder.final_norm.weight)
    new = sum(tensor.numel() for name, tensor in model.named_parameters() if "cross_attention" in name)
    assert f"{model.num_parameters() - new:,} parameters copied, {new:,} new" in told


def test_wrong_arguments_get_one_line(gemma, tmp_path, small_corpus):
    _, directory = gemma
    done_here("pretrain", "adapt", directory, tmp_path / "made", "--style", "modern")
    for source, options, line in (
        (directory, ["--style", "bert"], "expected t5gemma, t5gemma2, modern, got 'bert'"),
        (small_corpus, ["--style", "modern"], "not a checkpoint"),
        (directory, ["--style", "modern", "--sentinels", "50"], "--sentinels: the tokenizer has 20"),
        (tmp_path / "made", ["--style", "modern"], "expected a decoder_only model"),
    ):
        assert line in run_here("pretrain", "adapt", source, tmp_path / "out", *options).stderr


def test_the_experiments_decoder_becomes_its_encoder_decoder():
    folder = Path(__file__).parents[3] / "configs/experiments/adaptation"
    causal, scratch = (load(folder / name, [], RunConfig) for name in ("decoder/causal.yaml", "scratch.yaml"))
    assert target("modern", causal.model) == scratch.model
    assert causal.data.objective.raw_length == scratch.data.objective.raw_length
    half = load(folder / "adapted-half.yaml", ["run.seed=2"], RunConfig)
    assert half.model == scratch.model
    assert half.checkpoint.init_from.endswith("adaptation-start/seed-2")
    assert 2 * half.run.max_steps == scratch.run.max_steps
