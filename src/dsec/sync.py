"""The synchronous SDK: the names of `dsec`, without `await`."""

from dsec.sdk.sync import (
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
