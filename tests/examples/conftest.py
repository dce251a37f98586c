"""Fixtures that these tests share with those of training."""

from tests.pretrain.conftest import empty_mlflow as empty_mlflow
from tests.pretrain.conftest import spiece as spiece
