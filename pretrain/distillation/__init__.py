"""Distillation: an encoder-decoder learns prefix LM from the text and from a decoder alone, its teacher."""
