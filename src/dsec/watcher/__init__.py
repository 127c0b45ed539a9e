"""Polls edges; lost nodes, leases, drift. Empty until there are many edges."""
