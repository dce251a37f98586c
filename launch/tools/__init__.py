"""What is used before a launch: the first files, and a check of the machines."""
