//! `tar_in`: a tar stream into a tree. Every step is relative to a descriptor: names in the archive
//! and symbolic links in the tree decide nothing about where a file ends up outside of `path`.

use super::pax::PlainHeaders;
use super::transfer::temporary_name;
use super::{Answer, Channel, Entries, Request, Stop};
use crate::serve::proto::{pack, Refusal, UNSUPPORTED};
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, CWD,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use tar::{Archive, EntryType, Header};

/// The archive as it comes in.
struct Incoming<'a> {
    channel: &'a Channel,
    buffer: Vec<u8>,
    at: usize,
    abandoned: bool,
}

impl Read for Incoming<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.at >= self.buffer.len() {
            self.at = 0;
            if let Err(error) = self.channel.receive(&mut self.buffer) {
                self.abandoned = true;
                return Err(error);
            }
        }
        let rest = self.buffer.get(self.at..).unwrap_or(&[]);
        let size = rest.len().min(into.len());
        if let (Some(to), Some(from)) = (into.get_mut(..size), rest.get(..size)) {
            to.copy_from_slice(from);
        }
        self.at += size;
        Ok(size)
    }
}

/// The parts of an entry's name: nothing absolute, nothing upwards. None for the directory itself.
fn safe_name(name: &[u8]) -> Result<Option<(PathBuf, &OsStr)>, Refusal> {
    if name.starts_with(b"/") || name.contains(&0) {
        return Err(Refusal::invalid("an absolute name in the archive").path(name));
    }
    let mut parts = Vec::new();
    for part in name.split(|b| *b == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return Err(Refusal::invalid("'..' in a name in the archive").path(name)),
            part => parts.push(OsStr::from_bytes(part)),
        }
    }
    Ok(parts.pop().map(|last| (parts.iter().collect(), last)))
}

struct Unpacker {
    root: OwnedFd,
    resolve: ResolveFlags,
    is_root: bool,
    /// Directories get their modes and times last: first they must take their contents.
    dirs: Vec<(PathBuf, u32, u64)>,
}

impl Unpacker {
    fn open(&self, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let flags = flags | OFlags::CLOEXEC;
        rustix::fs::openat2(&self.root, path, flags, Mode::empty(), self.resolve)
    }

    /// The directory an entry goes into, made if it is missing.
    fn parent(&self, path: &Path) -> Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        match self.open(path, flags) {
            Err(Errno::NOENT) => {
                let above = self.parent(path.parent().unwrap_or(Path::new("")))?;
                if let Some(name) = path.file_name() {
                    match rustix::fs::mkdirat(&above, name, Mode::from_raw_mode(0o755)) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(errno) => return Err(errno),
                    }
                }
                self.open(path, flags)
            }
            opened => opened,
        }
    }

    fn own(&self, dir: &OwnedFd, name: &OsStr, header: &Header) -> io::Result<()> {
        if self.is_root {
            let id = |n: io::Result<u64>| {
                n.ok().and_then(|n| u32::try_from(n).ok()).filter(|n| *n < u32::MAX)
            };
            let (uid, gid) =
                (id(header.uid()).map(Uid::from_raw), id(header.gid()).map(Gid::from_raw));
            match rustix::fs::chownat(dir, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW) {
                // An id that does not exist in the sandbox: the file stays root's.
                Ok(()) | Err(Errno::INVAL) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn dated(dir: &OwnedFd, name: &OsStr, mtime: u64) {
        let at = Timespec { tv_sec: i64::try_from(mtime).unwrap_or(0), tv_nsec: 0 };
        let times = Timestamps { last_access: at, last_modification: at };
        let _ = rustix::fs::utimensat(dir, name, &times, AtFlags::SYMLINK_NOFOLLOW);
    }

    /// A file appears under its name whole or not at all.
    fn file(
        &self,
        dir: &OwnedFd,
        last: &OsStr,
        entry: &mut tar::Entry<'_, impl Read>,
    ) -> io::Result<()> {
        let header = entry.header().clone();
        let part = temporary_name(Path::new(last)).into_os_string();
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file =
            File::from(rustix::fs::openat(dir, &part, flags, Mode::from_raw_mode(0o600))?);
        let mode = header.mode().unwrap_or(0o644) & 0o7777;
        let size = entry.size();
        let filled = io::copy(entry, &mut file)
            .and_then(|copied| {
                // An archive that breaks off looks like a file's end to its reader.
                if copied == size {
                    Ok(())
                } else {
                    Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it ends within a file"))
                }
            })
            .and_then(|()| self.own(dir, &part, &header))
            .and_then(|()| Ok(rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))?))
            .and_then(|()| Ok(rustix::fs::renameat(dir, &part, dir, last)?));
        if filled.is_err() {
            let _ = rustix::fs::unlinkat(dir, &part, AtFlags::empty());
        }
        filled
    }

    fn entry(&mut self, entry: &mut tar::Entry<'_, impl Read>) -> Result<bool, Unpacked> {
        let name = entry.path_bytes().into_owned();
        let Some((parent, last)) = safe_name(&name)? else { return Ok(false) };
        let at = |e: io::Error| Unpacked::at(&name, e);
        let dir = self.parent(&parent).map_err(|e| at(e.into()))?;
        let header = entry.header().clone();
        let mode = header.mode().unwrap_or(0o644) & 0o7777;
        let mtime = header.mtime().unwrap_or(0);
        let kind = header.entry_type();
        let whole =
            matches!(kind, EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse);
        if !kind.is_dir() && !whole {
            match rustix::fs::unlinkat(&dir, last, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(at(errno.into())),
            }
        }
        match kind {
            EntryType::Directory => {
                match rustix::fs::mkdirat(&dir, last, Mode::from_raw_mode(0o700)) {
                    Ok(()) => {}
                    // One that is there is used; a link to one stays a link.
                    Err(Errno::EXIST) => {
                        let place = parent.join(last);
                        self.open(&place, OFlags::PATH | OFlags::DIRECTORY)
                            .map_err(|e| at(e.into()))?;
                    }
                    Err(errno) => return Err(at(errno.into())),
                }
                self.own(&dir, last, &header).map_err(at)?;
                self.dirs.push((parent.join(last), mode, mtime));
                return Ok(true);
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                self.file(&dir, last, entry).map_err(at)?;
            }
            EntryType::Symlink => {
                let target = entry.link_name_bytes().unwrap_or_default().into_owned();
                rustix::fs::symlinkat(OsStr::from_bytes(&target), &dir, last)
                    .map_err(|e| at(e.into()))?;
                self.own(&dir, last, &header).map_err(at)?;
            }
            EntryType::Link => {
                let target = entry.link_name_bytes().unwrap_or_default().into_owned();
                let Some((place, target)) = safe_name(&target)? else { return Ok(false) };
                let place = self
                    .open(&place, OFlags::PATH | OFlags::DIRECTORY)
                    .map_err(|e| at(e.into()))?;
                rustix::fs::linkat(&place, target, &dir, last, AtFlags::empty())
                    .map_err(|e| at(e.into()))?;
                return Ok(true);
            }
            EntryType::Fifo => {
                let node =
                    rustix::fs::mknodat(&dir, last, FileType::Fifo, Mode::from_raw_mode(mode), 0);
                node.map_err(|e| at(e.into()))?;
                self.own(&dir, last, &header).map_err(at)?;
            }
            EntryType::XGlobalHeader => return Ok(false),
            _ => {
                let refusal = Refusal::new(UNSUPPORTED, "a kind of file that cannot be made here");
                return Err(refusal.path(&name).into());
            }
        }
        Self::dated(&dir, last, mtime);
        Ok(true)
    }

    fn settle(&mut self) {
        for (path, mode, mtime) in std::mem::take(&mut self.dirs).into_iter().rev() {
            if let Ok(fd) = self.open(&path, OFlags::RDONLY | OFlags::DIRECTORY) {
                let at = Timespec { tv_sec: i64::try_from(mtime).unwrap_or(0), tv_nsec: 0 };
                let times = Timestamps { last_access: at, last_modification: at };
                let _ = rustix::fs::futimens(&fd, &times);
                let _ = rustix::fs::fchmod(&fd, Mode::from_raw_mode(mode));
            }
        }
    }
}

enum Unpacked {
    Refused(Refusal),
    Failed(io::Error),
}

impl Unpacked {
    fn at(name: &[u8], error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EXDEV) => {
                Self::Refused(Refusal::invalid("it leads out of the directory").path(name))
            }
            Some(_) => Self::Refused(Refusal::file("tar_in", name, &error)),
            None => Self::Failed(error),
        }
    }
}

impl From<Refusal> for Unpacked {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

pub(super) fn tar_in(request: &Request, channel: &Channel) -> Answer {
    let path = request.path();
    let shown = path.as_os_str().as_bytes();
    std::fs::create_dir_all(&path).map_err(|e| Refusal::file("tar_in", shown, &e))?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, &path, flags, Mode::empty());
    let root = root.map_err(|e| Refusal::file("tar_in", shown, &e.into()))?;
    // In the sandbox's own root an absolute link leads to where it says.
    let within = if path == Path::new("/") { ResolveFlags::IN_ROOT } else { ResolveFlags::BENEATH };
    let mut unpacker = Unpacker {
        root,
        resolve: within | ResolveFlags::NO_MAGICLINKS,
        is_root: rustix::process::geteuid().is_root(),
        dirs: Vec::new(),
    };
    let mut incoming = Incoming { channel, buffer: Vec::new(), at: 0, abandoned: false };
    let done = unpack(&mut unpacker, &mut incoming);
    unpacker.settle();
    match done {
        _ if incoming.abandoned => Err(Stop::Abandoned),
        Ok(entries) => {
            // Padding behind the archive's end.
            let _ = io::copy(&mut incoming, &mut io::sink());
            Ok(pack(&Entries { entries }))
        }
        Err(Unpacked::Refused(refusal)) => Err(refusal.into()),
        Err(Unpacked::Failed(error)) => {
            // The archive's own bytes may be in it: data of the sandbox's or the caller's, not text.
            let said: String =
                error.to_string().chars().filter(|c| matches!(c, ' '..='~')).take(120).collect();
            Err(Refusal::invalid(format!("not a tar archive: {said}")).into())
        }
    }
}

fn unpack(unpacker: &mut Unpacker, incoming: &mut Incoming<'_>) -> Result<u64, Unpacked> {
    let mut archive = Archive::new(PlainHeaders::new(incoming));
    let mut count = 0;
    for entry in archive.entries().map_err(Unpacked::Failed)? {
        let mut entry = entry.map_err(Unpacked::Failed)?;
        count += u64::from(unpacker.entry(&mut entry)?);
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Refused names are "!", the directory itself is "".
    fn name(bytes: &[u8]) -> String {
        match safe_name(bytes) {
            Err(_) => String::from("!"),
            Ok(None) => String::new(),
            Ok(Some((parent, last))) => parent.join(last).to_string_lossy().into_owned(),
        }
    }

    #[test]
    fn names_stay_below() {
        assert_eq!(name(b"a/b"), "a/b");
        assert_eq!(name(b"./a//./b/"), "a/b");
        assert_eq!(name(b"./"), "");
        assert_eq!(name(b""), "");
        assert_eq!(name(b"..a/b.."), "..a/b..");
        for bad in [&b"/etc/passwd"[..], b"../x", b"a/../../x", b"a/..", b"..", b"a\0b"] {
            assert_eq!(name(bad), "!", "{bad:?}");
        }
    }
}
