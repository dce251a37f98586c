"""Documents that contain an item of an evaluation set: how items are read, and found."""
