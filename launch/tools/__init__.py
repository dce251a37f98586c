"""Tools before a launch: `init` writes the first files, `doctor` checks the machines."""
