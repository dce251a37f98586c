"""An encoder-decoder of modern layers: RMS norms, gated feed-forward layers, RoPE, grouped-query attention, windows.

The default is the model of Zhang et al., "Encoder-Decoder or Decoder-Only? Revisiting Encoder-Decoder Large Language
Model" (2025): pre-norm, SwiGLU, and one matrix for both embeddings and the output. All attentions have rotary
positions; the decoder's positions continue after the input's. Queries and keys have norms with learned gains, as in
Qwen3; values and the attention's output have no norms.
"""

import torch
from torch import Tensor

from pretrain.config.models import ModernConfig
from pretrain.models.attention import AttentionInputs, positions_from
from pretrain.models.functional.attention_backends import Window
from pretrain.models.layers import Embedding
from pretrain.models.model import Head
from pretrain.models.positions import LearnedPositions, Rotary, rotary_embedding
from pretrain.models.stacks import Decoder, Encoder, EncoderDecoder
from pretrain.models.state_dict_adapter import own_code
from pretrain.models.t5gemma import layer_config


def encoder_window(tokens: int) -> Window:
    """The query itself and `tokens` − 1 keys on each side of it."""
    return Window(tokens - 1, tokens - 1)


def _learned_positions(config: ModernConfig, d_model: int) -> LearnedPositions | None:
    return None if config.max_positions is None else LearnedPositions(config.max_positions, d_model, config.init_std)


class ModernEncoder(Encoder):
    """The encoder. Positions are rotary, or learned if the config has `max_positions`."""

    def __init__(self, config: ModernConfig):
        stack = config.encoder
        super().__init__(config, layer_config(config, stack, 2 * stack.num_layers), stack.num_layers, encoder_window)
        self.positions = _learned_positions(config, stack.d_model)


class ModernDecoder(Decoder):
    """The decoder. With `cross_rotation`, cross-attention has rotary positions too, and the targets' positions continue
    after the input's."""

    def __init__(self, config: ModernConfig):
        stack = config.decoder
        layer = layer_config(config, stack, 3 * stack.num_layers)
        super().__init__(config, layer, stack.num_layers, config.encoder.d_model)
        self.positions = _learned_positions(config, stack.d_model)
        self.cross_rotation = config.rotation if config.cross_rotation else None

    def cross_positions(
        self, positions: Tensor, encoder_states: Tensor, inputs: AttentionInputs
    ) -> tuple[Tensor, Rotary | None, Rotary | None]:
        if self.cross_rotation is None:
            return positions, None, None
        length = encoder_states.size(1)
        positions = positions + ends_of_inputs(length, inputs)
        in_segments = positions_in_segments(inputs.encoder_segment_ids)
        input_positions = positions_from(0, length, encoder_states.device, in_segments)
        rotary, memory_rotary = (
            rotary_embedding(one, self.d_kv, encoder_states.dtype, *self.cross_rotation)
            for one in (positions, input_positions)
        )
        return positions, rotary, memory_rotary


def positions_in_segments(segments: Tensor | None) -> Tensor | None:
    """The position of each token in its segment, both (batch, length): [1, 1, 2, 2, 2] → [0, 1, 0, 1, 2]."""
    if segments is None:
        return None
    columns = torch.arange(segments.size(1), device=segments.device).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return columns - columns.where(begins, 0).cummax(dim=1).values


def ends_of_inputs(length: int, inputs: AttentionInputs) -> Tensor | int:
    """For each target, the first position after its input, which has `length` columns; broadcasts to (batch,
    targets)."""
    segments, input_segments = inputs.decoder_segment_ids, inputs.encoder_segment_ids
    mask = inputs.encoder_attention_mask
    if segments is not None and input_segments is not None:
        return (segments[:, :, None] == input_segments[:, None, :]).sum(dim=-1)
    if mask is not None:
        return ((mask != 0) * torch.arange(1, length + 1, device=mask.device)).amax(dim=1, keepdim=True)
    return length


class Modern(EncoderDecoder):
    """The model. Embeddings and output share one matrix (`tie_embeddings: all`), or have two (`output`) or three
    (`none`)."""

    config: ModernConfig

    def __init__(self, config: ModernConfig):
        rows = config.padded_vocab_size
        std = config.init_std
        tied = config.tie_embeddings
        width = config.decoder.d_model
        super().__init__(
            config,
            Embedding(rows, config.encoder.d_model, std),
            ModernEncoder(config),
            ModernDecoder(config),
            Head(width, rows, std, softcap=config.output_softcap, multiplier=config.logits_multiplier),
            tied=tied != "none",
            decoder_embedding=None if tied == "all" else Embedding(rows, width, std),
        )


HF_MODELS = (
    own_code(
        ModernConfig,
        "encoder_decoder",
        "modern_encoder_decoder",
        "AutoModelForSeq2SeqLM",
        "ModernForConditionalGeneration",
        fixed={"is_encoder_decoder": True},
        ends=True,
    ),
)
