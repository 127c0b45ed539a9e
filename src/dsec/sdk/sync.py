"""The same client without `await`: `from dsec.sync import DSecClient`."""

from dsec.sdk._sync.client import Batch, DSecClient
from dsec.sdk._sync.command import Command, CommandEvents
from dsec.sdk._sync.files import Files, FileStream, ResponseStream, Watch
from dsec.sdk._sync.images import ImageEvents, Images
from dsec.sdk._sync.sandbox import Sandbox
from dsec.sdk._sync.session import Session
from dsec.sdk._sync.transport import PortStream, Response, Transport
from dsec.sdk.models import CommandFailed, DSecContainerRunArgs, ExecResult, FileInfo

__all__ = [
    "Batch",
    "Command",
    "CommandEvents",
    "CommandFailed",
    "DSecClient",
    "DSecContainerRunArgs",
    "ExecResult",
    "FileInfo",
    "FileStream",
    "Files",
    "ImageEvents",
    "Images",
    "PortStream",
    "Response",
    "ResponseStream",
    "Sandbox",
    "Session",
    "Transport",
    "Watch",
]
