"""Controllers of cgroup v1: what is written, what is read. Pure but for `usage`."""
