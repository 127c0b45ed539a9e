"""What the tables of an edge's public routes have in common."""

from __future__ import annotations

from dsec.edge.service import EdgeService


class Handlers:
    """Handlers of one table."""

    def __init__(self, service: EdgeService | None) -> None:
        """Serve for an edge; without one the handlers are only there to be described."""
        self._service = service

    @property
    def service(self) -> EdgeService:
        """The edge."""
        assert self._service is not None  # noqa: S101 - a description serves nobody
        return self._service
