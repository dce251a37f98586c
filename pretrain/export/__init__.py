"""Export of models to Hugging Face transformers, and import.

What differs between families stands beside their models, in `HF_MODELS`; here is what they share: names, files, shards,
tokenizers, checks, the model card and, in `remote_code`, modelling files of models that transformers lacks.
"""

from pretrain.export.export import export, hf_model_of, to_hf
from pretrain.export.load import import_, load_state, read
from pretrain.export.yan import import_yan

__all__ = ["export", "hf_model_of", "import_", "import_yan", "load_state", "read", "to_hf"]
