"""Controllers of cgroup v2: what is written, what is read. Pure but for `usage`."""
