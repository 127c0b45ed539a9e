"""`python -m dsec.main.gen`: writes what is generated from the code into `spec/` and `docs/`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dsec.apiserver.app import Apiserver
from dsec.control.edges import Edges
from dsec.control.stores import Stores
from dsec.edge.server import EDGE_ROUTES
from dsec.images.lint.reference import reference
from dsec.main.parts import CLOCK
from dsec.store.memory import MemoryClaims, MemoryDirectory, MemoryLeases

_ROOT = Path(__file__).parents[3]
FILE = _ROOT / "spec" / "openapi" / "public-v1.json"
LINT_RULES = _ROOT / "docs" / "reference" / "lint-rules.md"
API_VERSION = "1"
"""Of the description; the program's own would make the file change with every release."""


def public_openapi() -> bytes:
    """The description of the public API, as it is checked in."""
    server = Apiserver(
        Edges([], CLOCK),
        Stores(MemoryDirectory(CLOCK), MemoryClaims(CLOCK), MemoryLeases()),
        CLOCK,
        API_VERSION,
        EDGE_ROUTES,
    )
    plain = msgspec.json.encode(server.description, order="sorted")
    return msgspec.json.format(plain, indent=1) + b"\n"


def main() -> None:
    """Write the files."""
    for file, content in ((FILE, public_openapi()), (LINT_RULES, reference().encode())):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        print(file)


if __name__ == "__main__":
    main()
