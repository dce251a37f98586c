"""Checkpoints of Yan's own code: the same model, whatever its options; nothing else is read, and nothing is run."""

import enum
import itertools
import os
import sys
import types

import pytest
import torch

from data_pipeline.foundation.errors import UserError
from pretrain.checkpoint.trained import TrainedModel
from pretrain.huggingface import import_yan
from pretrain.models import AutoregressiveConfig, build
from pretrain.models.model import Model
from tests.in_process import done_here, run_here
from tests.pretrain.exported import randomise
from tests.slow import slow
from tests.tables import each

CLASSES = {
    "order_type": "OrderType", "sub_pos_embed_to_decoder": "SubPosEmbedType", "detach_type": "DetachType",
    "embedding_loss_type": "EmbeddingLossType", "embedding_ln_type": "EmbeddingLayerNormType",
}  # fmt: skip
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
NO_LOSS = dict.fromkeys(["use_ln_on_encoder_out", "detach_type", "embedding_loss_coeff", "embedding_ln_type"])
OF_BEST = {
    "vocab_size": IDS, "d_model": WIDTH, "num_heads": HEADS, "num_cross_heads": ACROSS, "num_encoder_layers": LAYERS,
    "num_decoder_layers": LAYERS, "max_positions": LENGTH, "dropout_rate": 0.1, "cross_attention_bias": False,
    "subtract_positions": "without_norm", "embedding_loss": {"kind": "mse", "coefficient": 8.0},
    "pad_id": IDS - 1, "eos_id": IDS - 1,
}  # fmt: skip
VARIANTS = {  # the author's settings, and ours
    "best": ({}, {}),
    "all else": (
        {"use_bias": True, "add_pos_embed_to_decoder": True, "sub_pos_embed_to_decoder": "YES_LN"}
        | {"add_ln_before_decoder_ff": True, "order_type": "ALT"},
        {"bias": True, "add_positions": True, "subtract_positions": "with_norm", "bridge_norm": True}
        | {"order": "alternate"},
    ),
    "no loss": (
        {"sub_pos_embed_to_decoder": "NO", "embedding_loss_type": "NONE", **NO_LOSS},
        {"subtract_positions": "none", "embedding_loss": None},
    ),
}
# Our modules and the author's. In the decoder, {} is "decoder_".
OUTSIDE = {
    "embedding": "token_embedding", "lm_head": "output_layer", "position_embedding": "positional_embedding",
    "bridge.norm": "ffd_ln", "bridge.linear": "decoder_feed_forward", "final_norm": "ln",
    "subtracted_norm": "post_sub_pos_ln", "embedding_loss.encoder_norm": "encoder_out_ln",
    "embedding_loss.embedding_norm": "embeddings_ln",
}  # fmt: skip
OF_LAYERS = {
    "self_attention.q self_attention.k self_attention.v": "{}multi_attn_head.batch_attn_weights",
    "self_attention.o": "{}multi_attn_head.residual_proj",
    "cross_attention.q": "cross_multi_attn_head.q_weights",
    "cross_attention.k cross_attention.v": "cross_multi_attn_head.k_v_weights",
    "cross_attention.o": "cross_multi_attn_head.residual_proj",
    "feed_forward.wi": "{}feed_forward.linear",
    "feed_forward.wo": "{}feed_forward.residual_proj",
    "self_attention_norm": "{}ln1",
    "cross_attention_norm": "decoder_cross_ln",
    "encoder_norm": "encoder_cross_ln",
    "feed_forward_norm": "{}ln2",
}


def weights(config: AutoregressiveConfig) -> tuple[Model, dict[str, torch.Tensor]]:
    """A model in which every weight matters, and its weights under the author's names."""
    model = randomise(build(config), std=0.3)
    state, held = model.state_dict(), {}
    pairs = list(OUTSIDE.items())
    for stack, before in (("encoder", ""), ("decoder", "decoder_")):
        for block in range(LAYERS):
            for ours, theirs in OF_LAYERS.items():
                own = " ".join(f"{stack}.{block}.{one}" for one in ours.split())
                pairs.append((own, f"{stack}_transformer_blocks.{block}.{theirs.format(before)}"))
    for (ours, theirs), kind in itertools.product(pairs, ("weight", "bias")):
        if pieces := [state[f"{one}.{kind}"] for one in ours.split() if f"{one}.{kind}" in state]:
            held[f"{theirs}.{kind}"] = torch.cat(pieces)
    held["encoder_transformer_blocks.0.multi_attn_head.tril"] = torch.ones(1, 1, LENGTH, LENGTH).tril()
    return model, {"embeddings_ln.weight": torch.ones(WIDTH)} | held  # which is there even without a loss


@pytest.fixture
def pickled(monkeypatch):
    """Turns text into members of the author's enumerations, which are pickled by their module's name."""
    package, module = types.ModuleType(AUTHORS.partition(".")[0]), types.ModuleType(AUTHORS)
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, AUTHORS, module)

    def convert(settings: dict) -> dict:
        chosen = {key: settings[key] for key in CLASSES if settings[key] is not None}
        for key, value in chosen.items():
            kind = enum.Enum(CLASSES[key], {value: value}, module=AUTHORS, type=str)
            setattr(module, CLASSES[key], kind)
            chosen[key] = kind(value)
        return settings | chosen

    return convert


@each("variant", ["best", *slow("all else", "no loss")])
def test_a_model_comes_back_from_the_authors_names(variant, pickled, byte_level_bpe, tmp_path):
    theirs, ours = VARIANTS[variant]
    config = AutoregressiveConfig(**{**OF_BEST, **ours})
    exact, held = weights(config)
    model = {f"_orig_mod.{name}": tensor for name, tensor in held.items()}
    others = {"optimizer": {}, "iter_num": 9000, "best_val_loss": 3.385}
    settings = pickled({**DEFAULTS, **theirs})
    torch.save({"model": model, "model_config": settings, **others}, tmp_path / "ckpt.pt")
    arguments = [tmp_path / "ckpt.pt", tmp_path / "out", "--tokenizer", byte_level_bpe / "gpt2"]
    printed = done_here("pretrain", "import", *arguments)
    assert "autoregressive with 50,257 ids" in printed
    trained = TrainedModel.open(tmp_path / "out").model.eval()
    assert trained.config == config
    ids = torch.randint(0, IDS, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(trained.decode(ids), exact.decode(ids), rtol=0, atol=0)
    assert trained.state_dict().keys() == exact.state_dict().keys()


class Payload:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.mark.slow
def test_other_files_are_refused_in_a_line_and_nothing_in_them_is_run(byte_level_bpe, tmp_path):
    trace = tmp_path / "was run"
    model, whole = weights(AutoregressiveConfig(**OF_BEST))
    held = {name: tensor for name, tensor in whole.items() if name != "ln.weight"}
    for name, content, problem in (
        ("code.pt", {"model": {}, "model_config": Payload(trace)}, "can't be read: it names posix.mkdir"),
        ("text.pt", None, "can't be read: no file of torch.save"),
        ("other.pt", {"weights": model.state_dict()}, "not a checkpoint of Yan's"),
        ("cut.pt", {"model": held, "model_config": DEFAULTS}, "final_norm.weight is missing"),
        ("small.pt", {"model": whole, "model_config": {**DEFAULTS, "n_head": 3}}, "n_head 3"),
        ("deep.pt", {"model": held, "model_config": {**DEFAULTS, "n_layer": 10**7}}, "there are weights of 2 layers"),
        ("text.pt", {"model": held, "model_config": {**DEFAULTS, "n_layer": "10000000"}}, "weights of 2 layers"),
    ):
        path = tmp_path / name
        if content is None:
            path.write_text("no checkpoint")
        else:
            torch.save(content, path)
        done = run_here("pretrain", "import", path, tmp_path / "out", "--tokenizer", byte_level_bpe / "gpt2")
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
        assert problem in done.stderr, name
        assert str(path) in done.stderr
        assert not (tmp_path / "out").exists()
    assert not trace.exists()
    done = run_here("pretrain", "import", tmp_path / "cut.pt", tmp_path / "out")
    assert (done.returncode, "needs --tokenizer" in done.stderr) == (2, True)
    with pytest.raises(UserError, match="no file of torch"):
        import_yan(tmp_path / "nowhere.pt", byte_level_bpe / "gpt2", tmp_path / "out")
