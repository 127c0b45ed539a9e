"""Bytes in, mountable layers out: OCI import, EROFS layers, composition. Knows no sandbox, no API.

Start reading at `service.py` (what the edge calls), then `layers.py` (what is on disk) and
`oci/extract.py` (how a foreign tar becomes a directory safely). Formats left on disk are in
spec/formats.md.
"""
