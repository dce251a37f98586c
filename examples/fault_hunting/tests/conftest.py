"""What these tests share with the project's: the environment of ranks, the same random numbers, a corpus."""

from tests.conftest import pytest_fixture_setup as pytest_fixture_setup
from tests.conftest import pytest_runtest_call as pytest_runtest_call
from tests.conftest import small_corpus as small_corpus
