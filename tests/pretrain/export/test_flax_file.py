"""Flax's files: the tensors that transformers 4 would have loaded into PyTorch, read without Flax."""

import json
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data_pipeline.base.errors import FailedError, UserError
from pretrain.export import flax_file, load_state
from pretrain.models import build
from tests.conftest import TOP
from tests.support.in_process import refused_here
from tests.support.tables import each

BY_FLAX = TOP / "tests/data/flax"  # models that transformers 4.57.6 saved, with the logits that Flax computed
DRAWS = np.random.default_rng(0)
MATRIX = DRAWS.normal(size=(3, 4)).astype(np.float32)


def array(values: np.ndarray, dtype: str | None = None, code: int = 1) -> msgpack.ExtType:
    """As flax.serialization writes an array."""
    parts = values.shape, dtype or values.dtype.name, values.tobytes()
    return msgpack.ExtType(code, msgpack.packb(parts, use_bin_type=True))


def chunked(values: np.ndarray, size: int) -> dict:
    """As flax.serialization writes an array of more than 1 GiB, in arrays of `size` elements."""
    flat = values.reshape(-1)
    pieces = [flat[start : start + size] for start in range(0, flat.size, size)]
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(i): length for i, length in enumerate(values.shape)},
        "chunks": {str(i): array(piece) for i, piece in enumerate(pieces)},
    }


def saved(path: Path, tree: object) -> Path:
    path.write_bytes(msgpack.packb(tree, strict_types=True))
    return path


@each("name", ["t5-v1.0", "t5-v1.1", "mt5", "bart"])
def test_a_model_that_flax_saved_computes_the_same(name):
    config, state = load_state(BY_FLAX / name)
    model = build(config).eval()
    model.load_state_dict(state)
    theirs = load_file(BY_FLAX / name / "by_flax.safetensors")
    with torch.no_grad():
        logits = model.decode(theirs["decoder_inputs"], model.encode(theirs["inputs"]))
    assert theirs["logits"].std() > 0.1
    torch.testing.assert_close(logits, theirs["logits"], rtol=0, atol=2e-5)


def test_shards_are_those_of_the_index(tmp_path):
    """A shard has no tree, but the whole name of each array."""
    whole = BY_FLAX / "mt5"
    _, expected = load_state(whole)
    tree = msgpack.unpackb((whole / "flax_model.msgpack").read_bytes())

    def flat(branch, above):
        for key, value in branch.items():
            yield from flat(value, [*above, key]) if isinstance(value, dict) else [("/".join([*above, key]), value)]

    leaves = list(flat(tree, []))
    files = [f"flax_model-0000{number}-of-00003.msgpack" for number in (1, 2, 3)]
    for number, name in enumerate(files):
        saved(tmp_path / name, dict(leaves[number::3]))
    weight_map = {key: files[i % 3] for i, (key, _) in enumerate(leaves)}
    (tmp_path / "flax_model.msgpack.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    _, found = load_state(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    (tmp_path / files[1]).unlink()
    with pytest.raises(UserError, match=r"00002-of-00003\.msgpack: no such file, but flax_model\.msgpack\.index\.json"):
        load_state(tmp_path)


def test_names_and_matrices_become_pytorchs(tmp_path):
    bias, ids = MATRIX[0], np.arange(4)
    tree = {
        "layer": {"kernel": array(MATRIX), "bias": array(bias)},
        "norm": {"scale": array(bias), "bias": array(bias)},
        "t5_norm": {"weight": array(bias)},
        "table": {"embedding": array(MATRIX)},
        "position_ids": array(ids),
        "scalar": array(np.float32(0.5), code=3),
    }
    found = flax_file.read(saved(tmp_path / "a", tree))
    expected = {
        "layer.weight": MATRIX.T,
        **dict.fromkeys(["layer.bias", "norm.weight", "norm.bias", "t5_norm.weight"], bias),
        "table.weight": MATRIX,
        "position_ids": ids,
        "scalar": np.float32(0.5),
    }
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name].numpy(), values) for name, values in expected.items())
    assert all(tensor.is_contiguous() for tensor in found.values())


def test_each_type_of_floating_point_number_is_read_as_it_is(tmp_path):
    exact = torch.from_numpy(MATRIX).double() + 1e-12
    tree = {str(dtype): exact.to(dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16)}
    written = {
        name: array(
            one.view(torch.int16).numpy() if one.dtype == torch.bfloat16 else one.numpy(), name[len("torch.") :]
        )
        for name, one in tree.items()
    }
    found = flax_file.read(saved(tmp_path / "a", written))
    assert all(torch.equal(found[name], one) for name, one in tree.items())


@each("shape", [(1000, 3), (7, 2, 11), (5,), (1,), (0, 4), ()])
@each("block", [1, 64, 1 << 24])
def test_arrays_of_any_shape_are_whole_whatever_is_read_at_a_time(shape, block, tmp_path, monkeypatch):
    """In one piece, and in chunks of 1, 5 and 10,000 elements, which end within rows; as a matrix and its transpose."""
    monkeypatch.setattr(flax_file, "_BLOCK", block)
    values = DRAWS.normal(size=shape).astype(np.float32)
    forms = [array(values), *(chunked(values, size) for size in (1, 5, 10_000) if values.size)]
    for form in forms:
        for kind in ("kernel", "bias"):
            (found,) = flax_file.read(saved(tmp_path / "a", {"layer": {kind: form}})).values()
            expected = values.T if kind == "kernel" and values.ndim == 2 else values
            assert np.array_equal(found.numpy(), expected)


@each(
    "value, why",
    [
        (msgpack.ExtType(2, msgpack.packb((1.0, 2.0))), "a/b is a complex number, expected an array"),
        (msgpack.ExtType(9, b"x"), "a/b is an extension of type 9, expected an array"),
        (array(MATRIX, "float8_e4m3fn"), "a/b is an array of float8_e4m3fn, expected an array"),
        (array(MATRIX, "object"), "a/b is an array of object, expected an array"),
        (3, "a/b is a number, expected an array"),
        ("text", "a/b is a text, expected an array"),
        ([1, 2], "a/b is a list, expected an array"),
        (b"bytes", "a/b is a byte string, expected an array"),
        (None, "a/b is of MessagePack's type 0xc0, expected an array"),
        (0.5, "a/b is of MessagePack's type 0xcb, expected an array"),
    ],
)
def test_what_is_no_array_is_refused_by_its_name(value, why, tmp_path):
    path = saved(tmp_path / "model.msgpack", {"a": {"first": array(MATRIX), "b": value}})
    with pytest.raises(UserError) as refused:
        flax_file.read(path)
    assert str(refused.value) == f"{path}: {why}"
    assert refused.value.exit_code == 2


def test_a_damaged_file_is_one_line(tmp_path):
    whole = saved(tmp_path / "whole", {"a": {"kernel": array(MATRIX)}, "b": chunked(MATRIX, 5)}).read_bytes()
    wrong_shape = msgpack.ExtType(1, msgpack.packb(((3, 5), "float32", MATRIX.tobytes())))
    huge = msgpack.ExtType(1, msgpack.packb(((2**40, 2**40), "float32", MATRIX.tobytes())))
    longer = msgpack.ExtType(1, msgpack.packb((MATRIX.shape, "float32", MATRIX.tobytes())) + b"x")
    both = {"a": {"kernel": array(MATRIX), "weight": array(MATRIX)}}
    contents = [whole[:end] for end in range(0, len(whole), 7)]
    contents += [msgpack.packb(tree) for tree in ({"a": wrong_shape}, {"a": huge}, {"a": longer}, both, {3: 4})]
    contents += [b"\x81\xa1a" * 100_000, b"\xdf\xff\xff\xff\xff", b"\x81\xdb\xff\xff\xff\xff"]
    for content in contents:
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(FailedError) as refused:
            flax_file.read(tmp_path / "a")
        assert str(refused.value).startswith(f"{tmp_path}/a: damaged: ")
        assert "\n" not in str(refused.value)


def test_the_command_ends_in_one_line_and_writes_nothing(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "t5"}')
    saved(model / "flax_model.msgpack", {"shared": {"embedding": "evil\n"}})
    line = refused_here(2, "pretrain", "import", model, tmp_path / "out")
    assert line == f"error: {model}/flax_model.msgpack: shared/embedding is a text, expected an array"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
