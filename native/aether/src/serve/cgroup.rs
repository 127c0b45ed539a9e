//! One cgroup v2 directory per command: who is in it cannot hide, and dies at one write.

use rustix::fs::{AtFlags, Mode, OFlags};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

#[derive(Debug)]
pub(super) struct Cgroup {
    name: String,
    dir: OwnedFd,
}

impl Cgroup {
    pub(super) fn create(work: &OwnedFd, name: String) -> io::Result<Self> {
        rustix::fs::mkdirat(work, &name, Mode::from_raw_mode(0o755))?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        match rustix::fs::openat(work, &name, flags, Mode::empty()) {
            Ok(dir) => Ok(Self { name, dir }),
            Err(errno) => {
                let _ = rustix::fs::unlinkat(work, &name, AtFlags::REMOVEDIR);
                Err(errno.into())
            }
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }

    fn open(&self, file: &str, flags: OFlags) -> io::Result<OwnedFd> {
        Ok(rustix::fs::openat(&self.dir, file, flags | OFlags::CLOEXEC, Mode::empty())?)
    }

    pub(super) fn read(&self, file: &str) -> io::Result<String> {
        read_at(&self.dir, file)
    }

    /// End every process in it, at once.
    pub(super) fn kill(&self) -> io::Result<()> {
        File::from(self.open("cgroup.kill", OFlags::WRONLY)?).write_all(b"1")
    }

    /// Readable (priority) when the answer of `is_populated` changes.
    pub(super) fn events(&self) -> io::Result<OwnedFd> {
        self.open("cgroup.events", OFlags::RDONLY)
    }

    pub(super) fn is_populated(&self) -> bool {
        self.read("cgroup.events").is_ok_and(|text| text.contains("populated 1"))
    }

    pub(super) fn processes(&self) -> Vec<i32> {
        let text = self.read("cgroup.procs").unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid > 0).collect()
    }

    /// The kernel ended something in it for want of memory.
    pub(super) fn had_oom_kill(&self) -> bool {
        let text = self.read("memory.events").unwrap_or_default();
        text.lines().filter_map(|l| l.strip_prefix("oom_kill ")).any(|n| n.trim() != "0")
    }

    /// Remove the directory; false while something is in it.
    pub(super) fn remove(&self, work: &OwnedFd) -> bool {
        !matches!(
            rustix::fs::unlinkat(work, &self.name, AtFlags::REMOVEDIR),
            Err(rustix::io::Errno::BUSY)
        )
    }
}

/// A small kernel file below a directory.
pub(super) fn read_at(dir: &OwnedFd, file: &str) -> io::Result<String> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd = rustix::fs::openat(dir, file, flags, Mode::empty())?;
    let mut text = String::new();
    File::from(fd).take(1 << 20).read_to_string(&mut text)?;
    Ok(text)
}
