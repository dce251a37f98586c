"""The Python reference is what the code says, and the pages make a site."""

import inspect
import re
import tomllib

import yaml
from packaging.requirements import Requirement

import data_pipeline
import launch
import pretrain
from docs.site import python_reference
from tests.conftest import TOP
from tests.tables import each

REFERENCE = (TOP / "docs/reference/python.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    return re.search(rf"(?ms)^#+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", REFERENCE)[1]


def test_the_python_reference_is_what_the_code_says():
    assert python_reference.page() == REFERENCE, "python -m docs.site.python_reference > docs/reference/python.md"


@each("package", [data_pipeline, pretrain, launch])
def test_the_reference_describes_every_parameter_of_every_public_name(package):
    """Beside Python's own reading of the objects."""
    for name in package.__all__:
        public = getattr(package, name)
        own = vars(public).items() if inspect.isclass(public) else ()
        functions = {f"{name}.{key}": one for key, one in own if inspect.isfunction(one) and key[0] != "_"}
        for heading, function in functions.items() or [(f"{package.__name__}.{name}", public)]:
            found = section(heading)
            code, words = re.search(r"(?s)```python\n(.*?)```(.*)", found).groups()
            if inspect.isclass(function):
                assert code.startswith(f"class {name}")
                continue
            parameters = inspect.signature(function).parameters.keys() - {"self"}
            assert set(re.findall(r"(\w+): ", code)) == parameters, heading
            assert [one for one in parameters if f"`{one}`" not in words] == [], heading


def test_read_the_docs_installs_what_the_extra_declares():
    config = yaml.safe_load((TOP / ".readthedocs.yaml").read_text())
    (install,) = config["build"]["jobs"]["install"]
    extra = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    packages = install.removeprefix("pip install --constraint constraints.txt ").split()
    assert set(packages) == {Requirement(one).name for one in extra} - {"griffelib"}  # its page is committed
    assert (TOP / config["mkdocs"]["configuration"]).is_file()
