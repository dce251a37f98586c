"""The description of a checkpoint, index.json, and the names of its directory: what is refused, and in which words."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.base.errors import MissingPackage, UserError
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint import rank_file
from pretrain.engine.checkpoint.directory import candidates, checkpoint_directory, put_back, set_aside
from pretrain.engine.checkpoint.index import File, Index, selected
from pretrain.run.train_state import TrainState
from tests.support.small_runs import T5
from tests.support.tables import each

OF_TWO_RANKS = [f"{rank_file(rank)}.{suffix}" for rank in range(2) for suffix in ("json", "safetensors")]


def index_of(names: list[str] = OF_TWO_RANKS, family_from: str = "", **identity: Any) -> Index:
    """The index of step 3 of a run on two ranks, with files of these names."""
    return Index(
        train_state=TrainState(step=3, position=48, skipped=[]),
        consumed=[48],
        config_fingerprint="0" * 64,
        identity={"model": T5, **identity},
        world_size=2,
        zero_stage=1,
        files={name: File(1, "0" * 64) for name in names},
        family_from=family_from,
    )


@each("missing", OF_TWO_RANKS)
def test_an_index_lists_two_files_of_each_rank(missing):
    assert index_of().step == 3
    with pytest.raises(ValueError, match=rf"^files: {missing} is missing, and world_size is 2$"):
        index_of([name for name in OF_TWO_RANKS if name != missing])


@each("family", [3, None, ["t5"]])
def test_a_family_that_is_no_name_is_refused(family):
    with pytest.raises(ValueError, match=r"^identity\.model\.family: expected a name, got ") as refused:
        index_of(model={**T5, "family": family})
    assert str(refused.value).endswith(repr(family))
    assert not isinstance(refused.value, MissingPackage)


def test_settings_that_a_family_lacks_are_damage_or_of_another_version_of_its_package():
    """A checkpoint of a family that ships names no package. What a package wrote, another version may not know."""
    model = {**T5, "d_model": "wide"}
    with pytest.raises(ValueError, match=r"^identity\.model\.d_model: ") as refused:
        index_of(model=model)
    assert not isinstance(refused.value, MissingPackage)
    with pytest.raises(MissingPackage, match=r"^identity\.model\.d_model: .* in .*it was families 1\.0; install that$"):
        index_of(model=model, family_from="families 1.0")


def test_of_a_section_of_another_kind_the_kind_alone_is_told():
    """Keys of other sections are told, too."""
    index = index_of(optimizer={"name": "muon", "momentum": 0.9}, seed=1)
    whole = {**index.identity, "model": index.model.model_dump()}
    other = {**whole, "optimizer": {"name": "adamw", "betas": [0.9, 0.99]}, "seed": 2}
    told = index.differences(other)
    assert ["optimizer.name is 'muon' there, 'adamw' here" in told[0], "seed is 1 there, 2 here" in told[1]] == [
        True
    ] * 2
    assert len(told) == 2
    same = {**whole, "optimizer": {"name": "muon", "momentum": 0.8}}
    assert ["optimizer.momentum is 0.9 there, 0.8 here" in one for one in index.differences(same)] == [True]


def test_a_model_of_transformers_is_no_checkpoint_and_can_be_imported(tmp_path):
    no_checkpoint = f"{tmp_path}: not a checkpoint: no index.json"
    with pytest.raises(UserError) as refused:
        checkpoint_index.read(tmp_path)
    assert str(refused.value) == no_checkpoint
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError) as refused:
        checkpoint_index.read(tmp_path)
    way_out = f"but a model of transformers; pretrain import {tmp_path} OUT makes a checkpoint"
    assert str(refused.value) == f"{no_checkpoint}, {way_out}"


def test_what_is_written_is_read_back(tmp_path):
    index = replace(index_of(seed=1), weights="1" * 32)
    index.write(tmp_path)
    assert checkpoint_index.read(tmp_path) == index


@each("ranks", [2, 4, 8])
def test_each_rank_verifies_one_large_file(ranks):
    """The checkpoint was written by as many ranks, and has a tokenizer beside the ranks' files."""
    sizes = {"json": 100, "safetensors": 10**6}
    files = {f"{rank_file(rank)}.{suffix}": size for rank in range(ranks) for suffix, size in sizes.items()}
    sized = {name: File(size, "0" * 64) for name, size in {**files, "tokenizer.json": 10**4}.items()}
    index = replace(index_of(), world_size=ranks, files=sized)
    shares = [selected(index, slice(rank, None, ranks)) for rank in range(ranks)]
    assert sorted(name for share in shares for name in share) == sorted(index.files)
    assert [[name for name in share if name.endswith(".safetensors")] for share in shares] == [
        [f"{rank_file(rank)}.safetensors"] for rank in range(ranks)
    ]


def test_an_unsound_checkpoint_is_set_aside_and_replaces_an_earlier_one_of_its_step(tmp_path):
    directory = checkpoint_directory(tmp_path, 3)

    def saved(content: str) -> Path:
        directory.mkdir(parents=True)
        (directory / content).write_text(content)
        return set_aside(directory)

    for content in ("first", "second"):
        aside = saved(content)
        assert aside == directory.with_name("unsound-step-00000003")
        assert [path.name for path in aside.iterdir()] == [content]
        assert candidates(tmp_path) == ([], None)
    directory.mkdir()
    put_back(aside, directory)
    assert [path.name for path in directory.iterdir()] == ["second"]
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]
