"""What all encoder-decoders but the autoregressive one share: an encoder, a decoder that reads its states, a head."""

from typing import cast

import torch
from torch import Tensor, nn

from pretrain.config.models import ModelConfig
from pretrain.models.attention import KeyValueCache, MemoryCache
from pretrain.models.attention_masks import AttentionInputs
from pretrain.models.layers import Embedding
from pretrain.models.loss import Losses, shift_right
from pretrain.models.loss_head import Head
from pretrain.models.model import Model

Caches = list[tuple[KeyValueCache, KeyValueCache]]  # (self-attention, cross-attention) of each decoder layer


def length_of(cache: Caches | None) -> int:
    """The number of tokens in a cache."""
    return cache[0][0].length if cache else 0


class EncoderDecoder(Model):
    """`forward` returns the loss of every target token; `encode` and `decode` are its two halves.

    `encoder` and `decoder` map token vectors to states, and each has its `layers`. `decoder_embedding` is the decoder's
    matrix, unless `embedding` serves both. `tied`: the output matrix is that of the decoder's embedding.
    """

    config: ModelConfig
    decoder_reads_targets = True

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        encoder: nn.Module,
        decoder: nn.Module,
        lm_head: Head,
        tied: bool,
        decoder_embedding: Embedding | None = None,
    ):
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.encoder = encoder
        self.decoder = decoder
        self.lm_head = lm_head
        self.decoder_embedding = decoder_embedding
        if tied:
            # Two modules share this parameter, and each uses it only in its own forward, where ZeRO-3 gathers it.
            self.lm_head.weight = (decoder_embedding or embedding).weight

    def forward(
        self,
        encoder_input_ids: Tensor,
        labels: Tensor,
        *,
        decoder_input_ids: Tensor | None = None,
        target_indices: Tensor | None = None,
        **attention: Tensor,
    ) -> Losses:
        """Returns {"labels": cross-entropy of each label (batch, target_length), fp32; 0 where the label is -100}.

        `encoder_input_ids` (batch, input_length). `decoder_input_ids` are by default the labels shifted one to the
        right. Padding after the targets needs no mask: the decoder is causal. `attention` as in `AttentionInputs`.
        Label smoothing and z-loss apply in training only. `target_indices` as in `Head`.
        """
        inputs = AttentionInputs(**attention)
        if decoder_input_ids is None:
            start_id, pad_id = self.config.decoder_start_id, self.config.pad_id
            decoder_input_ids = shift_right(labels, start_id, inputs.decoder_segment_ids, pad_id)
        x, targets = self.embedded(encoder_input_ids, decoder_input_ids)
        x = self.decoder(targets, self.encoder(x, inputs), inputs)
        return {"labels": self.lm_head(self.before_head(x), labels, self.config, target_indices)}

    def embedded_targets(self, ids: Tensor) -> Tensor:
        """The vectors of the decoder's ids."""
        return (self.decoder_embedding or self.embedding)(ids)

    def embedded(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors of both kinds of ids. Two look-ups in one matrix would make one more gradient of its whole size,
        and add the two."""
        if self.decoder_embedding is not None:
            return self.embedding(inputs), self.decoder_embedding(targets)
        ids = torch.cat([inputs.flatten(), targets.flatten()])
        vectors = self.embedding(ids).split([inputs.numel(), targets.numel()])
        return vectors[0].view(*inputs.shape, -1), vectors[1].view(*targets.shape, -1)

    def encode(self, encoder_input_ids: Tensor, encoder_attention_mask: Tensor | None = None) -> Tensor:
        """Maps ids (batch, input_length) to states (batch, input_length, d_model)."""
        return self.encoder(self.embedding(encoder_input_ids), AttentionInputs(encoder_attention_mask))

    def decode(
        self,
        decoder_input_ids: Tensor,
        encoder_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        cache: Caches | None = None,
    ) -> Tensor:
        """Maps ids (batch, target_length) to logits (batch, target_length, padded_vocab_size)."""
        x = self.embedded_targets(decoder_input_ids)
        return self.logits(self.decoder(x, encoder_states, AttentionInputs(encoder_attention_mask), cache))

    def new_cache(self) -> Caches:
        """An empty cache for `decode`."""
        return [(KeyValueCache(), MemoryCache()) for _ in cast(nn.ModuleList, self.decoder.layers)]

    def logits(self, x: Tensor) -> Tensor:
        """Maps the decoder's states (…, d_model) to (…, padded_vocab_size)."""
        return self.lm_head(self.before_head(x))
