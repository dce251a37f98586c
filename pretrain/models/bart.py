"""BART: Lewis et al., "BART: Denoising Sequence-to-Sequence Pre-training for Natural Language Generation" (2020).

The vanilla Transformer with learned positions, normalised embeddings in both stacks, GELU layers, and all weights drawn
from N(0, 0.02²) or with another `init_std` (section 2.1). Where the paper leaves something open, this follows fairseq.
"""

import math

import torch
from torch import Tensor, nn

from pretrain.config.models import BartConfig
from pretrain.models.layers import Dropout, Embedding, LayerNorm
from pretrain.models.loss import Head
from pretrain.models.positions import LearnedPositions
from pretrain.models.stacks import Decoder, Encoder, EncoderDecoder
from pretrain.models.vanilla import post_norm_layer

POSITION_OFFSET = 2  # fairseq counts positions from the row after padding's, which is row 1


class NormedInputs(nn.Module):
    """Token vectors plus learned positions, then layer norm, then dropout."""

    def __init__(self, config: BartConfig):
        super().__init__()
        self.scale = math.sqrt(config.base_width) if config.scale_embedding else 1.0
        self.positions = LearnedPositions(config.max_positions, config.d_model, config.init_std, POSITION_OFFSET)
        self.norm = LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout_rate)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.dropout(self.norm(x * self.scale + self.positions(positions)))


class LogitsHead(Head):
    """The output matrix, with a bias that is not trained: all zeros unless a file holds another one."""

    final_logits_bias: Tensor

    def __init__(self, d_model: int, rows: int, std: float, multiplier: float):
        super().__init__(d_model, rows, std, multiplier=multiplier)
        self.register_buffer("final_logits_bias", torch.zeros(rows))

    def offsets(self, x: Tensor) -> Tensor:
        return self.final_logits_bias.to(x.dtype)  # DeepSpeed leaves buffers in fp32


class Bart(EncoderDecoder):
    """Padding's row starts at zero and gets no gradient as an input; as an output it learns normally (fairseq)."""

    config: BartConfig

    def __init__(self, config: BartConfig):
        rows, d_model, std = config.padded_vocab_size, config.d_model, config.init_std
        # Where EOS is also padding, as in GPT-2's vocabulary, its row must learn.
        padding_idx = config.pad_id if config.pad_id != config.eos_id else None
        embedding = Embedding(rows, d_model, std, padding_idx)
        lm_head = LogitsHead(d_model, rows, std, config.logits_multiplier)
        layer = post_norm_layer(config, config.hidden_std(std))
        encoder = Encoder(config, layer, config.num_encoder_layers, inputs=NormedInputs(config))
        decoder = Decoder(config, layer, config.num_decoder_layers, inputs=NormedInputs(config))
        super().__init__(config, embedding, encoder, decoder, lm_head, tied=True)
