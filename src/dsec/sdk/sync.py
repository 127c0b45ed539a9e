"""The same client without `await`: `from dsec.sync import DSecClient`."""

from dsec.sdk._sync.branch import Branch
from dsec.sdk._sync.client import DSecClient
from dsec.sdk._sync.command import Command, CommandEvents
from dsec.sdk._sync.environments import Environments
from dsec.sdk._sync.files import Files, FileStream, ResponseStream, Watch
from dsec.sdk._sync.images import ImageEvents, Images
from dsec.sdk._sync.jobs import Jobs
from dsec.sdk._sync.layers import LayerEvents, Layers
from dsec.sdk._sync.lines import LineStream
from dsec.sdk._sync.progress import ProgressStream
from dsec.sdk._sync.replay import Replay
from dsec.sdk._sync.sandbox import Batch, Sandbox, Steps
from dsec.sdk._sync.session import Session
from dsec.sdk._sync.snapshots import Snapshots
from dsec.sdk._sync.state import Trajectory
from dsec.sdk._sync.store import SharedStore
from dsec.sdk._sync.transport import PortStream, Response, Transport
from dsec.sdk.models import CommandFailed, DSecContainerRunArgs, ExecResult, FileInfo
from dsec.sdk.sources import GitTree, SandboxTree

__all__ = [
    "Batch",
    "Branch",
    "Command",
    "CommandEvents",
    "CommandFailed",
    "DSecClient",
    "DSecContainerRunArgs",
    "Environments",
    "ExecResult",
    "FileInfo",
    "FileStream",
    "Files",
    "GitTree",
    "ImageEvents",
    "Images",
    "Jobs",
    "LayerEvents",
    "Layers",
    "LineStream",
    "PortStream",
    "ProgressStream",
    "Replay",
    "Response",
    "ResponseStream",
    "Sandbox",
    "SandboxTree",
    "Session",
    "SharedStore",
    "Snapshots",
    "Steps",
    "Trajectory",
    "Transport",
    "Watch",
]
