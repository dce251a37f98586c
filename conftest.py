"""Before anything of this project is imported, which reads what installed packages offer."""

from tests.installed import install_examples

install_examples()
