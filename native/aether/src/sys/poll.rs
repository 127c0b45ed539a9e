//! Waiting for many descriptors, and the descriptor that says that children ended.

use rustix::event::epoll::{self, EventData, EventFlags};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// An epoll set whose members are known by a number.
#[derive(Debug)]
pub(crate) struct Poll {
    set: OwnedFd,
}

/// What a member is waited for.
pub(crate) type Interest = EventFlags;

impl Poll {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { set: epoll::create(epoll::CreateFlags::CLOEXEC)? })
    }

    pub(crate) fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.set, fd, EventData::new_u64(token), interest)?)
    }

    pub(crate) fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.set, fd, EventData::new_u64(token), interest)?)
    }

    /// Closing a descriptor is not enough where a child may still hold a copy of it.
    pub(crate) fn remove(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.set, fd);
    }

    /// Fill `ready` with (number, what happened). An interrupted wait is an empty one.
    pub(crate) fn wait(
        &self,
        ready: &mut Vec<(u64, Interest)>,
        timeout: Option<Duration>,
    ) -> io::Result<()> {
        ready.clear();
        let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; 64];
        let timeout = timeout.map(|t| rustix::event::Timespec {
            tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(t.subsec_nanos()),
        });
        match epoll::wait(&self.set, &mut events, timeout.as_ref()) {
            Ok((filled, _)) => {
                // The structure is packed on x86: copy the fields, never refer to them.
                ready.extend(filled.iter().map(|event| {
                    let (data, flags) = (event.data, event.flags);
                    (data.u64(), flags)
                }));
                Ok(())
            }
            Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Block SIGCHLD and get a descriptor that becomes readable when a child ends.
pub(crate) fn child_signals() -> io::Result<OwnedFd> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the whole set it is given.
    let _ = unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: initialised on the line above.
    let mut set = unsafe { set.assume_init() };
    // SAFETY: the set is initialised and the signal number is valid.
    let _ = unsafe { libc::sigaddset(&raw mut set, libc::SIGCHLD) };
    // SAFETY: a valid set; the old mask is not asked for.
    if unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a valid set and valid flags; -1 asks for a new descriptor.
    let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above made this descriptor and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
