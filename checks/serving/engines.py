"""Programs that take an export, each run as its documentation says. Runs in an environment that has the program.

    python engines.py PROGRAM FOLDER

FOLDER has an export of each model, and `prompts.json`. Writes FOLDER/PROGRAM.json: for each model, the ids that the
program generated for each prompt, or the embedding of each, or the last line of the error.
"""

import json
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

NEW_TOKENS = 12
EOS = 1
Rows = list[Any]

# Imports stand inside the functions: each environment has one of the programs.


def _config(export: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((export / "config.json").read_text())
    return found


def _is_encoder_decoder(export: Path) -> bool:
    return bool(_config(export).get("is_encoder_decoder"))


def _model(export: Path, **settings: Any) -> Any:
    import transformers

    kind = "AutoModelForSeq2SeqLM" if _is_encoder_decoder(export) else "AutoModelForCausalLM"
    return getattr(transformers, kind).from_pretrained(export, trust_remote_code=True, **settings).eval()


def _tokenizer(export: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(export)


def in_transformers(export: Path, prompts: list[str]) -> Rows:
    return _generated(_model(export), export, prompts)


def _generated(model: Any, export: Path, prompts: list[str]) -> Rows:
    """What `generate` writes behind the start token, or behind the prompt."""
    tokenizer, rows = _tokenizer(export), []
    for prompt in prompts:
        given = tokenizer(prompt, return_tensors="pt")
        inputs = {"input_ids": given.input_ids, "attention_mask": given.attention_mask}
        ids = model.generate(**inputs, do_sample=False, num_beams=1, max_new_tokens=NEW_TOKENS)[0].tolist()
        rows.append(ids[1 if _is_encoder_decoder(export) else given.input_ids.shape[1] :])
    return rows


def in_ctranslate2(export: Path, prompts: list[str]) -> Rows:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    out = export.with_name(f"{export.name}-ctranslate2")
    TransformersConverter(str(export)).convert(str(out), quantization="float32", force=True)
    tokenizer, rows = _tokenizer(export), []
    # CTranslate2 reads no null: a BPE of bytes has no unknown token, and may have no BOS
    config = json.loads((out / "config.json").read_text())
    nulls = {name: tokenizer.eos_token for name, value in config.items() if name.endswith("_token") and value is None}
    (out / "config.json").write_text(json.dumps({**config, **nulls}))
    encoder_decoder = _is_encoder_decoder(export)
    opened = (ctranslate2.Translator if encoder_decoder else ctranslate2.Generator)(str(out), intra_threads=1)
    for prompt in prompts:
        tokens = tokenizer.convert_ids_to_tokens(tokenizer(prompt).input_ids)
        if encoder_decoder:
            # by default, the first token is never EOS
            limit = {"min_decoding_length": 0, "max_decoding_length": NEW_TOKENS, "max_input_length": 0}
            (found,) = opened.translate_batch([tokens], beam_size=1, return_end_token=True, **limit)
            rows.append(tokenizer.convert_tokens_to_ids(found.hypotheses[0]))
        else:
            limit = {"max_length": NEW_TOKENS, "include_prompt_in_result": False}
            (found,) = opened.generate_batch([tokens], beam_size=1, return_end_token=True, **limit)
            rows.append(found.sequences_ids[0])
    return rows


def in_onnxruntime(export: Path, prompts: list[str]) -> Rows:
    """torch's exporter: the whole model as one graph without a cache, its lengths free, run once for each token."""
    import numpy as np
    import onnxruntime
    import torch

    model, encoder_decoder = _model(export, attn_implementation="eager"), _is_encoder_decoder(export)
    names = ["input_ids", "attention_mask", *(["decoder_input_ids"] if encoder_decoder else [])]

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: Any) -> Any:
            return self.model(**dict(zip(names, inputs, strict=True)), use_cache=False).logits

    example = tuple(torch.ones((1, length), dtype=torch.long) for length in (7, 7, 5)[: len(names)])
    length, targets = torch.export.Dim("length", min=2), torch.export.Dim("targets", min=2)
    axes = ({1: length}, {1: length}, {1: targets})[: len(names)]
    program = torch.onnx.export(Logits().eval(), example, input_names=names, dynamic_shapes=(axes,), dynamo=True)
    path = export.with_name(f"{export.name}.onnx")
    program.save(str(path))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    tokenizer, rows = _tokenizer(export), []
    start = model.generation_config.decoder_start_token_id
    for prompt in prompts:
        ids = tokenizer(prompt).input_ids
        written = [start] if encoder_decoder else [*ids]
        first = len(written)
        while len(written) < first + NEW_TOKENS and EOS not in written[first:]:
            read = ids if encoder_decoder else written
            # the graph takes two targets or more; later ones change nothing before them
            asked = [*written, 0] if encoder_decoder else written
            given = [read, [1] * len(read), asked][: len(names)]
            feed = {name: np.array([one], dtype=np.int64) for name, one in zip(names, given, strict=True)}
            logits = session.run(None, feed)[0][0]
            written.append(int(logits[len(written) - 1].argmax()))
        rows.append(written[first:])
    return rows


def in_optimum(export: Path, prompts: list[str]) -> Rows:
    from optimum.onnxruntime import ORTModelForCausalLM, ORTModelForSeq2SeqLM

    kind = ORTModelForSeq2SeqLM if _is_encoder_decoder(export) else ORTModelForCausalLM
    return _generated(kind.from_pretrained(export, export=True, trust_remote_code=True), export, prompts)


def in_llama_cpp(export: Path, prompts: list[str]) -> Rows:
    """llama.cpp's converter, from the source of llama-cpp-python beside the exports; each model in its own process,
    which llama.cpp may end."""
    (converter,) = export.parent.glob("llama_cpp_python-*/vendor/llama.cpp/convert_hf_to_gguf.py")
    path = export.with_suffix(".gguf")
    _checked([sys.executable, converter, export, "--outfile", path, "--outtype", "f32"])
    given = json.dumps([str(path), prompts, _is_encoder_decoder(export)])
    return list(json.loads(_checked([sys.executable, __file__, "gguf", given]).splitlines()[-1]))


def _checked(command: list[Any]) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or [f"exit code {done.returncode}"]
        raise RuntimeError(last[0])
    return done.stdout


def generate_from_gguf(path: str, prompts: list[str], encoder_decoder: bool) -> Rows:
    """By llama.cpp's C functions, as its example `simple` does: its own tokenizer, and the likeliest id each time."""
    import ctypes

    import llama_cpp as llama

    llama.llama_backend_init()
    settings = llama.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(path.encode(), settings)
    if not model:
        raise RuntimeError(f"llama.cpp doesn't load {path}")
    vocabulary, rows = llama.llama_model_get_vocab(model), []
    count = llama.llama_vocab_n_tokens(vocabulary)
    assert llama.llama_model_has_encoder(model) == encoder_decoder
    for prompt in prompts:
        settings = llama.llama_context_default_params()
        settings.n_ctx, settings.n_threads, settings.n_threads_batch = 512, 1, 1
        # fp32 in the cache and in attention, where fp16 is the default
        settings.type_k = settings.type_v = settings.flash_attn_type = 0
        context = llama.llama_init_from_model(model, settings)
        text = prompt.encode()
        room = (llama.llama_token * 400)()
        length = llama.llama_tokenize(vocabulary, text, len(text), room, 400, True, True)
        batch = llama.llama_batch_get_one(room, length)
        if encoder_decoder:
            assert llama.llama_encode(context, batch) == 0
            start = llama.llama_model_decoder_start_token(model)
            batch = llama.llama_batch_get_one((llama.llama_token * 1)(start), 1)
        written: list[int] = []
        while len(written) < NEW_TOKENS and EOS not in written:
            assert llama.llama_decode(context, batch) == 0
            logits = ctypes.cast(llama.llama_get_logits_ith(context, -1), ctypes.POINTER(ctypes.c_float))
            written.append(max(range(count), key=lambda id_: logits[id_]))
            last = (llama.llama_token * 1)(written[-1])
            batch = llama.llama_batch_get_one(last, 1)
        rows.append(written)
        llama.llama_free(context)
    return rows


def in_sentence_transformers(export: Path, prompts: list[str]) -> Rows:
    from sentence_transformers import SentenceTransformer

    if not (export / "modules.json").exists():
        raise RuntimeError("no modules.json")
    return list(SentenceTransformer(str(export), device="cpu").encode(prompts).tolist())


def in_peft(export: Path, prompts: list[str]) -> Rows:
    """Trains LoRA for 20 steps on the prompts, merges it, and generates with the merged model read from its files.

    The first row has the losses of the first and the last step, and whether the merged model writes what the model with
    LoRA writes.
    """
    import peft
    import torch

    torch.manual_seed(0)
    model, tokenizer = _model(export), _tokenizer(export)
    kind = "SEQ_2_SEQ_LM" if _is_encoder_decoder(export) else "CAUSAL_LM"
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type=kind, r=4, target_modules="all-linear"))
    trained = [one for one in adapted.parameters() if one.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    ids = tokenizer(prompts[0], return_tensors="pt").input_ids
    for _ in range(20):
        loss = adapted(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with_lora = _generated(adapted.eval(), export, prompts)
    merged = export.with_name(f"{export.name}-merged")
    shutil.copytree(export, merged, dirs_exist_ok=True)
    ties = model.config.tie_word_embeddings
    plain = adapted.merge_and_unload()
    # peft compares the output with the encoder's embedding, and unties a T5Gemma, whose output is the decoder's
    plain.config.tie_word_embeddings = ties
    plain.save_pretrained(merged)
    same = sum(one == other for one, other in zip(_generated(_model(merged), merged, prompts), with_lora, strict=True))
    return [losses[0], losses[-1], same]


PROGRAMS: dict[str, Callable[[Path, list[str]], Rows]] = {
    "transformers": in_transformers,
    "CTranslate2": in_ctranslate2,
    "ONNX Runtime": in_onnxruntime,
    "optimum": in_optimum,
    "llama.cpp": in_llama_cpp,
    "sentence-transformers": in_sentence_transformers,
    "peft": in_peft,
}


def main() -> int:
    program, where = sys.argv[1:3]
    if program == "gguf":
        print(json.dumps(generate_from_gguf(*json.loads(where))))
        return 0
    folder, found = Path(where), {}
    for model, name in json.loads((folder / "models.json").read_text()).items():
        try:
            found[model] = {"rows": PROGRAMS[program](folder / name, json.loads((folder / "prompts.json").read_text()))}
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            found[model] = {"error": f"{type(error).__name__}: {lines[-1] if program == 'llama.cpp' else lines[0]}"}
        print(model, "failed" if "error" in found[model] else "done", flush=True)
    (folder / f"{program}.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
