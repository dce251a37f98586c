"""The layers of the code: no import leads back up between packages, subpackages or modules."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IMPORTS = (ast.Import, ast.ImportFrom)
PACKAGES = ("examples", "launch", "pretrain", "data_pipeline")  # from top to bottom


def modules() -> dict[str, Path]:
    """The files of the packages, by module name."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """The modules among `known` that a module imports, at its top or later; not those that only types need."""
    only_types = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if node in only_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """The modules of this project that each module imports."""
    known = modules()
    return {
        name: {other for other in imports(parsed(path), known) if other in known and other != name}
        for name, path in known.items()
    }


def subpackage(module: str) -> str:
    """The folder of a module, one of each tool's; a module at the top of its package counts as one of its own."""
    package, *rest = module.split(".")
    return ".".join([package, *rest[: 2 if rest[:1] == ["tools"] else 1]])


def is_tool(module: str) -> bool:
    return module.split(".")[1:2] == ["tools"]


def in_order(arrows: dict[str, set[str]]) -> list[str]:
    try:
        return list(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        pytest.fail(f"imports go round: {' → '.join(reversed(error.args[1]))}")


def test_no_import_between_subpackages_leads_back_up(graph):
    subpackages: dict[str, set[str]] = {}
    for module, others in graph.items():
        subpackages.setdefault(subpackage(module), set()).update(
            subpackage(other) for other in others if subpackage(other) != subpackage(module)
        )
    assert len(in_order(subpackages)) > 30


def test_no_import_inside_a_subpackage_leads_back_up(graph):
    assert len(in_order(graph)) > 200


def test_tools_are_reached_through_commands_functions_for_python_and_examples_alone(graph):
    reached = {
        f"{module} → {other}"
        for module, others in graph.items()
        if not is_tool(module)
        and module.split(".")[1:2] not in (["cli"], ["__main__"], ["from_python"])
        and not module.startswith("examples.")
        for other in others
        if is_tool(other)
    }
    assert reached == set()


def test_packages_and_the_lowest_subpackage_import_nothing_from_above(graph):
    for module, others in graph.items():
        above = PACKAGES[: PACKAGES.index(module.split(".")[0])]
        assert [other for other in others if other.split(".")[0] in above] == [], module
        if subpackage(module) == "data_pipeline.base":
            assert {subpackage(other) for other in others} <= {"data_pipeline", "data_pipeline.base"}, module


UNPICKLING = re.compile(r"\b(all_gather_object|(broadcast|scatter)_object_list|(gather|send|recv)_object\w*)\b")


def test_ranks_exchange_no_pickles():
    """PyTorch's collectives of objects unpickle what peers send: `pretrain.engine.ranks` exchanges JSON."""
    found = [module for module, path in modules().items() if UNPICKLING.search(path.read_text())]
    assert found == []


def test_an_import_in_a_function_says_why_it_is_not_at_the_top():
    """It saves a start more than 0.3 s, or must come later than those at the top. Files of commands say it once."""
    found = 0
    for module, path in modules().items():
        if ".cli" in module:
            continue
        lines = ["", *path.read_text().splitlines()]
        functions = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef))
        for line in {node.lineno for one in functions for node in ast.walk(one) if isinstance(node, IMPORTS)}:
            first = line
            while re.match(r"\s*(from|import) ", lines[first - 1]):
                first -= 1
            assert "#" in lines[first] or lines[first - 1].lstrip().startswith("#"), f"{module}: {line}"
            found += 1
    assert found > 5


def test_nothing_needs_what_is_in_checks_or_experiments_but_their_tests():
    importing = {
        path.relative_to(ROOT).as_posix()
        for folder in (*PACKAGES, "tests")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"(?m)^\s*(from|import) (checks|experiments)\b", path.read_text())
    }
    others = [path for path in importing if not path.startswith(("tests/checks/", "tests/experiments/"))]
    assert others == ["tests/data_pipeline/sources/test_tables.py"]


def test_the_product_names_no_family_of_an_example():
    projects = [tomllib.loads(file.read_text())["project"] for file in (ROOT / "examples").glob("*/pyproject.toml")]
    offered = [
        name for project in projects for name in project.get("entry-points", {}).get("encdec_pretrain.families", {})
    ]
    assert offered
    for module, path in modules().items():
        if not module.startswith("examples."):
            text = path.read_text().lower()
            assert [name for name in offered if re.search(name.replace("_", "[ _-]?"), text)] == [], module


def test_no_module_knows_an_optimizer_but_those_of_optimizers(graph):
    """Those are its settings, its implementation, and what is built on it. `launch init` writes run files."""
    folders = ("pretrain.config.optimizers", "pretrain.engine.optimizers")
    names = {path.stem for path in (ROOT / "pretrain/config/optimizers").glob("*.py")} - {"__init__", "optimizer"}
    assert names >= {"adamw", "muon"}
    own = {f"{folder}.{name}" for folder in folders for name in names}
    assert own <= graph.keys()
    knowing = {
        module
        for module, others in graph.items()
        if own & others
        or any(isinstance(node, ast.Constant) and node.value in names for node in ast.walk(parsed(modules()[module])))
    }
    outside = {module for module in knowing if not module.startswith((*folders, "examples."))}
    assert outside == {"launch.tools.scaffold.files"}


def test_deepspeed_is_used_in_one_subpackage_and_its_private_names_in_one_module():
    """ZeRO-3 puts attributes `ds_…` on parameters."""
    named = {module for module, path in modules().items() if re.search(r"[.\"']ds_[a-z_]+\b", path.read_text())}
    assert named == {"pretrain.engine.deepspeed_private"}
    assert {subpackage(module) for module in importing("deepspeed")} == {"pretrain.engine"}
    through_others = re.compile(r"\b(deepspeed_private|versions|gradients)\.deepspeed\b")
    reaching = {module for module, path in modules().items() if through_others.search(path.read_text())}
    assert reaching == set()


def test_each_private_name_of_deepspeeds_is_in_the_docs_with_its_reason():
    page = (ROOT / "docs/reference/deepspeed.md").read_text().partition("## Private names")[2].partition("\n## ")[0]
    listed = {
        name.rpartition(".")[2] for row in re.findall(r"(?m)^\| (`.*?) \|", page) for name in row.split("`")[1::2]
    }
    used = set()
    for node in ast.walk(parsed(modules()["pretrain.engine.deepspeed_private"])):
        if isinstance(node, ast.Attribute):
            of_optimizer = re.search(r"\boptimizer$", ast.unparse(node.value))
            theirs = re.match(r"ds_|partition_|_|checkpoint_event", node.attr)
            used |= {node.attr} if of_optimizer or theirs else set()
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            used.add(ast.literal_eval(node.args[1]))
    assert used - {"__version__"} == listed
    own = re.compile(rf"\.({'|'.join(listed - {'optimizer'})})\b")
    users = {module for module, path in modules().items() if own.search(path.read_text())}
    assert users == {"pretrain.engine.deepspeed_private"}


def test_nothing_of_deepspeed_is_replaced():
    """No attribute is assigned on what belongs to DeepSpeed, at any depth: `engine.optimizer.step = …`, `setattr`, and
    none of its modules has a stand-in. An item of a table is data: `averaged_gradients[0] = …`."""
    theirs = re.compile(r"\b(deepspeed|engine|optimizer|coordinator|offload|accelerator|backend|cdb)$")
    for module, path in modules().items():
        if subpackage(module) != "pretrain.engine":
            continue
        for node in ast.walk(parsed(path)):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) else []:
                owner = ast.unparse(target.value) if isinstance(target, ast.Attribute) else ""
                assert not theirs.search(owner), f"{module}:{node.lineno}: {ast.unparse(node)}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
                assert ast.unparse(node.args[0]) == "module", f"{module}:{node.lineno}"  # `whole_copy`'s own
        assert "sys.modules" not in path.read_text(), module


def importing(library: str) -> set[str]:
    """The modules that import a library, at their top or later."""
    return {
        module
        for module, path in modules().items()
        if any(name.split(".")[0] == library for name in imports(parsed(path), {}))
    }


def test_triton_is_imported_by_the_kernels_alone():
    """It takes time to import, and is there only where PyTorch has CUDA."""
    assert {module.rpartition(".")[0] for module in importing("triton")} == {"pretrain.models.kernels"}


def test_the_variables_of_launchers_are_read_in_one_module():
    """A run file is also read before a process is a rank."""
    names = r"\"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)\""
    read = re.compile(rf"environ\.get\({names}|environ\[{names}\](?! = )|{names} (not )?in os\.environ")
    reading = {module for module, path in modules().items() if read.search(path.read_text())}
    assert reading - {"data_pipeline.base.config_file"} == {"pretrain.run.rank_environment"}


def test_one_function_of_pretrain_trains_a_run():
    named = [
        module
        for module, path in modules().items()
        if module.startswith("pretrain.")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef) and node.name == "train"
    ]
    assert sorted(named) == ["pretrain.from_python", "pretrain.training.run"]  # the first calls the second
