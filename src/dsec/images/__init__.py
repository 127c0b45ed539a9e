"""Bytes in, mountable layers out: OCI import, EROFS layers, composition. Knows no sandbox, no API.

Start reading at `service.py` (what the edge calls), then `layers.py` (what is on disk) and
`convert.py` (how foreign bytes become a layer safely). Formats left on disk are in
spec/formats.md.
"""
