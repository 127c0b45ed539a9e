"""EROFS images: made by mkfs.erofs, mounted from the file by `dsec.linux.mounts`."""
