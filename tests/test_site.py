"""The Python reference is what the code says."""

import inspect
import re

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
