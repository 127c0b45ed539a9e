"""libdsec, the client library: `_async` by hand, `_sync` generated from it, one transport seam."""
