"""Fixtures that the tests of packages in examples share with those of this project."""

from tests.conftest import small_corpus as small_corpus
from tests.pretrain.conftest import spiece as spiece
