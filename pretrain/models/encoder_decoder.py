"""What all encoder-decoders but the autoregressive one share: an encoder, a decoder that reads its states, a head."""

from typing import cast

import torch
from torch import Tensor, nn

from pretrain.models.attention import Attention, KeyValueCache, MemoryCache
from pretrain.models.config.base import ModelConfig
from pretrain.models.distilled_loss import TeacherTargets
from pretrain.models.layers import Embedding
from pretrain.models.logit_bias import Pattern, logit_bias
from pretrain.models.loss import Losses, shift_right
from pretrain.models.loss_head import Head
from pretrain.models.model import Model, Sizes, attention_flops, cross_attentions, matrix_weights

Caches = list[tuple[KeyValueCache, KeyValueCache]]  # (self-attention, cross-attention) of each decoder layer


def bias_of_cross_attention(
    x: Tensor, states: Tensor, key_mask: Tensor | None, segments: Tensor | None, encoder_segments: Tensor | None
) -> Tensor | Pattern | None:
    """The bias that hides padding and other examples' states from `x` (batch, length, d_model)."""
    return logit_bias(x, states.size(1), key_mask=key_mask, query_segments=segments, key_segments=encoder_segments)


class EncoderDecoder(Model):
    """`forward` returns the loss of every target token; `encode` and `decode` are its two halves.

    `encoder` and `decoder` map token vectors to states, and each has its `layers`. `tied`: embedding and output share
    one matrix.
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
    ):
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.encoder = encoder
        self.decoder = decoder
        self.lm_head = lm_head
        if tied:
            # Two modules share this parameter, and each uses it only in its own forward, where ZeRO-3 gathers it.
            self.lm_head.weight = self.embedding.weight

    def forward(
        self,
        encoder_input_ids: Tensor,
        labels: Tensor,
        decoder_input_ids: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        encoder_segment_ids: Tensor | None = None,
        decoder_segment_ids: Tensor | None = None,
        encoder_positions: Tensor | None = None,
        decoder_positions: Tensor | None = None,
        target_indices: Tensor | None = None,
        teacher_targets: TeacherTargets | None = None,
    ) -> Losses:
        """Returns {"labels": cross-entropy of each label (batch, target_length), fp32; 0 where the label is -100}.

        `encoder_input_ids` (batch, input_length); `encoder_attention_mask`, of the same shape, is nonzero at real
        tokens (None: all). `decoder_input_ids` are by default the labels shifted one to the right. Padding after the
        targets needs no mask: the decoder is causal. Segments keep the examples of a packed row apart. Positions count
        within an example; relative positions don't need them, since packing keeps distances inside an example. Label
        smoothing and z-loss apply in training only. `target_indices` as in `Head`. With `teacher_targets`, the losses
        are those of `chunked_cross_entropy`.
        """
        if decoder_input_ids is None:
            start_id, pad_id = self.config.decoder_start_id, self.config.pad_id
            decoder_input_ids = shift_right(labels, start_id, decoder_segment_ids, pad_id)
        inputs, targets = self.embedded(encoder_input_ids, decoder_input_ids)
        states = self.encoder(inputs, encoder_attention_mask, encoder_segment_ids, encoder_positions)
        x = self.decoder(
            targets,
            states,
            encoder_attention_mask,
            segments=decoder_segment_ids,
            encoder_segments=encoder_segment_ids,
            positions=decoder_positions,
        )
        found = self.lm_head(self.before_head(x), labels, self.config, target_indices, teacher_targets=teacher_targets)
        return {"labels": found} if teacher_targets is None else found

    def embedded_targets(self, ids: Tensor) -> Tensor:
        """The vectors of the decoder's ids."""
        return self.embedding(ids)

    def embedded(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors of both kinds of ids. A look-up of its own for each would make one more gradient of the size of
        the whole matrix, and add the two."""
        of_inputs, of_targets = self.embedding(torch.cat([inputs.flatten(), targets.flatten()])).split(
            [inputs.numel(), targets.numel()]
        )
        return of_inputs.view(*inputs.shape, -1), of_targets.view(*targets.shape, -1)

    def encode(
        self,
        encoder_input_ids: Tensor,
        encoder_attention_mask: Tensor | None = None,
        encoder_segment_ids: Tensor | None = None,
        encoder_positions: Tensor | None = None,
    ) -> Tensor:
        """Maps ids (batch, input_length) to states (batch, input_length, d_model)."""
        x = self.embedding(encoder_input_ids)
        return self.encoder(x, encoder_attention_mask, encoder_segment_ids, encoder_positions)

    def decode(
        self,
        decoder_input_ids: Tensor,
        encoder_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        cache: Caches | None = None,
    ) -> Tensor:
        """Maps ids (batch, target_length) to logits (batch, target_length, padded_vocab_size)."""
        x = self.decoder(self.embedded_targets(decoder_input_ids), encoder_states, encoder_attention_mask, cache)
        return self.logits(x)

    def new_cache(self) -> Caches:
        """An empty cache for `decode`."""
        return [(KeyValueCache(), MemoryCache()) for _ in cast(nn.ModuleList, self.decoder.layers)]

    def logits(self, x: Tensor) -> Tensor:
        """Maps the decoder's states (…, d_model) to (…, padded_vocab_size)."""
        return self.lm_head(self.before_head(x))

    def before_head(self, x: Tensor) -> Tensor:
        """What the output matrix is multiplied by, for the decoder's states `x`."""
        return x

    def flops_by_part(self, sizes: Sizes) -> dict[str, float]:
        """Encoder weights process inputs, decoder weights targets; cross-attention's keys and values process inputs."""
        layers_of_encoder, layers_of_decoder = (
            cast(nn.ModuleList, stack.layers) for stack in (self.encoder, self.decoder)
        )
        attend = cross_attentions(layers_of_decoder)
        decoder = matrix_weights(layers_of_decoder) - sum(map(matrix_weights, attend))
        of_inputs = self_attention_flops(self.encoder, sizes.inputs, sizes.input_pairs)
        of_targets = self_attention_flops(self.decoder, sizes.targets, sizes.target_pairs)
        return {
            "encoder": 6.0 * matrix_weights(layers_of_encoder) * sizes.inputs + of_inputs,
            "decoder": 6.0 * decoder * sizes.targets + of_targets,
            "cross-attention": sum(
                attention_flops(one, one.width, sizes.targets, sizes.inputs, sizes.cross_pairs) for one in attend
            ),
            "head": 6.0 * matrix_weights(self.lm_head) * sizes.targets,
        }


def self_attention_flops(stack: nn.Module, tokens: int, pairs: int) -> float:
    """FLOPs of the query-key pairs of all layers of a stack; `tokens` and `pairs` as in `Sizes`."""
    layers = cast(nn.ModuleList, stack.layers)
    width = cast(Attention, layers[0].self_attention).width
    sights = getattr(stack, "sights", None)
    return 12.0 * width * (len(layers) * pairs if sights is None else sights.pairs(tokens, pairs))
