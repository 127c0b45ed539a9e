"""The node agent: admission, lifecycle, backends, snapshots. Never imports the control plane."""
