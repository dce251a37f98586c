"""What the tests of packages in examples share with those of this project: the marks and fixtures."""

from tests.conftest import pytest_configure as pytest_configure
from tests.conftest import small_corpus as small_corpus
from tests.pretrain.conftest import spiece as spiece
