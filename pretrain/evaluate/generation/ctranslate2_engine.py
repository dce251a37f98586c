"""Generation with CTranslate2, an engine in C++ that also runs 8-bit weights (Klein et al. 2020; opennmt.net).

CTranslate2 runs T5 and BART. The model is first exported and converted into a temporary folder.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from data_pipeline.foundation.errors import UserError
from pretrain import export as huggingface
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.export.card import CTRANSLATE2


class CTranslate2:
    """A converted model: takes ids of inputs, returns ids of answers. `precision`: of the weights, float32 or int8."""

    def __init__(self, converted: Path, precision: str, settings: GenerationSettings):
        import ctranslate2  # an extra: `ctranslate2_engine` says how to install it

        threads = torch.get_num_threads()
        self._translator = ctranslate2.Translator(
            str(converted), device="cpu", compute_type=precision, inter_threads=1, intra_threads=threads
        )
        self.precision: str = self._translator.compute_type
        self._tokens: list[str] = json.loads((converted / "shared_vocabulary.json").read_text(encoding="utf-8"))
        self._ids = {token: id_ for id_, token in enumerate(self._tokens)}
        self._options = {
            "beam_size": settings.num_beams,
            "length_penalty": settings.length_penalty,
            "max_decoding_length": settings.max_new_tokens,
            "min_decoding_length": settings.min_new_tokens,
            "no_repeat_ngram_size": settings.no_repeat_ngram_size,
            "max_input_length": 0,
        }

    def __call__(self, inputs: Sequence[Sequence[int]], numbers: range) -> list[list[int]]:
        """The answers' ids, without EOS. `numbers` are those of the texts, which only sampling would need."""
        source = [[self._tokens[id_] for id_ in row] for row in inputs]
        found = self._translator.translate_batch(source, **self._options)
        return [[self._ids[token] for token in one.hypotheses[0]] for one in found]


@contextmanager
def ctranslate2_engine(trained: TrainedModel, precision: str, settings: GenerationSettings) -> Iterator[CTranslate2]:
    """Raises UserError if CTranslate2 isn't installed, or can't run this model or these settings."""
    model = trained.model
    try:
        from ctranslate2.converters import TransformersConverter  # an extra, which may be absent
    except ImportError:
        raise UserError(
            "--engine ctranslate2: it isn't installed; pip install 'encdec-pretrain[ctranslate2]'"
        ) from None
    if settings.temperature > 0.0:
        raise UserError("--engine ctranslate2: CTranslate2's samples don't follow --seed; set --temperature 0")
    if settings.early_stopping is not False:
        raise UserError(
            "--engine ctranslate2: CTranslate2 ends beam search by its own rules; leave out --early-stopping"
        )
    if huggingface.hf_model_of(model.config).ctranslate2 is None:
        raise UserError(f"--engine ctranslate2: it runs models of the families t5 and bart, not {model.config.family}")
    with tempfile.TemporaryDirectory() as folder:
        exported, converted = Path(folder, "exported"), Path(folder, "converted")
        huggingface.export(model.state_dict(), model.config, trained.tokenizer, exported, engine=CTRANSLATE2)
        transformers_logging.set_verbosity_error()  # the converter loads the export, which isn't news
        transformers_logging.disable_progress_bar()
        TransformersConverter(str(exported)).convert(str(converted), quantization=precision)
        yield CTranslate2(converted, precision, settings)
