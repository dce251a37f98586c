"""The mutants of a subject, in an order that a seed draws: more of them begin with fewer of them."""

import ast
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Subject:
    """`modules` decide one thing, and `tests` test them: patterns of files below ROOT."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


_CORPUS, _MODELS, _ENGINE = "tests/data_pipeline/corpus", "tests/pretrain/models", "tests/pretrain/engine"
SUBJECTS = {
    "loss": Subject(
        ("pretrain/models/functional/arithmetic.py",), (f"{_MODELS}/test_arithmetic.py", f"{_MODELS}/test_loss_head.py")
    ),
    "masks": Subject(
        ("pretrain/models/functional/attention_backends.py", "pretrain/models/attention.py"),
        tuple(
            f"{_MODELS}/test_{name}.py"
            for name in (
                "attention",
                "arithmetic",
                "autoregressive",
                "kernels",
                "positions",
                "decoder_only",
                "modern",
                "t5",
            )
        ),
    ),
    "objectives": Subject(
        ("data_pipeline/corpus/objectives/*.py",),
        tuple(f"{_CORPUS}/test_{name}.py" for name in ("objectives*", "denoising", "masked_lm", "packing")),
    ),
    "packing": Subject(
        ("data_pipeline/corpus/packing.py", "data_pipeline/corpus/example_rows.py"),
        (f"{_CORPUS}/test_packing.py", f"{_CORPUS}/test_objectives.py"),
    ),
    "order": Subject(
        tuple(f"data_pipeline/loading/{name}.py" for name in ("stream", "batches", "reader")),
        (
            "tests/data_pipeline/loading/test_*.py",
            "tests/data_pipeline/base/test_object_store.py",
            f"{_CORPUS}/test_objectives_end_to_end.py",
        ),
    ),
    "optimizers": Subject(
        ("pretrain/engine/optimizers/*.py",), (f"{_ENGINE}/test_optimizers.py", f"{_ENGINE}/test_update_passes.py")
    ),
    "gradients": Subject(
        ("pretrain/engine/gradients.py", "pretrain/engine/engine.py"),
        tuple(f"{_ENGINE}/test_{name}.py" for name in ("engine", "engine_state", "gradients", "numerics", "same_use")),
    ),
    "resume": Subject(
        ("pretrain/run/train_state.py", "pretrain/engine/checkpoint/engine_state.py"),
        (
            *(
                f"{_ENGINE}/test_{name}.py"
                for name in ("checkpoints", "damaged_checkpoints", "engine_state", "fingerprint", "streams")
            ),
            "tests/pretrain/run/test_train_state.py",
            "tests/pretrain/training/callbacks/test_bad_steps.py",
        ),
    ),
    "index": Subject(
        ("pretrain/engine/checkpoint/index.py", "pretrain/engine/checkpoint/directory.py"),
        tuple(f"{_ENGINE}/test_{name}.py" for name in ("index", "damaged_checkpoints", "checkpoints")),
    ),
    "dedup": Subject(
        ("data_pipeline/dedup/*.py",),
        (
            "tests/data_pipeline/dedup/test_*.py",
            "tests/data_pipeline/stages/test_evaluation_sets.py",
            "tests/data_pipeline/tools/test_trace.py",
        ),
    ),
    "cleaning": Subject(("data_pipeline/text/cleaning/*.py",), ("tests/data_pipeline/text/test_*.py",)),
}
"""What decides what is learnt and what is kept."""


def files(patterns: Sequence[str], root: Path = ROOT) -> list[str]:
    """The files that match, below `root`, in order."""
    found = {path.relative_to(root).as_posix() for pattern in patterns for path in root.glob(pattern)}
    return sorted(found)


@dataclass(frozen=True)
class Mutant:
    """A change in the body of a function.

    Attributes:
        subject: a key of SUBJECTS.
        module: the file, below ROOT.
        function: the qualified name of the outermost function that changes.
        lines: the first and the last line of the statement that changes, without the statements inside it.
        mutation: the lines that change, before and after.
        source: the whole module, changed.
    """

    subject: str
    module: str
    function: str
    lines: tuple[int, int]
    mutation: str
    source: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.module, self.function, str(self.lines[0]), self.mutation


def drawn(subject: str, modules: Sequence[str], number: int, seed: int = 0, root: Path = ROOT) -> list[Mutant]:
    """The first `number` mutants of the modules of a subject, or all.

    Each place of the code comes once before any comes a second time: 11 operators may stand for a `+`.
    """
    sources = {module: (root / module).read_text(encoding="utf-8") for module in files(modules, root)}
    places: dict[tuple[str, int, int], list[tuple[Any, int]]] = defaultdict(list)
    for module, source in sources.items():
        for operator, occurrence, place in _changes(source):
            places[module, *place].append((operator, occurrence))
    generator = random.Random(f"{seed} {subject}")
    order = sorted(places)
    generator.shuffle(order)
    for place in order:
        generator.shuffle(places[place])
    in_turn = (
        (place[0], *places[place][turn])
        for turn in range(max(map(len, places.values()), default=0))
        for place in order
        if turn < len(places[place])
    )
    found = (_mutant(subject, module, sources[module], *change) for module, *change in in_turn)
    return list(islice((one for one in found if one), number))


def _changes(source: str) -> Iterator[tuple[Any, int, tuple[int, int]]]:
    """Each operator that changes `source`, the number of the occurrence, and its line and column."""
    # here, because the tests import all of checks/ and lack cosmic-ray
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.operators.provider import OperatorProvider

    provider = OperatorProvider()
    operators = [provider[name] for name in provider]
    nodes = list(ast_nodes(get_ast(source)))
    for operator in (kind() for kind in operators if not kind.arguments()):
        occurrence = 0
        for node in nodes:
            for (line, column), _ in operator.mutation_positions(node):
                yield operator, occurrence, (line, column)
                occurrence += 1


def _mutant(subject: str, module: str, source: str, operator: Any, occurrence: int) -> Mutant | None:
    """None if what changes is not in the body of a function, or is an annotation."""
    from cosmic_ray.mutating import mutate_code

    changed = mutate_code(source, operator, occurrence)
    before, after = source.splitlines(), changed.splitlines()
    different = [number for number, (old, new) in enumerate(zip(before, after, strict=False), 1) if old != new]
    try:
        bodies, others = _bodies(ast.parse(source)), _bodies(ast.parse(changed))
    except SyntaxError:
        return None
    functions = [name for name in bodies if bodies[name] != others.get(name)]
    if len(functions) != 1 or not different:
        return None
    last = max(different) + len(before) - len(after) if len(before) > len(after) else max(different)
    shown = [" ".join(" ".join(lines[min(different) - 1 : end]).split()) for lines, end in
             ((before, last), (after, max(different)))]  # fmt: skip
    return Mutant(subject, module, functions[0], _statement(source, min(different)), " → ".join(shown), changed)


def _bodies(tree: ast.Module) -> dict[str, str]:
    """What the body of each function does, by its qualified name. A nested function belongs to the outer one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, FUNCTIONS):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)

    def below(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from below(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, FUNCTIONS):
                yield f"{prefix}{node.name}", "\n".join(map(ast.dump, node.body))

    return dict(below(tree.body, ""))


def _statement(source: str, line: int) -> tuple[int, int]:
    """The lines of the innermost statement around `line`; of one with a body, those above the body."""
    found = (line, line)
    for node in ast.walk(ast.parse(source)):  # outer ones first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line):
            body = getattr(node, "body", None)
            found = node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or line
    return found
