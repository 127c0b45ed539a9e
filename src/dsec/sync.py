"""The synchronous SDK: the names of `dsec`, without `await`."""

from dsec.sdk.sync import (
    Branch,
    Command,
    CommandFailed,
    DSecClient,
    DSecContainerRunArgs,
    ExecResult,
    FileInfo,
    GitTree,
    Sandbox,
    SandboxTree,
    Session,
    Steps,
)

__all__ = [
    "Branch",
    "Command",
    "CommandFailed",
    "DSecClient",
    "DSecContainerRunArgs",
    "ExecResult",
    "FileInfo",
    "GitTree",
    "Sandbox",
    "SandboxTree",
    "Session",
    "Steps",
]
