"""Modules that are imported at first use: each is an ordinary module, imported later."""

import builtins
import pickle
import sys
import threading
from importlib import import_module

import pytest

from data_pipeline.foundation.lazy_imports import imported_at_first_use

USER = """
from data_pipeline.foundation.lazy_imports import imported_at_first_use

with imported_at_first_use():
    import single
    from package import broken, module as other
"""


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A module that imports others at first use."""
    for name, content in {
        "single.py": "value = 1",
        "package/__init__.py": "",
        "package/module.py": "def double(x):\n    return 2 * x",
        "package/broken.py": "import not_installed",
        "user.py": USER,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("user")
    for name in ("user", "single", "package", "package.module", "package.broken"):
        sys.modules.pop(name, None)


def test_a_module_and_its_package_are_imported_when_an_attribute_is_asked_for(user):
    assert {"single", "package", "package.module"} & sys.modules.keys() == set()
    assert user.other.double(3) == 6
    assert {"single", "package", "package.module"} & sys.modules.keys() == {"package", "package.module"}
    assert user.single.value == 1
    assert user.other.double is import_module("package.module").double
    assert pickle.loads(pickle.dumps(user.other.double)) is user.other.double


def test_what_replaces_a_module_or_an_attribute_later_is_used(user, monkeypatch):
    monkeypatch.setattr("package.module.double", str)
    assert user.other.double(3) == "3"
    monkeypatch.setitem(sys.modules, "single", None)
    with pytest.raises(ModuleNotFoundError, match="single"):
        _ = user.single.value


def test_a_module_that_fails_raises_its_own_error_each_time(user):
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="not_installed"):
            _ = user.broken.value
    with pytest.raises(AttributeError, match="module 'single' has no attribute 'other'"):
        _ = user.single.other


def test_imports_of_other_files_and_threads_are_ordinary_ones_within_the_block(user):
    usual = builtins.__import__
    with imported_at_first_use():
        thread = threading.Thread(target=exec, args=("from package.module import double", found := {}))
        thread.start()
        thread.join()
        exec("import single", found)
    assert found["double"](3) == 6
    assert type(found["single"]) is type(sys)
    assert builtins.__import__ is usual
