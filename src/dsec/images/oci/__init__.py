"""OCI and Docker images: found in archives, layouts and registries, their layers made directories.

`archive.py` finds out what a file is, `source.py` reads manifests and blobs and checks their
digests, `extract.py` is the child process in which a layer's tar becomes a directory,
`registry.py` pulls through skopeo.
"""
