"""The filler over HTTP: the table of routes of spec/filler.md."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from dsec.base.clock import Clock
from dsec.images.lazy.filler import Filler
from dsec.kit.http import LateJson, Ndjson, Route, json_response, make_app, read_body
from dsec.wire.filler import (
    DataEvent,
    DataOpened,
    FillerStatus,
    OpenData,
    Prefetch,
    Recording,
    RecordingStarted,
    StartRecording,
)

MAX_PREFETCH_BYTES = 512 << 10
"""It is decoded on the loop that serves readers."""


class FillerApi:
    """Handlers."""

    def __init__(self, filler: Filler, shut_down: Callable[[], None]) -> None:
        """Serve for a filler.

        Args:
            filler: the core.
            shut_down: ends the process in order; returns at once.
        """
        self._filler = filler
        self._shut_down = shut_down

    async def status(self, _request: Request) -> Response:
        """Look at it."""
        return json_response(self._filler.status())

    async def open(self, request: Request) -> LateJson:
        """Serve a device."""
        body = await read_body(request, OpenData)
        return LateJson(lambda: self._filler.open(body))

    async def close(self, request: Request) -> Response:
        """Serve it no more."""
        await self._filler.close(request.path_params["digest"])
        return Response(status_code=204)

    async def prefetch(self, request: Request) -> Response:
        """Fetch ahead."""
        self._filler.prefetch(await read_body(request, Prefetch, MAX_PREFETCH_BYTES))
        return Response(status_code=202)

    async def start_recording(self, request: Request) -> LateJson:
        """Show devices whose reads are written down."""
        body = await read_body(request, StartRecording)
        return LateJson(lambda: self._filler.start_recording(body))

    async def recording(self, request: Request) -> Response:
        """What was read so far."""
        return json_response(self._filler.recording(request.path_params["id"]))

    async def end_recording(self, request: Request) -> Response:
        """Take its devices away."""
        await self._filler.end_recording(request.path_params["id"])
        return Response(status_code=204)

    async def events(self, _request: Request) -> Ndjson:
        """Hear of devices that fail or work again."""
        return Ndjson(self._filler.events())

    async def shut_down(self, _request: Request) -> Response:
        """End worker and keeper."""
        self._shut_down()
        return Response(status_code=202)


def make_filler_app(filler: Filler, shut_down: Callable[[], None], clock: Clock) -> ASGIApp:
    """The application.

    Args:
        filler: the core.
        shut_down: ends the process in order; returns at once.
        clock: measures requests.
    """
    api = FillerApi(filler, shut_down)
    return make_app(routes(api), clock)


def routes(api: FillerApi) -> list[Route]:
    """The table."""
    return [
        Route(
            method="GET",
            path="/v1/status",
            handler=api.status,
            summary="The filler as it stands",
            answer=FillerStatus,
        ),
        Route(
            method="PUT",
            path="/v1/data",
            handler=api.open,
            summary="Serve a device",
            body=OpenData,
            answer=DataOpened,
        ),
        Route(
            method="DELETE",
            path="/v1/data/{digest}",
            handler=api.close,
            summary="Serve it no more",
            status=204,
        ),
        Route(
            method="POST",
            path="/v1/prefetch",
            handler=api.prefetch,
            summary="Fetch ahead",
            body=Prefetch,
            status=202,
        ),
        Route(
            method="POST",
            path="/v1/recordings",
            handler=api.start_recording,
            summary="Record what is read",
            body=StartRecording,
            answer=RecordingStarted,
        ),
        Route(
            method="GET",
            path="/v1/recordings/{id}",
            handler=api.recording,
            summary="What was read so far",
            answer=Recording,
        ),
        Route(
            method="DELETE",
            path="/v1/recordings/{id}",
            handler=api.end_recording,
            summary="End a recording",
            status=204,
        ),
        Route(
            method="GET",
            path="/v1/events",
            handler=api.events,
            summary="Devices that fail or work again",
            answer=DataEvent,
            media_type="application/x-ndjson",
        ),
        Route(
            method="POST",
            path="/v1/shutdown",
            handler=api.shut_down,
            summary="End worker and keeper",
            status=202,
        ),
    ]
