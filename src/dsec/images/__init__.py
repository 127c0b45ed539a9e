"""Bytes in, mountable layers out: OCI import, EROFS layers, composition. Knows no sandbox, no API."""
