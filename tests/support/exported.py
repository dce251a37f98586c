"""Models of random weights beside transformers' models of the same weights."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from data_pipeline.base.atomic import write_json
from pretrain.export import hf_model_of, to_hf
from pretrain.models.model import Model


def randomise(model: Any, std: float = 0.15) -> Any:
    """Draws weights that all matter: vectors, such as gains, lie around their values at the start."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = std * torch.randn_like(parameter)
            parameter.copy_(drawn if parameter.dim() > 1 else parameter + drawn)
    return model.eval()


def in_transformers(model: Model, directory: Path) -> Any:
    """Writes `model` as its export would, without a tokenizer, and loads that by transformers, which misses nothing."""
    import transformers  # takes seconds

    exported = to_hf(hf_model_of(model.config), model.config, model.state_dict())
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", exported.config)
    write_json(directory / "generation_config.json", exported.generation_config or {})
    tensors = {name: tensor.contiguous() for name, tensor in exported.tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    kind = getattr(transformers, exported.config["architectures"][0])
    loaded, report = kind.from_pretrained(directory, output_loading_info=True, attn_implementation="eager")
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return loaded.eval()


def pairs_of_gradients(model: Model, reference: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Our gradient and theirs of each of transformers' parameters that has one. The conversion only renames.

    T5Gemma 2's vector for the end of an image is left out: no text has that token.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    known = {name: one.grad.cpu() for name, one in parameters.items() if one.grad is not None}
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    gradients = {name: known.get(name, torch.zeros_like(tensor)) for name, tensor in state.items()}
    ours = to_hf(hf_model_of(model.config), model.config, gradients).tensors
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    return {name: (ours[name], gradient) for name, gradient in theirs.items() if not name.endswith("eoi_embedding")}


def assert_gradients_agree(model: Model, reference: Any) -> None:
    """transformers gives the row of padding no gradient as an input, so that row is left out."""
    modules = {f"{name}.weight": module for name, module in reference.named_modules()}
    for name, (ours, theirs) in pairs_of_gradients(model, reference).items():
        if (row := getattr(modules.get(name), "padding_idx", None)) is not None:
            ours, theirs = (torch.cat([one[:row], one[row + 1 :]]) for one in (ours, theirs))
        largest = float(theirs.abs().max())
        if name.endswith(("k_proj.bias", "key.bias", ".k.bias")) and largest < 1e-6:
            assert float(ours.abs().max()) < 1e-6, name
            continue  # the softmax cancels a bias of keys that are not rotated
        assert largest > 1e-6, f"{name}: a comparison of zeros"
        assert float((ours - theirs).abs().max()) < 1e-4 * largest, name
