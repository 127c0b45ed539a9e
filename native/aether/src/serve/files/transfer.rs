//! `read` and `write`.

use super::{gone, info_of, Answer, Channel, FileInfo, Request, Stop};
use crate::serve::proto::{pack, Refusal, CONFLICT};
use crate::serve::users::Accounts;
use rustix::fs::{Access, AtFlags, Gid, Mode, OFlags, ResolveFlags, Uid, CWD};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{self, File, Metadata};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

#[derive(Debug, Serialize)]
struct Sent {
    bytes: u64,
}

pub(super) fn read(request: &Request, channel: &Channel, accounts: &Accounts) -> Answer {
    let path = request.path();
    let shown = path.as_os_str().as_bytes();
    let fail = |step: &'static str| move |e: std::io::Error| Refusal::file(step, shown, &e);
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
    let mut file = open_at_once(&path, flags, Mode::empty()).map_err(fail("open"))?;
    let meta = file.metadata().map_err(fail("stat"))?;
    if meta.is_dir() {
        return Err(Refusal::invalid("it is a directory").path(shown).into());
    }
    if !meta.is_file() && request.args.length.is_none() {
        return Err(Refusal::invalid("not a regular file: length is needed").path(shown).into());
    }
    if meta.file_type().is_fifo() {
        // Asked for by its length: who reads so wants to wait for a writer.
        let waited = rustix::fs::open(&path, flags, Mode::empty());
        file = File::from(waited.map_err(|e| fail("open")(e.into()))?);
    }
    channel.event(&FileInfo::new(shown, &meta, None, accounts)).map_err(gone)?;
    if let Some(offset) = request.args.offset.filter(|o| *o > 0) {
        file.seek(SeekFrom::Start(offset)).map_err(fail("seek"))?;
    }
    let mut left = request.args.length.unwrap_or(u64::MAX);
    let mut bytes = 0;
    let mut buffer = vec![0; 128 * 1024];
    while left > 0 {
        let want = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let size = file.read(buffer.get_mut(..want).unwrap_or(&mut [])).map_err(fail("read"))?;
        if size == 0 {
            break;
        }
        channel.data(buffer.get(..size).unwrap_or(&[])).map_err(gone)?;
        let size = u64::try_from(size).unwrap_or(0);
        bytes += size;
        left -= size;
    }
    Ok(pack(&Sent { bytes }))
}

/// Where a write to `path` ends up: symbolic links at its end are followed, also dangling ones.
fn destination(path: PathBuf) -> Result<PathBuf, Refusal> {
    let mut path = path;
    for _ in 0..40 {
        let is_link = path.symlink_metadata().is_ok_and(|m| m.is_symlink());
        if !is_link {
            return Ok(path);
        }
        let target = path.read_link();
        let target =
            target.map_err(|e| Refusal::file("readlink", path.as_os_str().as_bytes(), &e))?;
        path = path.parent().unwrap_or(Path::new("/")).join(target);
    }
    let error = std::io::Error::from_raw_os_error(libc::ELOOP);
    Err(Refusal::file("open", path.as_os_str().as_bytes(), &error))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

pub(super) fn write(request: &Request, channel: &Channel, accounts: &Accounts) -> Answer {
    let args = &request.args;
    let path = destination(request.path())?;
    let shown = path.as_os_str().as_bytes().to_vec();
    let fail = |step: &'static str| {
        let shown = &shown;
        move |e: std::io::Error| Refusal::file(step, shown, &e)
    };
    if args.parents.unwrap_or(false) {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(fail("mkdir"))?;
        }
    }
    if args.path.ends_with(b"/") {
        return Err(Refusal::invalid("it is a directory's name").path(&shown).into());
    }
    let old = path.symlink_metadata().ok();
    if old.as_ref().is_some_and(Metadata::is_dir) {
        return Err(Refusal::invalid("it is a directory").path(&shown).into());
    }
    if old.is_some() {
        // Replacing asks the directory; writing asks the file too.
        let access =
            rustix::fs::accessat(rustix::fs::CWD, &path, Access::WRITE_OK, AtFlags::empty());
        access.map_err(|e| fail("open")(e.into()))?;
    }
    let append = args.append.unwrap_or(false);
    let regular = old.as_ref().is_none_or(Metadata::is_file);
    let me = rustix::process::geteuid().as_raw();
    let ours = old.as_ref().is_none_or(|m| me == 0 || m.uid() == me);
    let digest = if args.atomic.unwrap_or(true) && regular && ours && !append {
        replace(request, channel, &path, old.as_ref())?
    } else {
        write_through(request, channel, &path)?
    };
    info_of(&path, accounts, Some(digest))
}

fn receive_all(
    channel: &Channel,
    file: &mut File,
    mut wrong: impl FnMut(std::io::Error) -> Refusal,
) -> Result<String, Stop> {
    let mut digest = Sha256::new();
    let mut buffer = Vec::new();
    loop {
        channel.receive(&mut buffer).map_err(gone)?;
        if buffer.is_empty() {
            return Ok(hex(&digest.finalize()));
        }
        digest.update(&buffer);
        file.write_all(&buffer).map_err(&mut wrong)?;
    }
}

fn check(request: &Request, digest: &str, shown: &[u8]) -> Result<(), Refusal> {
    match &request.args.sha256 {
        Some(wanted) if !wanted.eq_ignore_ascii_case(digest) => {
            Err(Refusal::new(CONFLICT, format!("its sha256 is {digest}"))
                .kind("sha256")
                .path(shown))
        }
        _ => Ok(()),
    }
}

/// Removes what is half written.
struct Temporary(Option<PathBuf>);

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(path) = self.0.take() {
            let _ = fs::remove_file(path);
        }
    }
}

/// A hidden name beside a path, for what is not whole yet.
pub(super) fn temporary_name(path: &Path) -> PathBuf {
    let name = path.file_name().map_or(&b""[..], |n| n.as_bytes());
    let name = name.get(..name.len().min(200)).unwrap_or(b"");
    let unique = format!(".{:016x}.part", crate::serve::random());
    path.with_file_name(OsString::from_vec([b".", name, unique.as_bytes()].concat()))
}

fn replace(
    request: &Request,
    channel: &Channel,
    path: &Path,
    old: Option<&Metadata>,
) -> Result<String, Stop> {
    let shown = path.as_os_str().as_bytes();
    let fail = |step: &'static str| move |e: std::io::Error| Refusal::file(step, shown, &e);
    let name = temporary_name(path);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = rustix::fs::open(&name, flags, Mode::from_raw_mode(0o600));
    let mut file = File::from(fd.map_err(|e| fail("create")(e.into()))?);
    let mut temporary = Temporary(Some(name.clone()));
    let digest = receive_all(channel, &mut file, fail("write"))?;
    check(request, &digest, shown)?;
    if let Some(old) = old {
        let (uid, gid) = (Uid::from_raw(old.uid()), Gid::from_raw(old.gid()));
        // A group the user is not in cannot be given; the file stays the user's own.
        let _ = rustix::fs::fchown(&file, Some(uid), Some(gid));
    }
    let mode = request.args.mode.or(old.map(MetadataExt::mode)).unwrap_or(0o644) & 0o7777;
    rustix::fs::fchmod(&file, Mode::from_raw_mode(mode)).map_err(|e| fail("chmod")(e.into()))?;
    if request.args.sync.unwrap_or(false) {
        file.sync_all().map_err(fail("sync"))?;
    }
    fs::rename(&name, path).map_err(fail("rename"))?;
    temporary.0 = None;
    Ok(digest)
}

/// Into the file as it is: appended, a device, a FIFO, or somebody else's that may be written.
fn write_through(request: &Request, channel: &Channel, path: &Path) -> Result<String, Stop> {
    let shown = path.as_os_str().as_bytes();
    let fail = |step: &'static str| move |e: std::io::Error| Refusal::file(step, shown, &e);
    let mut flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOCTTY;
    flags |= if request.args.append.unwrap_or(false) { OFlags::APPEND } else { OFlags::TRUNC };
    let mode = Mode::from_raw_mode(request.args.mode.unwrap_or(0o644) & 0o7777);
    let mut file = open_at_once(path, flags, mode).map_err(fail("open"))?;
    let digest = receive_all(channel, &mut file, fail("write"))?;
    if request.args.mode.is_some() {
        rustix::fs::fchmod(&file, mode).map_err(|e| fail("chmod")(e.into()))?;
    }
    if request.args.sync.unwrap_or(false) {
        file.sync_all().map_err(fail("sync"))?;
    }
    check(request, &digest, shown)?;
    Ok(digest)
}

/// Open without waiting for the other end of a FIFO: without a reader it is refused (ENXIO), without
/// a writer it is at its end. What is read and written afterwards may wait as usual.
///
/// Never a file of this process itself: its memory map and its program are not the sandbox's.
fn open_at_once(path: &Path, flags: OFlags, mode: Mode) -> std::io::Result<File> {
    let flags = flags | OFlags::NONBLOCK;
    let fd = rustix::fs::openat2(CWD, path, flags, mode, ResolveFlags::NO_MAGICLINKS)?;
    let place = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new())?;
    let own = format!("/proc/{}/", std::process::id());
    if place.to_bytes().starts_with(own.as_bytes()) {
        return Err(std::io::Error::from_raw_os_error(libc::EACCES));
    }
    let status = rustix::fs::fcntl_getfl(&fd)?;
    rustix::fs::fcntl_setfl(&fd, status - OFlags::NONBLOCK)?;
    Ok(File::from(fd))
}
