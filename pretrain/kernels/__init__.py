"""Fast products and GPU kernels in Triton, each beside the plain form that defines it, mostly in `pretrain.models`."""
