//! A file system of a few read-only files, as the kernel speaks it (`fuse.h`, host byte order).
//!
//! What asks is code nobody trusts, behind a kernel that checks rights: whatever comes is answered at
//! once, from fixed names and a bounded text, or with an error. Nothing is kept between requests.

use rustix::io::Errno;
use std::io;
use std::os::fd::AsFd;

/// A file there is: its name in the file system, and the file inside it takes the place of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum File {
    Memory,
    Processors,
    Statistics,
    Online,
    Uptime,
    Load,
}

pub(crate) const FILES: [(File, &str, &str); 6] = [
    (File::Memory, "meminfo", "/proc/meminfo"),
    (File::Processors, "cpuinfo", "/proc/cpuinfo"),
    (File::Statistics, "stat", "/proc/stat"),
    (File::Online, "online", "/sys/devices/system/cpu/online"),
    (File::Uptime, "uptime", "/proc/uptime"),
    (File::Load, "loadavg", "/proc/loadavg"),
];

const ROOT: u64 = 1;
/// The number of the first file; the others follow in order.
const FIRST: u64 = 2;
/// The least the kernel accepts to read into; only writes would need more.
const BUFFER: usize = 8192;
const MAX_WRITE: u32 = 4096;
/// The most that one read is answered with, whatever it asks for.
const MAX_READ: usize = 1 << 20;
/// Names never change, seconds.
const FOR_EVER: u64 = 1 << 31;
const DIRECT_IO: u32 = 1;
const NO_FLUSH: u32 = 1 << 5;
const IN_HEADER: usize = 40;

/// Requests that are answered; all others are not known here.
mod opcode {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const INIT: u32 = 26;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const DESTROY: u32 = 38;
    pub(super) const BATCH_FORGET: u32 = 42;
}

/// Answer one waiting request; false when there is none. An error is the end of the connection.
pub(crate) fn serve(device: impl AsFd, text: impl FnOnce(File) -> String) -> io::Result<bool> {
    let mut request = [0; BUFFER];
    let length = match rustix::io::read(&device, &mut request) {
        Ok(length) => length,
        // One that was taken back while it was read.
        Err(Errno::NOENT | Errno::INTR) => return Ok(true),
        Err(Errno::AGAIN) => return Ok(false),
        Err(errno) => return Err(errno.into()),
    };
    if let Some(answer) = answer(request.get(..length).unwrap_or_default(), text) {
        // Refused if nobody waits for it any more.
        let _ = rustix::io::write(&device, &answer);
    }
    Ok(true)
}

/// The answer to a request, if it wants one.
fn answer(request: &[u8], text: impl FnOnce(File) -> String) -> Option<Vec<u8>> {
    let header = Fields(request);
    let unique = header.u64_at(8)?;
    let (code, node) = (header.u32_at(4)?, header.u64_at(16)?);
    let body = Fields(request.get(IN_HEADER..).unwrap_or_default());
    let answered = match code {
        opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => return None,
        opcode::INIT => greet(&body),
        opcode::LOOKUP => look_up(body.0),
        opcode::GETATTR => {
            let size = file(node).map_or(0, |file| text(file).len());
            attributes(node, size).map(|found| words(&[0, 0]).also(&found))
        }
        opcode::OPEN => file(node).map(|_| open()),
        opcode::READ => file(node).and_then(|file| read(&body, &text(file))),
        opcode::STATFS => Ok(vec![0; 80]),
        opcode::RELEASE | opcode::DESTROY => Ok(Vec::new()),
        _ => Err(Errno::NOSYS),
    };
    Some(frame(unique, answered))
}

fn frame(unique: u64, answered: Result<Vec<u8>, Errno>) -> Vec<u8> {
    let (error, body) = match answered {
        Ok(body) => (0, body),
        Err(errno) => (-errno.raw_os_error(), Vec::new()),
    };
    let length = u32::try_from(16 + body.len()).unwrap_or(16);
    let mut whole = Vec::with_capacity(16 + body.len());
    whole.extend(length.to_ne_bytes());
    whole.extend(error.to_ne_bytes());
    whole.extend(unique.to_ne_bytes());
    whole.extend(body);
    whole
}

/// Protocol 7.31, from Linux 5.4 on; newer kernels come down to it. None of the extras.
fn greet(body: &Fields<'_>) -> Result<Vec<u8>, Errno> {
    let (Some(7), Some(minor)) = (body.u32_at(0), body.u32_at(4)) else {
        return Err(Errno::PROTO);
    };
    let mut out = [7, minor.min(31), 0, 0, 0, MAX_WRITE, 1].map(u32::to_ne_bytes).concat();
    out.resize(64, 0);
    Ok(out)
}

fn look_up(name: &[u8]) -> Result<Vec<u8>, Errno> {
    let name = name.strip_suffix(b"\0").ok_or(Errno::IO)?;
    let place = FILES.iter().position(|(_, known, _)| known.as_bytes() == name);
    let node = FIRST + place.and_then(|place| u64::try_from(place).ok()).ok_or(Errno::NOENT)?;
    Ok(words(&[node, 0, FOR_EVER, 0, 0]).also(&attributes(node, 0)?))
}

fn file(node: u64) -> Result<File, Errno> {
    let place = node.checked_sub(FIRST).and_then(|place| usize::try_from(place).ok());
    place.and_then(|place| FILES.get(place)).map(|(file, ..)| *file).ok_or(Errno::ACCESS)
}

/// Every read comes here: what they say changes.
fn open() -> Vec<u8> {
    words(&[0]).also(&[DIRECT_IO | NO_FLUSH, 0].map(u32::to_ne_bytes).concat())
}

/// `struct fuse_attr`. It is asked for with every opening, so that the size is that of the text then:
/// `sendfile` gives no more than that.
fn attributes(node: u64, size: usize) -> Result<Vec<u8>, Errno> {
    let (mode, links) = if node == ROOT {
        (libc::S_IFDIR | 0o555, 2)
    } else {
        file(node)?;
        (libc::S_IFREG | 0o444, 1)
    };
    let size = u64::try_from(size).unwrap_or(0);
    let start = words(&[node, size, 0, 0, 0, 0]);
    let rest = [0, 0, 0, mode, links, 0, 0, 0, 4096, 0].map(u32::to_ne_bytes).concat();
    Ok(start.also(&rest))
}

fn read(body: &Fields<'_>, text: &str) -> Result<Vec<u8>, Errno> {
    let (Some(offset), Some(size)) = (body.u64_at(8), body.u32_at(16)) else {
        return Err(Errno::IO);
    };
    let size = usize::try_from(size).unwrap_or(MAX_READ).min(MAX_READ);
    let start = usize::try_from(offset).unwrap_or(usize::MAX).min(text.len());
    let end = start.saturating_add(size).min(text.len());
    Ok(text.as_bytes().get(start..end).unwrap_or_default().to_vec())
}

/// A connection to the kernel, to be mounted; who opens it must be in the mount's user namespace.
pub(crate) fn open_device(path: &str) -> io::Result<std::os::fd::OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

fn words(values: &[u64]) -> Vec<u8> {
    values.iter().copied().flat_map(u64::to_ne_bytes).collect()
}

trait Also {
    fn also(self, more: &[u8]) -> Self;
}

impl Also for Vec<u8> {
    fn also(mut self, more: &[u8]) -> Self {
        self.extend(more);
        self
    }
}

/// Numbers in a message that may be shorter than it should be.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn u32_at(&self, at: usize) -> Option<u32> {
        let bytes = self.0.get(at..at + 4)?;
        bytes.try_into().ok().map(u32::from_ne_bytes)
    }

    fn u64_at(&self, at: usize) -> Option<u64> {
        let bytes = self.0.get(at..at + 8)?;
        bytes.try_into().ok().map(u64::from_ne_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(code: u32, node: u64, body: &[u8]) -> Vec<u8> {
        let mut request = vec![0; IN_HEADER];
        request[4..8].copy_from_slice(&code.to_ne_bytes());
        request[8..16].copy_from_slice(&77_u64.to_ne_bytes());
        request[16..24].copy_from_slice(&node.to_ne_bytes());
        request.extend(body);
        answer(&request, |file| format!("{file:?} is this")).unwrap_or_default()
    }

    fn error(answer: &[u8]) -> Option<i32> {
        answer.get(4..8)?.try_into().ok().map(i32::from_ne_bytes)
    }

    fn read_body(offset: u64, size: u32) -> Vec<u8> {
        [words(&[0, offset]), size.to_ne_bytes().to_vec()].concat()
    }

    #[test]
    fn a_file_is_found_and_read_in_pieces() {
        let found = ask(opcode::LOOKUP, ROOT, b"cpuinfo\0");
        assert_eq!(found.len(), 16 + 128);
        assert_eq!(Fields(&found).u64_at(16), Some(FIRST + 1));
        assert_eq!(&ask(opcode::READ, FIRST + 1, &read_body(0, 10))[16..], b"Processors");
        assert_eq!(&ask(opcode::READ, FIRST + 1, &read_body(10, 100))[16..], b" is this");
        assert_eq!(&ask(opcode::READ, FIRST + 1, &read_body(u64::MAX, u32::MAX))[16..], b"");
    }

    #[test]
    fn answers_have_the_kernels_sizes() {
        assert_eq!(ask(opcode::INIT, 0, &[7, 0, 0, 0, 45, 0, 0, 0]).len(), 16 + 64);
        assert_eq!(ask(opcode::GETATTR, ROOT, &[0; 16]).len(), 16 + 104);
        let size = Fields(&ask(opcode::GETATTR, FIRST, &[0; 16])).u64_at(16 + 16 + 8);
        assert_eq!(size, Some(u64::try_from("Memory is this".len()).unwrap_or(0)));
        assert_eq!(ask(opcode::OPEN, FIRST, &[0; 8]).len(), 16 + 16);
        assert_eq!(ask(opcode::STATFS, ROOT, &[]).len(), 16 + 80);
    }

    #[test]
    fn nothing_else_is_there_whatever_is_asked() {
        assert_eq!(error(&ask(opcode::LOOKUP, ROOT, b"../../etc/shadow\0")), Some(-libc::ENOENT));
        assert_eq!(error(&ask(opcode::LOOKUP, ROOT, b"stat")), Some(-libc::EIO));
        for node in [0, ROOT, FIRST + 6, u64::MAX] {
            assert_eq!(error(&ask(opcode::READ, node, &read_body(0, 1))), Some(-libc::EACCES));
        }
        assert_eq!(error(&ask(opcode::READ, FIRST, &[0; 7])), Some(-libc::EIO));
        for code in [4, 8, 16, 39, 43, 9999, u32::MAX] {
            assert_eq!(error(&ask(code, FIRST, &[0; 64])), Some(-libc::ENOSYS), "{code}");
        }
        assert_eq!(answer(&[0; 12], |_| String::new()), None);
    }
}
