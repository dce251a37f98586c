"""Formulas that can be read as a line of text; the others are left out."""

import re

_SYMBOLS = {
    name: symbol
    for pairs in (
        "alpha α beta β gamma γ delta δ epsilon ε varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ",
        "lambda λ mu μ nu ν xi ξ pi π rho ρ sigma σ tau τ upsilon υ phi φ varphi φ chi χ psi ψ omega ω",
        "Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω times × cdot ·",
        "div ÷ pm ± mp ∓ ast * star ⋆ circ ∘ bullet • le ≤ leq ≤ ge ≥ geq ≥ ne ≠ neq ≠ equiv ≡ approx ≈ sim ∼",
        "simeq ≃ cong ≅ propto ∝ ll ≪ gg ≫ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ cup ∪",
        "cap ∩ setminus ∖ emptyset ∅ varnothing ∅ forall ∀ exists ∃ neg ¬ land ∧ wedge ∧ lor ∨ vee ∨ oplus ⊕",
        "otimes ⊗ to → rightarrow → leftarrow ← Rightarrow ⇒ Leftarrow ⇐ mapsto ↦ leftrightarrow ↔",
        "Leftrightarrow ⇔ iff ⇔ implies ⇒ infty ∞ partial ∂ nabla ∇ sum ∑ prod ∏ int ∫ angle ∠ perp ⊥",
        "parallel ∥ mid | ldots … cdots ⋯ dots … prime ′ hbar ℏ ell ℓ Re ℜ Im ℑ aleph ℵ degree ° R ℝ N ℕ Z ℤ",
        "Q ℚ C ℂ sin sin cos cos tan tan log log ln ln exp exp lim lim max max min min det det gcd gcd",
        "arg arg dim dim ker ker",
    )
    for name, symbol in zip(pairs.split()[::2], pairs.split()[1::2], strict=True)
}
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_FONT = re.compile(
    r"\\(?:math(?:rm|bf|it|sf|cal|bb|frak)|boldsymbol|text|textrm|operatorname|mbox|vec) *\{([^{}\\]*)\}"
)
_FRACTION = re.compile(r"\\[dt]?frac *\{([^{}\\]*)\} *\{([^{}\\]*)\}")
_ROOT = re.compile(r"\\sqrt *\{([^{}\\]*)\}")
_INDEX = re.compile(r"([\^_]) *\{([^{}\\]*)\}")
_DELIMITER = re.compile(r"\\(?:left|right|big|Big)\b(?=[^\w\s])")
_SPACING = re.compile(r"\\[,;:!> ]|\\q?quad\b|~")
_LEFT_OVER = re.compile(r"[\\{}&\n]")
_ONE_TERM = re.compile(r"[\w.∞′]*")
_LONGEST = 200


def math_text(tex: str) -> str:
    """A formula as text; "" if it needs more than letters, symbols, indices and simple fractions.

    "E=mc^2"  ->  "E=mc^2"        "\\alpha_{1} \\leq \\frac{a}{b+1}"  ->  "α_1 ≤ a/(b+1)"
    "\\begin{matrix}…"  ->  ""
    """
    text = tex.strip()
    if len(text) > _LONGEST:
        return ""
    if "\\" in text or "{" in text:
        text = _DELIMITER.sub("", _SPACING.sub(" ", text))
        text = _FONT.sub(r"\1", text)
        text = _COMMAND.sub(lambda command: _SYMBOLS.get(command[1], command[0]), text)
        text = _INDEX.sub(lambda index: index[1] + _term(index[2]), text)
        text = _ROOT.sub(lambda root: "√" + _term(root[1]), text)
        text = _FRACTION.sub(lambda fraction: f"{_term(fraction[1])}/{_term(fraction[2])}", text)
        text = _INDEX.sub(lambda index: index[1] + _term(index[2]), text)
    return "" if _LEFT_OVER.search(text) else " ".join(text.split()).rstrip(" ,.;")


def _term(text: str) -> str:
    """`text` in brackets, unless it is a single number or name."""
    text = text.strip()
    return text if _ONE_TERM.fullmatch(text) else f"({text})"
