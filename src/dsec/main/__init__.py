"""Composition roots, one per process, and the all-in-one."""
