"""Files of `torch.save`: the tensors as they were saved; anything else is refused by name, and nothing is run."""

import collections
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from data_pipeline.base.errors import FailedError, UserError
from pretrain.export import torch_file
from tests.support.in_process import refused_here
from tests.support.tables import each

DRAWS = torch.Generator().manual_seed(0)
MATRIX = torch.randn(3, 4, generator=DRAWS)
FAR = torch.tensor([[0, 2**40], [1, 2]])  # an index beyond the tensor's shape


class Runs:
    """A pickle of it is a program that makes a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


class Model:
    """An object of a class."""


def sparse(layout=torch.sparse_coo):
    if layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(FAR, torch.ones(2), (3, 4), check_invariants=False)
    return torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2, 2]), torch.tensor([0, 2**40]), torch.ones(2), (3, 4), check_invariants=False
    )


@each("zipped", [True, False])
def test_the_tensors_are_those_that_were_saved(zipped, tmp_path):
    """In both forms of the file; as a module's state dict, which is an OrderedDict with attributes."""
    module = nn.Linear(4, 3)
    saved = {
        "transposed": MATRIX.t(),
        "part": MATRIX[1:, 2:],
        **{str(dtype): MATRIX.to(dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int8)},
        "flags": MATRIX > 0,
        "parameter": nn.Parameter(MATRIX),
        "number": torch.tensor(3.0),
        "nothing": torch.empty(0, 4),
    }
    for state in (saved, module.state_dict(), collections.OrderedDict(saved)):
        torch.save(state, tmp_path / "a.bin", _use_new_zipfile_serialization=zipped)
        found = torch_file.read(tmp_path / "a.bin")
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
        assert all(found[name].dtype == tensor.dtype for name, tensor in state.items())


@each("zipped", [True, False])
def test_anything_but_a_dense_tensor_is_refused_by_its_name_and_nothing_is_run(zipped, tmp_path):
    """`torch.load(weights_only=True)` takes the sparse tensors, whose indices lie outside: their use would crash."""
    ran = tmp_path / "ran"
    for value, maker in (
        (Runs(ran), "posix.mkdir"),
        (Model(), f"{Model.__module__}.Model"),
        (sparse(), "torch._utils._rebuild_sparse_tensor"),
        (sparse(torch.sparse_csr), "torch._utils._rebuild_sparse_tensor"),
        (torch.quantize_per_tensor(MATRIX, 0.1, 0, torch.qint8), "torch._utils._rebuild_qtensor"),
        (MATRIX.to(torch.float8_e4m3fn), "torch._utils._rebuild_tensor_v3"),
        (torch.device("cpu"), "torch.device"),
    ):
        torch.save({"first": MATRIX, "second": value}, tmp_path / "a.bin", _use_new_zipfile_serialization=zipped)
        with pytest.raises(UserError) as refused:
            torch_file.read(tmp_path / "a.bin")
        said = f"second is made by {maker}, but only dense tensors are read. No code of the file was run"
        assert str(refused.value) == f"{tmp_path}/a.bin: {said}"
        assert not ran.exists()


@each(
    "saved, why",
    [
        ({"first": MATRIX, "step": 3}, "step is a value of the type int, but only dense tensors are read"),
        ({"model": {"a": MATRIX}}, "model is a value of the type dict, but only dense tensors are read"),
        ({1: MATRIX}, "has the key 1, expected names of tensors"),
        ([MATRIX], "holds list, expected a dictionary of tensors"),
        ({"wide": torch.ones(1).expand(2**40)}, "wide is a tensor whose elements share memory, but"),
    ],
)
def test_what_is_no_dictionary_of_tensors_is_refused(saved, why, tmp_path):
    torch.save(saved, tmp_path / "a.bin")
    with pytest.raises(UserError) as refused:
        torch_file.read(tmp_path / "a.bin")
    assert str(refused.value).startswith(f"{tmp_path}/a.bin: {why}")


@each("protocol", range(6))
def test_a_pickle_of_any_protocol_runs_nothing(protocol, tmp_path):
    """Of a file that isn't a zip file, and in a zip file whose folder has another name."""
    ran = tmp_path / "ran"
    program = pickle.dumps({"a": Runs(ran)}, protocol)
    (tmp_path / "plain.bin").write_bytes(program)
    for name in ("archive/data.pkl", "other/DATA.PKL"):
        with zipfile.ZipFile(tmp_path / f"{name[0]}.bin", "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({}, 2))
            archive.writestr("archive/version", "3")
            archive.writestr(name, program)
    for name in ("plain", "a", "o"):
        with pytest.raises(UserError, match=r"\.bin: .*posix\.mkdir, but only dense tensors are read"):
            torch_file.read(tmp_path / f"{name}.bin")
        assert not ran.exists()


def test_a_compressed_pickle_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**6))
    with pytest.raises(UserError, match=r"a\.bin: archive/data\.pkl is compressed: not a file of torch\.save"):
        torch_file.read(tmp_path / "a.bin")


@each("zipped", [True, False])
def test_a_damaged_file_is_one_line(zipped, tmp_path):
    torch.save({"a": MATRIX}, tmp_path / "whole.bin", _use_new_zipfile_serialization=zipped)
    whole = (tmp_path / "whole.bin").read_bytes()
    for content in (b"", b"PK\x03\x04", b"not a pickle", whole[:40], whole[: len(whole) // 2], whole[:-30]):
        (tmp_path / "a.bin").write_bytes(content)
        with pytest.raises(UserError) as refused:
            torch_file.read(tmp_path / "a.bin")
        assert str(refused.value).startswith(f"{tmp_path}/a.bin: ")
        assert "\n" not in str(refused.value)


@each("value", [Runs, lambda ran: sparse()])
def test_the_command_ends_in_one_line_and_writes_nothing(value, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "t5"}')
    torch.save({"shared.weight": value(tmp_path / "ran")}, model / "pytorch_model.bin")
    line = refused_here(2, "pretrain", "import", model, tmp_path / "out")
    assert line.startswith(f"error: {model}/pytorch_model.bin: shared.weight is made by ")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_file_that_ends_early_is_damaged(tmp_path):
    torch.save({"a": MATRIX}, tmp_path / "a.bin")
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:-100])
    with pytest.raises(FailedError, match=r"a\.bin: damaged: "):
        torch_file.read(tmp_path / "a.bin")
