"""Weights in shards, and weights of another type."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_pipeline.base.errors import UserError
from pretrain.engine.checkpoint import tensors
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.export import export, import_, load_state
from tests.support.in_process import done_here
from tests.support.large_tensors import LargeTensors
from tests.support.small_exports import new_bart
from tests.support.tables import each

transformers = pytest.importorskip("transformers")


def test_large_weights_are_written_in_shards(bart_tokenizer, tmp_path):
    model = new_bart(bart_tokenizer)
    export(model.state_dict(), model.config, bart_tokenizer, tmp_path / "out", shard_bytes=20_000)
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert shards == [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    assert len(shards) > 1
    loaded, report = transformers.BartForConditionalGeneration.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    _, state = load_state(tmp_path / "out")
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    (tmp_path / "out" / shards[1]).unlink()
    with pytest.raises(UserError, match=f"{shards[1]}: no such file, but model.safetensors.index.json names it"):
        load_state(tmp_path / "out")


@each("file", ["model.safetensors", "pytorch_model.bin"])
def test_an_import_of_bf16_converts_a_block_at_a_time(file, bart_tokenizer, tmp_path, monkeypatch):
    """No tensor in fp32 is larger than a block: the weights are mapped from the file until they are written."""
    model = new_bart(bart_tokenizer)
    export(model.state_dict(), model.config, bart_tokenizer, tmp_path / "out")
    stored = {name: one.bfloat16() for name, one in load_file(tmp_path / "out/model.safetensors").items()}
    (tmp_path / "out/model.safetensors").unlink()
    save = torch.save if file.endswith(".bin") else save_file
    save(stored, tmp_path / "out" / file)
    monkeypatch.setattr(tensors, "_BLOCK", 2048)
    assert max(tensor.nbytes for tensor in stored.values()) > 16_000
    with LargeTensors(2049) as watched:
        import_(tmp_path / "out", tmp_path / "imported")
    made = [one for one in watched.made.values() if one.device.type == "cpu" and one.dtype == torch.float32]
    assert [tuple(one.shape) for one in made] == []
    found = TrainedModel.open(tmp_path / "imported").model.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor.bfloat16().float()), name


def test_an_export_in_bf16_has_rounded_weights_and_is_imported_again(checkpoint, tmp_path):
    done_here("pretrain", "export", checkpoint, tmp_path / "fp32")
    done_here("pretrain", "export", checkpoint, tmp_path / "bf16", "--dtype", "bf16")
    whole, rounded = (load_file(tmp_path / name / "model.safetensors") for name in ("fp32", "bf16"))
    assert {one.dtype for one in whole.values()} == {torch.float32}
    assert whole.keys() == rounded.keys()
    assert all(torch.equal(rounded[name], one.bfloat16()) for name, one in whole.items())
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        saved = json.loads((tmp_path / name / "config.json").read_text())
        assert saved["dtype"] == str(dtype).removeprefix("torch.")
        assert transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name).dtype == dtype
    import_(tmp_path / "bf16", tmp_path / "imported")
    found, state = (TrainedModel.open(path).model.state_dict() for path in (tmp_path / "imported", checkpoint))
    assert all(torch.equal(found[name], one.bfloat16().float()) for name, one in state.items())
