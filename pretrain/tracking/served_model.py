"""A model that `mlflow models serve` answers from: text in, text out.

MLflow copies this file beside an exported model and runs it there, so it imports nothing of this project, only what a
server needs: mlflow, torch and transformers. Nothing is unpickled.
"""

from typing import Any

import mlflow
import torch


class TextModel(mlflow.pyfunc.PythonModel):
    """The exported model in the artifact `model`."""

    def load_context(self, context: Any) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

        directory = context.artifacts["model"]
        # the modelling files of a family that transformers lacks stand in the directory itself
        settings = {"trust_remote_code": True, "local_files_only": True}
        answers = AutoConfig.from_pretrained(directory, **settings).is_encoder_decoder
        kind = AutoModelForSeq2SeqLM if answers else AutoModelForCausalLM
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = kind.from_pretrained(directory, **settings).to(device).eval()
        # a causal model writes behind its input, so that must end at the right edge
        side = "right" if answers else "left"
        self.tokenizer = AutoTokenizer.from_pretrained(directory, padding_side=side, **settings)

    def predict(self, context, model_input, params=None):  # no types: MLflow would read them
        """The answer to each text, or its continuation. `params` are settings of transformers' `generate`."""
        texts = [str(text) for text in model_input.iloc[:, 0]]
        settings = dict(params or {})
        if not settings.setdefault("do_sample", False):  # transformers warns about settings that it then ignores
            settings = {key: value for key, value in settings.items() if key not in ("temperature", "top_p")}
        written = []
        for start in range(0, len(texts), 16):
            batch = self.tokenizer(texts[start : start + 16], return_tensors="pt", padding=True)
            batch = {key: batch[key].to(self.model.device) for key in ("input_ids", "attention_mask")}
            with torch.inference_mode():
                rows = self.model.generate(**batch, **settings)
            if not self.model.config.is_encoder_decoder:
                rows = rows[:, batch["input_ids"].shape[1] :]
            written += [self._text(row) for row in rows.tolist()]
        return written

    def _text(self, ids: list[int]) -> str:
        """The text of `ids` without marks of begin and end; the marks of blanks stay: they structure an answer."""
        marks = {self.tokenizer.pad_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id}
        return self.tokenizer.decode([id_ for id_ in ids if id_ not in marks]).strip()


mlflow.models.set_model(TextModel())
