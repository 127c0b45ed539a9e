//! `tar_out`: a tree as one tar stream. Every step into it is relative to a descriptor.

use super::{Answer, Channel, Entries, Request, Stop};
use crate::serve::proto::{pack, Refusal};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use tar::{Builder, EntryType, Header};

/// The archive as DATA. Once it has failed nothing more goes out: neither what was still to go, nor
/// the end that dropping a `Builder` writes, which would have a part pass for all of it.
struct Outgoing<'a> {
    channel: &'a Channel,
    failed: &'a Cell<bool>,
}

impl Write for Outgoing<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.failed.get() {
            return Ok(bytes.len());
        }
        let part = bytes.get(..bytes.len().min(128 * 1024)).unwrap_or(&[]);
        self.channel.data(part)?;
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A file that has changed its size since its header was written still fills exactly that size.
struct Exactly<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Exactly<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let want = usize::try_from(self.left).unwrap_or(usize::MAX).min(into.len());
        let Some(into) = into.get_mut(..want) else { return Ok(0) };
        let mut size = self.inner.read(into)?;
        if size == 0 {
            into.fill(0);
            size = want;
        }
        self.left -= u64::try_from(size).unwrap_or(0);
        Ok(size)
    }
}

struct Packer<'a> {
    out: Builder<BufWriter<Outgoing<'a>>>,
    entries: u64,
    /// First name of every file that has more than one.
    links: HashMap<(u64, u64), PathBuf>,
}

fn header_of(stat: &Stat, kind: EntryType, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(stat.st_mode & 0o7777);
    header.set_uid(u64::from(stat.st_uid));
    header.set_gid(u64::from(stat.st_gid));
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
    header.set_size(size);
    header
}

impl Packer<'_> {
    /// One name in a directory, and all below it.
    fn add(&mut self, dir: BorrowedFd<'_>, name: &OsStr, path: &Path) -> io::Result<()> {
        let stat = match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            // Gone since the directory was read.
            Err(Errno::NOENT) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        self.entries += 1;
        match kind {
            FileType::Directory => {
                let mut header = header_of(&stat, EntryType::Directory, 0);
                self.out.append_data(&mut header, path, io::empty())?;
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let fd = rustix::fs::openat(dir, name, flags, Mode::empty())?;
                self.add_below(&fd, path)
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(dir, name, Vec::new())?;
                let mut header = header_of(&stat, EntryType::Symlink, 0);
                self.out.append_link(&mut header, path, OsStr::from_bytes(target.to_bytes()))
            }
            FileType::RegularFile => self.add_file(dir, name, path, &stat),
            FileType::Fifo => {
                let mut header = header_of(&stat, EntryType::Fifo, 0);
                self.out.append_data(&mut header, path, io::empty())
            }
            // Sockets mean nothing elsewhere; devices cannot be made again inside.
            _ => {
                self.entries -= 1;
                Ok(())
            }
        }
    }

    fn add_file(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &OsStr,
        path: &Path,
        stat: &Stat,
    ) -> io::Result<()> {
        if stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&(stat.st_dev, stat.st_ino)) {
                let mut header = header_of(stat, EntryType::Link, 0);
                return self.out.append_link(&mut header, path, first);
            }
            self.links.insert((stat.st_dev, stat.st_ino), path.to_path_buf());
        }
        // Not a FIFO put in its place meanwhile: that would wait.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = File::from(rustix::fs::openat(dir, name, flags, Mode::empty())?);
        let left = u64::try_from(stat.st_size).unwrap_or(0);
        let mut header = header_of(stat, EntryType::Regular, left);
        self.out.append_data(&mut header, path, Exactly { inner: file, left })
    }

    fn add_below(&mut self, dir: &OwnedFd, path: &Path) -> io::Result<()> {
        let mut names = Vec::new();
        for entry in Dir::read_from(dir)? {
            let entry = entry?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                names.push(OsStr::from_bytes(entry.file_name().to_bytes()).to_owned());
            }
        }
        names.sort_unstable();
        for name in names {
            self.add(dir.as_fd(), &name, &path.join(&name))?;
        }
        Ok(())
    }
}

pub(super) fn tar_out(request: &Request, channel: &Channel) -> Answer {
    let path = request.path();
    let shown = path.as_os_str().as_bytes();
    let failed = Cell::new(false);
    let fail = |e: io::Error| {
        failed.set(true);
        match e.raw_os_error() {
            Some(libc::EPIPE) => Stop::Abandoned,
            _ => Refusal::file("tar_out", shown, &e).into(),
        }
    };
    let meta = path.metadata().map_err(fail)?;
    let outgoing = Outgoing { channel, failed: &failed };
    let out = Builder::new(BufWriter::with_capacity(128 * 1024, outgoing));
    let mut packer = Packer { out, entries: 0, links: HashMap::new() };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    if meta.is_dir() {
        let dir = rustix::fs::open(&path, flags, Mode::empty()).map_err(|e| fail(e.into()))?;
        packer.add_below(&dir, Path::new("")).map_err(fail)?;
    } else {
        let parent = path.parent().unwrap_or(Path::new("/"));
        let dir = rustix::fs::open(parent, flags, Mode::empty()).map_err(|e| fail(e.into()))?;
        let name = path.file_name().unwrap_or(OsStr::new(""));
        packer.add(dir.as_fd(), name, Path::new(name)).map_err(fail)?;
    }
    let entries = packer.entries;
    let mut out = packer.out.into_inner().map_err(fail)?;
    out.flush().map_err(fail)?;
    Ok(pack(&Entries { entries }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shrunken_file_fills_its_size() {
        let mut out = Vec::new();
        let mut reader = Exactly { inner: &b"abc"[..], left: 6 };
        assert_eq!(reader.read_to_end(&mut out).ok(), Some(6));
        assert_eq!(out, b"abc\0\0\0");
        let mut out = Vec::new();
        let mut reader = Exactly { inner: &b"abcdef"[..], left: 2 };
        assert_eq!(reader.read_to_end(&mut out).ok(), Some(2));
    }
}
