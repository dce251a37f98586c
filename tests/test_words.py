"""The field's words: those that this project once had of its own don't come back."""

import functools
import re
import subprocess
from pathlib import Path

from tests.tables import each

ROOT = Path(__file__).parent.parent
# What was once said here, and what the field says.
REPLACED = {
    r"\bTaught\b|\btaught\b": "a teacher's targets",
    r"\bSights?\b|\bsights?\b": "attention mask or attention bias",
    r"\b(of_x|of_weights?|of_bias|of_logits|become_gradients)\b": "grad_x, grad_weight, logits_to_grad_, …",
    r"\bwritten out\b": "eager",
    r"\bIGNORED = -100\b": "IGNORE_INDEX",
    r"\bend marks?\b|\bbegin marks?\b": "EOS, BOS",
    r"\bdecoders? alone\b": "decoder-only",
    r"\bmasters\b|\bflats\b": "fp32 master weights, flat buffers",
    r"\bCut\(|\bimport Cut\b": "BatchLayout",
    r"\blosers?\b|\bwinners?\b": "duplicates, kept",
    r"\bsound_json\b|\bis_sound\b": "valid",
    r"\bStor(y|ies)\b|\bPassages?\b|\bstory/": "provenance, trace",
    r"\bdesks?\b": "temporary directory",
    r"\bword counts alone\b": "unigram entropy",
    r"\bStanding\b|\bstanding\.": "TrainState",
    r"\bJournal\b|\bclass Together\b": "RunReport, Collectives",
    r"\bHello\(|\bwire\b": "protocol, handshake",
    r"without anyone's wish|own hours' sake|comes? to life|reckoned with|\bknows of\b|goes together": "plain English",
}
FILES = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.yaml"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    if not name.startswith(("tests/data/", "data_pipeline/samples/", "data_pipeline/cleaning/bad_words_lists/"))
]


@functools.cache
def texts() -> dict[Path, str]:
    files = [path for path in FILES if path.is_file() and path != Path(__file__)]
    return {path: path.read_text(errors="replace") for path in files}


@each("words", REPLACED)
def test_a_word_of_our_own_does_not_come_back(words):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in texts().items()
        if re.search(words, text)
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(words, line)
    ]
    assert found == [], f"the field says: {REPLACED[words]}"
