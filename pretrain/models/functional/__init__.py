"""Functions of tensors that the models call, in the forms that save memory and time on each device."""
