"""The only Python that talks to the kernel: syscalls, mounts, cgroups, processes. Synchronous.

Raises OSError naming call and path. Knows no sandbox.
"""
