"""Small tokenizers of the shapes that are published beside Llama 3, Qwen3, Gemma and Llama 2, trained on shipped text.

The directories hold what transformers finds there: tokenizer.json and tokenizer_config.json.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.reading import c4_pages

PIECES = 700
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _LLAMA3.replace("{1,3}", "")
ODD = [
    *("", " ", "\n", "Hello world", " Hello  world   again"),
    "\n\n\nThree breaks, then \t\ttabs.\r\nAnd Windows' own.\n \n  \n",
    "Don't you'll we'RE 1234567890 3.14159",
    "Ünïcödé é e\u0301, 日本語のテキスト。한국어 \u1112\u1161\u11ab العربية हिन्दी",
    "😀👩‍👩‍👧‍👦 \u200b\u00a0\u3000 \x00\x1f\ufffd ﬁ",
    "for (int i = 0; i < 10; ++i) {\n\t\tx[i] += y; // !!\n}\n\n\n\n",
    "<table><tr><td>cells</td></tr></table>",
    "▁▁already▁marked▁ <0x41>",
    "a" * 300 + " " * 70 + "b",
]
SPELLED = [
    "<s>A</s> <unk> x<s>y <pad> <mask>",
    "<bos>Gemma<eos> <start_of_turn>user",
    "<|begin_of_text|>Llama<|end_of_text|> <|eot_id|>",
    "<|endoftext|>Qwen<|im_start|>user\n<|im_end|> <extra_id_0>",
]


def _trained(normalizer, pre_tokenizer, alphabet: list[str], special: list[str], **options) -> tokenizers.Tokenizer:
    """A BPE of PIECES tokens, the first of them `special`, with `options` of its model."""
    tokenizer = tokenizers.Tokenizer(models.BPE(**options))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    settings = {"vocab_size": PIECES, "special_tokens": special, "initial_alphabet": alphabet}
    tokenizer.train_from_iterator(c4_pages()[:100], trainers.BpeTrainer(**settings, show_progress=False))
    return tokenizer


def _of_bytes(pattern: str, normalizer: Any = None, **options: Any) -> tokenizers.Tokenizer:
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), of_bytes])
    tokenizer = _trained(normalizer, splits, pre_tokenizers.ByteLevel.alphabet(), [], **options)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _of_pieces(special: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Tokens and merges as they are converted from sentencepiece: `special` and bytes first, ▁ for a space."""
    split = pre_tokenizers.Split("▁", behavior="merged_with_next")
    trained = _trained(normalizers.Replace(" ", "▁"), split, ["▁", *map(chr, range(33, 127))], [*special, *BYTES])
    model = json.loads(trained.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def llama3(directory: Path) -> None:
    """Special tokens above the merges; BOS before each text; no padding. Words are looked up whole first."""
    tokenizer = _of_bytes(_LLAMA3, ignore_merges=True)
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|eot_id|>"]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    bos, ids = special[0], [(special[0], tokenizer.token_to_id(special[0]))]
    begin = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=ids)
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])
    added = {str(token.pop("id")): token for token in json.loads(tokenizer.to_str())["added_tokens"]}
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[1]}
    inputs = ["input_ids", "attention_mask"]
    more = {"added_tokens_decoder": added, "clean_up_tokenization_spaces": True, "model_input_names": inputs}
    _write(directory, tokenizer, **names, **more)


def qwen3(directory: Path) -> None:
    """NFC first; added tokens above the merges, of which <think> and its like aren't special; no BOS."""
    tokenizer = _of_bytes(_QWEN, normalizers.NFC())
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    names = {"bos_token": None, "eos_token": special[2], "pad_token": special[0], "unk_token": None}
    more = {"add_bos_token": False, "additional_special_tokens": special[1:], "split_special_tokens": False}
    _write(directory, tokenizer, tokenizer_class="Qwen2Tokenizer", **names, **more)


def gemma(directory: Path) -> None:
    """Pieces with ▁ and bytes; added tokens inside the vocabulary; one above it, like Gemma 3's mark of an image."""
    import transformers  # takes seconds

    inside = ["\n\n", "\n\n\n", "▁▁", "<table>", "</table>"]
    vocabulary, merges = _of_pieces(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", *inside])
    tokenizer = transformers.GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True)
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in inside])
    special = ("<start_of_turn>", "<image_soft_token>")
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer.save_pretrained(directory)


def llama2(directory: Path) -> None:
    """Pieces with ▁, which also begins a text, and bytes. As converted from sentencepiece, a merge makes <s>."""
    vocabulary, merges = _of_pieces(["<unk>", "<s>", "</s>"])
    vocabulary["s>"] = len(vocabulary)
    merges += [("s", ">"), ("<", "s>")]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    saved = tokenizers.Tokenizer(model)
    saved.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_, strip = decoders.ByteFallback(), decoders.Strip(" ", 1, 0)
    saved.decoder = decoders.Sequence([decoders.Replace("▁", " "), bytes_, decoders.Fuse(), strip])
    saved.add_special_tokens(["<unk>", "<s>", "</s>"])
    begin = {"single": "<s> $A", "pair": "<s> $A <s>:1 $B:1", "special_tokens": [("<s>", 1)]}
    saved.post_processor = processors.TemplateProcessing(**begin)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None}
    more = {"add_bos_token": True, "add_eos_token": False, "legacy": False, "clean_up_tokenization_spaces": False}
    _write(directory, saved, tokenizer_class="LlamaTokenizer", **names, **more)


def _write(directory: Path, tokenizer: tokenizers.Tokenizer, **config: Any) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


KINDS = {"Llama 3": llama3, "Qwen3": qwen3, "Gemma": gemma, "Llama 2": llama2}


def write(kind: str, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    KINDS[kind](directory)
    return directory
