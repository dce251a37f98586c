"""Export of models to Hugging Face transformers, and import.

What differs between families stands beside their models, in `to_hf` and `from_hf`; here is what they share: files,
shards, tokenizers, checks, the model card and, in `remote_code`, modelling files of models that transformers lacks.
"""

from pretrain.huggingface.export import export, hf_model_of
from pretrain.huggingface.load import import_, import_yan, load_state, read

__all__ = ["export", "hf_model_of", "import_", "import_yan", "load_state", "read"]
