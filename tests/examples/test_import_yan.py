"""Checkpoints of Yan's own code: the same model, whatever its options; nothing else is read, and nothing is run."""

import enum
import os
import sys
import types
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from data_pipeline.base.errors import UserError
from examples.import_yan import checkpoint
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.models import AutoregressiveConfig, build
from tests.support.in_process import done_here, refused_here
from tests.support.slow import slow
from tests.support.tables import each

AUTHORS = "autoregressive_encoder_decoder_transformer.model"
WIDTH, HEADS, ACROSS, LAYERS, LENGTH, IDS = 16, 2, 4, 2, 12, 50257
DEFAULTS = {
    "context_size": LENGTH, "n_embed": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "dropout_rate": 0.1,
    "alphabet_size": IDS, "use_bias": False, "use_flash": True,
    "cross_attn_config": {"use_bias": False, "n_head": ACROSS}, "add_pos_embed_to_decoder": False,
    "sub_pos_embed_to_decoder": "YES_NO_LN", "use_ln_on_encoder_out": True, "add_ln_before_decoder_ff": False,
    "order_type": "ORIGINAL", "embedding_loss_type": "MSE", "detach_type": "ENCODER_OUT", "embedding_loss_coeff": 8.0,
    "embedding_ln_type": "INIT",
}  # fmt: skip
TRIL = torch.ones(1, 1, LENGTH, LENGTH).tril()
NO_LOSS = dict.fromkeys(["use_ln_on_encoder_out", "detach_type", "embedding_loss_coeff", "embedding_ln_type"])
VARIANTS = {
    "best": {},
    "all else": {"use_bias": True, "add_pos_embed_to_decoder": True, "sub_pos_embed_to_decoder": "YES_LN"}
    | {"add_ln_before_decoder_ff": True, "order_type": "ALT"},
    "no loss": {"sub_pos_embed_to_decoder": "NO", "embedding_loss_type": "NONE", **NO_LOSS},
}


def weights(settings: dict) -> dict[str, torch.Tensor]:
    """Random weights under the author's names and in the author's shapes."""
    matrices, norms = {"decoder_feed_forward": (WIDTH, WIDTH)}, ["ln"]
    for number in range(LAYERS):
        encoder, decoder = f"encoder_transformer_blocks.{number}", f"decoder_transformer_blocks.{number}"
        for name in (f"{encoder}.multi_attn_head", f"{decoder}.decoder_multi_attn_head"):
            matrices |= {f"{name}.batch_attn_weights": (3 * WIDTH, WIDTH), f"{name}.residual_proj": (WIDTH, WIDTH)}
        for name in (f"{encoder}.feed_forward", f"{decoder}.decoder_feed_forward"):
            matrices |= {f"{name}.linear": (4 * WIDTH, WIDTH), f"{name}.residual_proj": (WIDTH, 4 * WIDTH)}
        for name, outputs in (("k_v_weights", 2 * WIDTH), ("q_weights", WIDTH), ("residual_proj", WIDTH)):
            matrices[f"{decoder}.cross_multi_attn_head.{name}"] = outputs, WIDTH
        norms += [f"{encoder}.ln1", f"{encoder}.ln2", f"{decoder}.decoder_ln1", f"{decoder}.decoder_ln2"]
        norms += [f"{decoder}.encoder_cross_ln", f"{decoder}.decoder_cross_ln"]
    norms += ["ffd_ln"] * settings["add_ln_before_decoder_ff"]
    norms += ["post_sub_pos_ln"] * (settings["sub_pos_embed_to_decoder"] == "YES_LN")
    of_loss = ["embeddings_ln"]  # there even without a loss
    of_loss += ["encoder_out_ln"] * bool(settings["use_ln_on_encoder_out"])

    draws = torch.Generator().manual_seed(0)
    found = {f"encoder_transformer_blocks.{number}.multi_attn_head.tril": TRIL for number in range(LAYERS)}
    added = settings["add_pos_embed_to_decoder"] or settings["sub_pos_embed_to_decoder"] != "NO"
    found["token_embedding.weight"] = torch.randn(settings["alphabet_size"], WIDTH, generator=draws)
    found["output_layer.weight"] = found["token_embedding.weight"]
    found["positional_embedding.weight"] = torch.randn(LENGTH + added, WIDTH, generator=draws)
    for name, shape in {**matrices, **dict.fromkeys([*norms, *of_loss], (WIDTH,))}.items():
        found[f"{name}.weight"] = torch.randn(shape, generator=draws) * 0.3 + (name not in matrices)
        biases = settings["cross_attn_config"] if "cross_multi_attn_head" in name else settings
        if biases["use_bias"] or name in of_loss:
            found[f"{name}.bias"] = torch.randn(shape[0], generator=draws)
    return found


def logits(settings: dict, held: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """The author's forward pass for ids (batch, length), from its definition."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, held[f"{name}.weight"], held.get(f"{name}.bias"))

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (WIDTH,), held[f"{name}.weight"], held.get(f"{name}.bias"), 1e-5)

    def attention(heads: int, *projected: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in projected)
        scores = (q @ k.mT / (WIDTH // heads) ** 0.5).masked_fill(~torch.ones(q.size(2), k.size(2)).tril().bool(), -1e9)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def itself(name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(
            f"{name}.residual_proj", attention(HEADS, *linear(f"{name}.batch_attn_weights", x).chunk(3, dim=-1))
        )

    def forward(name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(f"{name}.residual_proj", F.gelu(linear(f"{name}.linear", x)))

    table = held["positional_embedding.weight"]
    length = ids.size(1)
    encoded = held["token_embedding.weight"][ids] + table[:length]
    for number in range(LAYERS):
        block = f"encoder_transformer_blocks.{number}"
        encoded = encoded + itself(f"{block}.multi_attn_head", norm(f"{block}.ln1", encoded))
        encoded = encoded + forward(f"{block}.feed_forward", norm(f"{block}.ln2", encoded))
    x = norm("ffd_ln", encoded) if settings["add_ln_before_decoder_ff"] else encoded
    x = linear("decoder_feed_forward", x)
    if settings["add_pos_embed_to_decoder"]:
        x = x + table[1 : length + 1]
    for number in range(LAYERS):
        block = f"decoder_transformer_blocks.{number}"
        across = f"{block}.cross_multi_attn_head"
        for kind in ("itself", "across") if settings["order_type"] == "ORIGINAL" else ("across", "itself"):
            if kind == "itself":
                x = x + itself(f"{block}.decoder_multi_attn_head", norm(f"{block}.decoder_ln1", x))
                continue
            keys_values = linear(f"{across}.k_v_weights", norm(f"{block}.encoder_cross_ln", encoded)).chunk(2, dim=-1)
            queries = linear(f"{across}.q_weights", norm(f"{block}.decoder_cross_ln", x))
            x = x + linear(f"{across}.residual_proj", attention(ACROSS, queries, *keys_values))
        x = x + forward(f"{block}.decoder_feed_forward", norm(f"{block}.decoder_ln2", x))
    x = norm("ln", x)
    if settings["sub_pos_embed_to_decoder"] != "NO":
        x = x - table[1 : length + 1]
    if settings["sub_pos_embed_to_decoder"] == "YES_LN":
        x = norm("post_sub_pos_ln", x)
    return x @ held["output_layer.weight"].T


@pytest.fixture
def pickled(monkeypatch):
    """Turns text into members of the author's enumerations, which are pickled by their module's name."""
    package, module = types.ModuleType(AUTHORS.partition(".")[0]), types.ModuleType(AUTHORS)
    classes = {
        "order_type": ("OrderType", ["ORIGINAL", "ALT"]),
        "sub_pos_embed_to_decoder": ("SubPosEmbedType", ["NO", "YES_NO_LN", "YES_LN"]),
        "embedding_loss_type": ("EmbeddingLossType", ["NONE", "MSE"]),
        "detach_type": ("DetachType", ["NONE", "ENCODER_OUT"]),
        "embedding_ln_type": ("EmbeddingLayerNormType", ["NONE", "INIT"]),
    }
    made = {}
    for key, (name, members) in classes.items():
        made[key] = enum.Enum(name, {member: member for member in members}, module=AUTHORS, type=str)
        setattr(module, name, made[key])
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, AUTHORS, module)

    def convert(settings: dict) -> dict:
        chosen = {key: made[key](settings[key]) for key in made if settings[key] is not None}
        return settings | chosen

    return convert


@each("variant", ["best", *slow("all else", "no loss")])
def test_the_logits_are_those_of_the_authors_model(variant, pickled, byte_level_bpe, tmp_path):
    settings = {**DEFAULTS, **VARIANTS[variant]}
    held = weights(settings)
    model = {f"_orig_mod.{name}": tensor for name, tensor in held.items()}
    others = {"optimizer": {}, "iter_num": 9000, "best_val_loss": 3.385}
    torch.save({"model": model, "model_config": pickled(settings), **others}, tmp_path / "ckpt.pt")
    arguments = [tmp_path / "ckpt.pt", byte_level_bpe / "gpt2", tmp_path / "out"]
    assert "autoregressive with 50,257 ids" in done_here("examples.import_yan", *arguments)
    trained = TrainedModel.open(tmp_path / "out")
    ids = torch.randint(0, IDS, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = trained.model.eval().decode(ids), logits(settings, held, ids)
    assert expected.std() > 0.5
    assert (found[..., :IDS] - expected).abs().max() < 1e-3 * expected.abs().max()
    loss = trained.model.config.embedding_loss
    assert (loss is None) == (settings["embedding_loss_type"] == "NONE")
    assert loss is None or (loss.kind, loss.coefficient, loss.detach) == ("mse", 8.0, "encoder_out")


@each("order, subtracted", product(("ORIGINAL", "ALT"), ("NO", "YES_NO_LN", "YES_LN")))
def test_logits_are_the_authors_with_any_options(order, subtracted, tmp_path):
    """To many digits, without a tokenizer."""
    keys = ("add_pos_embed_to_decoder", "add_ln_before_decoder_ff", "use_bias")
    for others in product((False, True), repeat=3):
        settings = {**DEFAULTS, "alphabet_size": 19, "order_type": order, "sub_pos_embed_to_decoder": subtracted}
        settings |= dict(zip(keys, others, strict=True))
        held = {name: tensor.double() for name, tensor in weights(settings).items()}
        torch.save({"model": held, "model_config": settings}, tmp_path / "ckpt.pt")
        config, state = checkpoint._read(tmp_path / "ckpt.pt", 1)
        model = build(config).double().eval()
        model.load_state_dict(state)
        ids = torch.randint(19, (2, LENGTH))
        torch.testing.assert_close(model.decode(ids), logits(settings, held, ids), rtol=0, atol=1e-9)


class Payload:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.mark.slow
def test_other_files_are_refused_in_a_line_and_nothing_in_them_is_run(byte_level_bpe, tmp_path):
    trace = tmp_path / "was run"
    config = AutoregressiveConfig(
        vocab_size=9, d_model=4, num_heads=1, num_encoder_layers=1, num_decoder_layers=1, max_positions=4
    )
    held = weights(DEFAULTS)
    del held["ln.weight"]
    for name, content, problem in (
        ("code.pt", {"model": {}, "model_config": Payload(trace)}, "can't be read: it names posix.mkdir"),
        ("text.pt", None, "can't be read: no file of torch.save"),
        ("other.pt", {"weights": build(config).state_dict()}, "not a checkpoint of Yan's"),
        ("cut.pt", {"model": held, "model_config": DEFAULTS}, "final_norm.weight is missing"),
        ("small.pt", {"model": weights(DEFAULTS), "model_config": {**DEFAULTS, "n_head": 3}}, "n_head 3"),
        ("deep.pt", {"model": held, "model_config": {**DEFAULTS, "n_layer": 10**7}}, "n_layer: input should"),
        ("text.pt", {"model": held, "model_config": {**DEFAULTS, "n_layer": "10000000"}}, "n_layer: input should"),
    ):
        path = tmp_path / name
        if content is None:
            path.write_text("no checkpoint")
        else:
            torch.save(content, path)
        line = refused_here(2, "examples.import_yan", path, byte_level_bpe / "gpt2", tmp_path / "out")
        assert problem in line, name
        assert str(path) in line
        assert not (tmp_path / "out").exists()
    assert not trace.exists()
    with pytest.raises(UserError, match="no file of torch"):
        checkpoint.import_yan(tmp_path / "nowhere.pt", byte_level_bpe / "gpt2", tmp_path / "out")
