"""libdsec, the client library: `_async` by hand, `_sync` generated from it, one transport seam.

Knows the public API (dsec.wire) and nothing behind it. Start reading at `_async/client.py`; calls
and retries are in `_async/call.py`, the seam in `_async/transport.py`, networks behind it in
`_aiohttp.py` and `_urllib3.py`.
"""

from dsec.sdk._answers import error_of
from dsec.sdk._async.branch import Branch
from dsec.sdk._async.client import DSecClient
from dsec.sdk._async.command import Command, CommandEvents
from dsec.sdk._async.environments import Environments
from dsec.sdk._async.files import Files, FileStream, ResponseStream, Watch
from dsec.sdk._async.images import ImageEvents, Images
from dsec.sdk._async.jobs import Jobs
from dsec.sdk._async.layers import LayerEvents, Layers
from dsec.sdk._async.lines import LineStream
from dsec.sdk._async.progress import ProgressStream
from dsec.sdk._async.replay import Replay
from dsec.sdk._async.sandbox import Batch, Sandbox, Steps
from dsec.sdk._async.session import Session
from dsec.sdk._async.snapshots import Snapshots
from dsec.sdk._async.state import Trajectory
from dsec.sdk._async.store import SharedStore
from dsec.sdk._async.transport import PortStream, Response, Transport
from dsec.sdk._http import ConnectionFailed, Request
from dsec.sdk._tar import Unpacked
from dsec.sdk._version import VERSION
from dsec.sdk.models import (
    CommandFailed,
    DSecContainerRunArgs,
    ExecResult,
    FileInfo,
    Progress,
    TextDecoder,
    WatchEvent,
)
from dsec.sdk.sources import GitTree, SandboxTree

__all__ = [
    "VERSION",
    "Batch",
    "Branch",
    "Command",
    "CommandEvents",
    "CommandFailed",
    "ConnectionFailed",
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
    "Progress",
    "ProgressStream",
    "Replay",
    "Request",
    "Response",
    "ResponseStream",
    "Sandbox",
    "SandboxTree",
    "Session",
    "SharedStore",
    "Snapshots",
    "Steps",
    "TextDecoder",
    "Trajectory",
    "Transport",
    "Unpacked",
    "Watch",
    "WatchEvent",
    "error_of",
]
