"""Starting and supervising runs: one machine, hosts, SLURM."""
