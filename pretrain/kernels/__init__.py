"""GPU kernels in Triton, each beside the plain form in `pretrain.models` that defines it."""
