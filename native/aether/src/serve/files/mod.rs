//! File methods, inside a worker: blocking code, ordinary calls, the user's own permissions.

mod pax;
mod tar_in;
mod tar_out;
mod transfer;
mod tree;
mod watch;

use super::proto::{pack, FileArgs, Refusal};
use super::users::Accounts;
use crate::frame::{self, Kind};
use serde::Serialize;
use serde_bytes::Bytes;
use std::cell::{Cell, RefCell};
use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The answer of both archive methods.
#[derive(Debug, Serialize)]
struct Entries {
    entries: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    Read,
    Write,
    Stat,
    ListDir,
    MakeDir,
    Move,
    Remove,
    Watch,
    TarOut,
    TarIn,
    Processes,
}

pub(super) fn method(name: &str) -> Option<Method> {
    Some(match name {
        "read" => Method::Read,
        "write" => Method::Write,
        "stat" => Method::Stat,
        "listdir" => Method::ListDir,
        "mkdir" => Method::MakeDir,
        "move" => Method::Move,
        "remove" => Method::Remove,
        "watch" => Method::Watch,
        "tar_out" => Method::TarOut,
        "tar_in" => Method::TarIn,
        "processes" => Method::Processes,
        _ => return None,
    })
}

#[derive(Debug)]
pub(super) struct Request {
    pub(super) method: Method,
    /// What relative paths are relative to.
    pub(super) base: Vec<u8>,
    pub(super) args: FileArgs,
}

impl Request {
    fn absolute(&self, path: &[u8]) -> PathBuf {
        Path::new(OsStr::from_bytes(&self.base)).join(OsStr::from_bytes(path))
    }

    fn path(&self) -> PathBuf {
        self.absolute(&self.args.path)
    }
}

/// The worker's end of the socket. When it is closed, nobody wants the work any more.
#[derive(Debug)]
pub(super) struct Channel {
    socket: File,
    ended: Cell<bool>,
    /// Events that wait for more to go with them.
    waiting: RefCell<Vec<u8>>,
}

impl Channel {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket: File::from(socket), ended: Cell::new(false), waiting: RefCell::default() }
    }

    fn send(&self, kind: Kind, payload: &[u8]) -> io::Result<()> {
        let mut waiting = self.waiting.borrow_mut();
        if payload.len() < 4096 {
            frame::push(&mut waiting, kind, 0, frame::MAIN, payload);
        } else {
            waiting.extend_from_slice(&frame::header(kind, 0, frame::MAIN, payload.len()));
        }
        let rest = if payload.len() < 4096 { &[][..] } else { payload };
        let parts = [IoSlice::new(&waiting), IoSlice::new(rest)];
        let sent = (&self.socket).write_vectored(&parts)?;
        if let Some(unsent) = waiting.get(sent..) {
            (&self.socket).write_all(unsent)?;
            (&self.socket).write_all(rest)?;
        } else {
            (&self.socket).write_all(rest.get(sent - waiting.len()..).unwrap_or(&[]))?;
        }
        waiting.clear();
        Ok(())
    }

    fn event(&self, value: &impl Serialize) -> io::Result<()> {
        self.send(Kind::Event, &pack(value))
    }

    /// An event that may wait for `flush`.
    fn queue(&self, value: &impl Serialize) -> io::Result<()> {
        let mut waiting = self.waiting.borrow_mut();
        frame::push(&mut waiting, Kind::Event, 0, frame::MAIN, &pack(value));
        if waiting.len() < 32 * 1024 {
            return Ok(());
        }
        drop(waiting);
        self.flush()
    }

    fn flush(&self) -> io::Result<()> {
        let mut waiting = self.waiting.borrow_mut();
        (&self.socket).write_all(&waiting)?;
        waiting.clear();
        Ok(())
    }

    fn data(&self, bytes: &[u8]) -> io::Result<()> {
        self.send(Kind::Data, bytes)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The next DATA; an empty answer at END, an error when the stream was given up before.
    fn receive(&self, buffer: &mut Vec<u8>) -> io::Result<()> {
        buffer.clear();
        let mut socket = &self.socket;
        while buffer.is_empty() && !self.ended.get() {
            let mut head = [0; frame::HEADER];
            socket.read_exact(&mut head)?;
            let header = frame::parse(&head).ok().flatten();
            let header = header.ok_or_else(|| io::Error::from_raw_os_error(libc::EPROTO))?;
            buffer.resize(header.size, 0);
            socket.read_exact(buffer)?;
            self.ended.set(header.kind == Kind::End);
        }
        Ok(())
    }
}

/// Why work stopped: something to tell, or nobody left to tell.
pub(super) enum Stop {
    Refused(Refusal),
    Abandoned,
}

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// An error on the channel itself: its other end is closed.
fn gone(_: io::Error) -> Stop {
    Stop::Abandoned
}

/// In the child: do it, answer, return.
pub(super) fn work(request: &Request, channel: &Channel, accounts: &Accounts) {
    let answer = match request.method {
        Method::Read => transfer::read(request, channel, accounts),
        Method::Write => transfer::write(request, channel, accounts),
        Method::Stat => tree::stat(request, accounts),
        Method::ListDir => tree::list(request, channel, accounts),
        Method::MakeDir => tree::make_dir(request, accounts),
        Method::Move => tree::rename(request, accounts),
        Method::Remove => tree::remove(request),
        Method::Watch => watch::watch(request, channel),
        Method::TarOut => tar_out::tar_out(request, channel),
        Method::TarIn => tar_in::tar_in(request, channel),
        Method::Processes => super::processes::list(channel),
    };
    let _ = match answer {
        Ok(payload) => channel.send(Kind::Result, &payload),
        Err(Stop::Refused(refusal)) => channel.send(Kind::Error, &pack(&refusal)),
        Err(Stop::Abandoned) => Ok(()),
    };
}

pub(super) type Answer = Result<Vec<u8>, Stop>;

pub(super) fn send_more(channel: &Channel, value: &impl Serialize) -> Result<(), Stop> {
    channel.event(value).map_err(gone)
}

/// The keys of `dsec.wire.sandbox.FileInfo`.
#[derive(Debug, Serialize)]
struct FileInfo<'a> {
    path: &'a Bytes,
    kind: &'static str,
    size_bytes: u64,
    mode: u32,
    uid: u32,
    gid: u32,
    user: String,
    group: String,
    mtime: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<&'a Bytes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sha256: Option<String>,
}

fn kind_of(meta: &Metadata) -> &'static str {
    let kind = meta.file_type();
    if kind.is_file() {
        "file"
    } else if kind.is_dir() {
        "dir"
    } else if kind.is_symlink() {
        "symlink"
    } else if kind.is_fifo() {
        "fifo"
    } else if kind.is_socket() {
        "socket"
    } else if kind.is_char_device() {
        "char"
    } else {
        "block"
    }
}

fn seconds(meta: &Metadata) -> f64 {
    let at = meta.modified().ok();
    let since = |t: std::time::SystemTime| match t.duration_since(std::time::UNIX_EPOCH) {
        Ok(after) => after.as_secs_f64(),
        Err(before) => -before.duration().as_secs_f64(),
    };
    at.map_or(0.0, since)
}

impl<'a> FileInfo<'a> {
    fn new(path: &'a [u8], meta: &Metadata, target: Option<&'a [u8]>, accounts: &Accounts) -> Self {
        Self {
            path: Bytes::new(path),
            kind: kind_of(meta),
            size_bytes: if meta.is_dir() { 0 } else { meta.len() },
            mode: meta.mode() & 0o7777,
            uid: meta.uid(),
            gid: meta.gid(),
            user: accounts.user_name(meta.uid()),
            group: accounts.group_name(meta.gid()),
            mtime: seconds(meta),
            target: target.map(Bytes::new),
            sha256: None,
        }
    }
}

/// A file info of a path, not following a symbolic link at its end.
fn info_of(path: &Path, accounts: &Accounts, sha256: Option<String>) -> Answer {
    let shown = path.as_os_str().as_bytes();
    let meta = path.symlink_metadata().map_err(|e| Refusal::file("stat", shown, &e))?;
    let target = meta.is_symlink().then(|| path.read_link().ok()).flatten();
    let target = target.as_ref().map(|t| t.as_os_str().as_bytes());
    let mut info = FileInfo::new(shown, &meta, target, accounts);
    info.sha256 = sha256;
    Ok(pack(&info))
}
