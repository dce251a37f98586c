"""Export of models to Hugging Face transformers, and import from there.

This package has what all families share: files, shards, tokenizers, checks and the model card. `remote_code` has the
modelling files of models that transformers lacks. Each family's names are beside its model, in `HF_MODELS`.
"""

from pretrain.export.export import export, hf_model_of, to_hf
from pretrain.export.load import import_, load_state, read

__all__ = ["export", "hf_model_of", "import_", "load_state", "read", "to_hf"]
