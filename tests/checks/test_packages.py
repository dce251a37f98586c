"""The files by which packages in examples are tried away from the checkout."""

from checks.packages import NAMED, ROOT


def test_every_package_that_is_installed_by_itself_is_tried():
    assert NAMED.keys() == {file.parent.name for file in ROOT.glob("examples/*/pyproject.toml")}
