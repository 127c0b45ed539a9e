//! `stat`, `listdir`, `mkdir`, `move`, `remove`.

use super::{gone, info_of, Answer, Channel, FileInfo, Request, Stop};
use crate::serve::proto::{pack, Refusal};
use crate::serve::users::Accounts;
use rustix::fs::{AtFlags, Dir, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use serde::Serialize;
use serde_bytes::ByteBuf;
use std::ffi::CString;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

pub(super) fn stat(request: &Request, accounts: &Accounts) -> Answer {
    let path = request.path();
    if !request.args.follow.unwrap_or(false) {
        return info_of(&path, accounts, None);
    }
    let shown = path.as_os_str().as_bytes();
    let meta = path.metadata().map_err(|e| Refusal::file("stat", shown, &e))?;
    Ok(pack(&FileInfo::new(shown, &meta, None, accounts)))
}

#[derive(Debug, Serialize)]
struct Count {
    count: u64,
}

#[derive(Debug, Serialize)]
struct Removed {
    removed: u64,
}

/// Entries collected until there are enough for an event.
struct Batch<'a> {
    channel: &'a Channel,
    entries: Vec<ByteBuf>,
    bytes: usize,
    count: u64,
}

impl Batch<'_> {
    fn add(&mut self, info: Vec<u8>) -> Result<(), Stop> {
        self.count += 1;
        self.bytes += info.len();
        self.entries.push(ByteBuf::from(info));
        if self.bytes > 32 * 1024 {
            self.flush()
        } else {
            Ok(())
        }
    }

    fn flush(&mut self) -> Result<(), Stop> {
        if self.entries.is_empty() {
            return Ok(());
        }
        // {"entries": [info, ...]} around what is packed already.
        let count = u32::try_from(self.entries.len()).unwrap_or(0);
        let mut event = vec![0x81, 0xa7];
        event.extend_from_slice(b"entries");
        event.push(0xdd);
        event.extend_from_slice(&count.to_be_bytes());
        for info in self.entries.drain(..) {
            event.extend_from_slice(&info);
        }
        self.bytes = 0;
        self.channel.send(crate::frame::Kind::Event, &event).map_err(gone)
    }
}

pub(super) fn list(request: &Request, channel: &Channel, accounts: &Accounts) -> Answer {
    let path = request.path();
    let depth = request.args.depth.unwrap_or(1);
    if depth == 0 {
        return Err(Refusal::invalid("depth must be at least 1").into());
    }
    let shown = path.as_os_str().as_bytes();
    let mut batch = Batch { channel, entries: Vec::new(), bytes: 0, count: 0 };
    let first = fs::read_dir(&path).map_err(|e| Refusal::file("listdir", shown, &e))?;
    let mut open = vec![first];
    while let Some(dir) = open.last_mut() {
        let Some(entry) = dir.next() else {
            open.pop();
            continue;
        };
        let entry = entry.map_err(|e| Refusal::file("listdir", shown, &e))?;
        // What is gone by now is not there.
        let Ok(meta) = entry.metadata() else { continue };
        let path = entry.path();
        let target = meta.is_symlink().then(|| path.read_link().ok()).flatten();
        let target = target.as_ref().map(|t| t.as_os_str().as_bytes());
        batch.add(pack(&FileInfo::new(path.as_os_str().as_bytes(), &meta, target, accounts)))?;
        if meta.is_dir() && open.len() < usize::try_from(depth).unwrap_or(usize::MAX) {
            // One that may not be read is listed, its contents are not.
            open.extend(fs::read_dir(&path));
        }
    }
    batch.flush()?;
    Ok(pack(&Count { count: batch.count }))
}

pub(super) fn make_dir(request: &Request, accounts: &Accounts) -> Answer {
    let path = request.path();
    let shown = path.as_os_str().as_bytes();
    let mode = request.args.mode.unwrap_or(0o755) & 0o7777;
    let parents = request.args.parents.unwrap_or(false);
    if parents {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(|e| Refusal::file("mkdir", shown, &e))?;
        }
    }
    match fs::DirBuilder::new().mode(mode).create(&path) {
        Ok(()) => {
            // Whatever the umask has taken away.
            let _ = rustix::fs::chmod(&path, Mode::from_raw_mode(mode));
        }
        Err(_) if parents && path.is_dir() => {}
        Err(error) => return Err(Refusal::file("mkdir", shown, &error).into()),
    }
    info_of(&path, accounts, None)
}

pub(super) fn rename(request: &Request, accounts: &Accounts) -> Answer {
    let path = request.path();
    let Some(to) = &request.args.to else { return Err(Refusal::invalid("to is needed").into()) };
    let to = request.absolute(to);
    let overwrite = request.args.overwrite.unwrap_or(true);
    let flags = if overwrite { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
    let done = rustix::fs::renameat_with(rustix::fs::CWD, &path, rustix::fs::CWD, &to, flags);
    done.map_err(|e| Refusal::file("move", path.as_os_str().as_bytes(), &e.into()))?;
    info_of(&to, accounts, None)
}

/// A directory opened without following anything, and the name in it.
fn parent_of(path: &Path) -> Result<(OwnedFd, CString), Refusal> {
    let shown = path.as_os_str().as_bytes();
    let name = path.file_name().ok_or_else(|| Refusal::invalid("it has no name").path(shown))?;
    let name =
        CString::new(name.as_bytes()).map_err(|_| Refusal::invalid("path holds a NUL byte"))?;
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    let parent = parent.map_or_else(|| PathBuf::from("/"), Path::to_path_buf);
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(&parent, flags, Mode::empty());
    Ok((fd.map_err(|e| Refusal::file("open", shown, &e.into()))?, name))
}

pub(super) fn remove(request: &Request) -> Answer {
    let path = request.path();
    let shown = path.as_os_str().as_bytes();
    if path.file_name().is_none() {
        return Err(Refusal::invalid("it cannot be removed").path(shown).into());
    }
    let (parent, name) = parent_of(&path)?;
    let recursive = request.args.recursive.unwrap_or(false);
    let mut removed = 0;
    let done = remove_at(parent.as_fd(), &name, recursive, &mut removed);
    done.map_err(|e| Refusal::file("remove", shown, &e.into()))?;
    Ok(pack(&Removed { removed }))
}

fn remove_at(
    dir: rustix::fd::BorrowedFd<'_>,
    name: &CString,
    recursive: bool,
    removed: &mut u64,
) -> Result<(), Errno> {
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) => {
            *removed += 1;
            return Ok(());
        }
        // A directory, says Linux; POSIX would have it EPERM.
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(errno) => return Err(errno),
    }
    if recursive {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(dir, name, flags, Mode::empty())?;
        let mut names = Vec::new();
        for entry in Dir::read_from(&fd)? {
            let entry = entry?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                names.push(entry.file_name().to_owned());
            }
        }
        for name in names {
            match remove_at(fd.as_fd(), &name, true, removed) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno),
            }
        }
    }
    rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR)?;
    *removed += 1;
    Ok(())
}
