"""Functions of tensors with forward and backward passes of their own, for the memory and time that they save."""
