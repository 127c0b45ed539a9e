//! Children that end, and signals as descriptors.

use super::kernel::{check, owned};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

fn signal_set(signal: Option<libc::c_int>) -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: a whole signal set to be written.
    let _ = unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: sigemptyset wrote all of it.
    let mut set = unsafe { set.assume_init() };
    if let Some(signal) = signal {
        // SAFETY: an initialized signal set.
        let _ = unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    set
}

fn set_mask(set: &libc::sigset_t) -> io::Result<()> {
    let old = std::ptr::null_mut();
    // SAFETY: an initialized signal set that lives through the call.
    check(unsafe { libc::sigprocmask(libc::SIG_SETMASK, set, old) }).map(drop)
}

/// Block SIGCHLD and have it reported on a descriptor.
pub(crate) fn child_signals() -> io::Result<OwnedFd> {
    let set = signal_set(Some(libc::SIGCHLD));
    set_mask(&set)?;
    let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
    // SAFETY: an initialized signal set that lives through the call.
    owned(unsafe { libc::signalfd(-1, &raw const set, flags) }.into())
}

/// Block no signal.
pub(crate) fn unblock_signals() -> io::Result<()> {
    set_mask(&signal_set(None))
}

/// Forget the signals reported so far.
pub(crate) fn drain(signals: impl AsFd) {
    let raw = signals.as_fd().as_raw_fd();
    let mut words = [0_u8; 1024];
    // SAFETY: the pointer and the length are the array's own.
    while unsafe { libc::read(raw, words.as_mut_ptr().cast(), words.len()) } > 0 {}
}

/// A child that has ended, if there is one: its id and raw wait status.
pub(crate) fn ended() -> Option<(i32, i32)> {
    wait(-1, libc::WNOHANG)
}

/// Wait for one child to end.
pub(crate) fn wait_for(child: i32) -> Option<i32> {
    wait(child, 0).map(|(_, status)| status)
}

fn wait(child: i32, flags: libc::c_int) -> Option<(i32, i32)> {
    let mut status = 0;
    loop {
        // SAFETY: an integer to be written.
        match check(unsafe { libc::waitpid(child, &raw mut status, flags) }) {
            Ok(0) => return None,
            Ok(pid) => return Some((pid, status)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
}

/// Kill a child that has not been waited for, so that its id is still its own.
pub(crate) fn kill(child: i32) {
    // SAFETY: plain numbers.
    let _ = unsafe { libc::kill(child, libc::SIGKILL) };
}

/// End this process now, running nothing on the way.
pub(crate) fn exit_now(status: i32) -> ! {
    // SAFETY: a plain number; it does not return.
    unsafe { libc::_exit(status) }
}
