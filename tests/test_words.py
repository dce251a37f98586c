"""The field's words: those that this project once had of its own don't come back."""

import subprocess
from pathlib import Path

from tests.support.tables import each

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
    r"\b(go|goes|going|gone|went) on\b|\bmend(s|ed|ing)?\b": "continue, resume; fix, repair",
    r"\bHello\(|\bwire\b": "protocol, handshake",
    r"without anyone's wish|own hours' sake|comes? to life|reckoned with|\bknows of\b|goes together": "plain English",
}
OTHERS = ("tests/data", "data_pipeline/samples", "data_pipeline/text/cleaning/bad_words_lists", "tests/test_words.py")
FILES = ("*.py", "*.md", "*.yaml", *(f":!{path}" for path in OTHERS))


@each("words", REPLACED)
def test_a_word_of_our_own_does_not_come_back(words):
    command = ["git", "grep", "--line-number", "--perl-regexp", words, "--", *FILES]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (1, ""), f"the field says: {REPLACED[words]}"
