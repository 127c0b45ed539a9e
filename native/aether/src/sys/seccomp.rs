//! Installing what `confine/` computed, and answering for it. Installing allocates nothing: it runs
//! between clone and exec.

use super::kernel::{check, check_long};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

/// Hold this thread, and all it starts, to a filter; an empty one is none.
pub(crate) fn install(filter: &[libc::sock_filter]) -> io::Result<()> {
    if filter.is_empty() {
        return Ok(());
    }
    set_filter(filter, 0).map(drop)
}

/// As `install`; the descriptor hears of calls for which the filter asks, and is closed on exec.
pub(crate) fn install_listened(filter: &[libc::sock_filter]) -> io::Result<RawFd> {
    let listener = set_filter(filter, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER)?;
    RawFd::try_from(listener).map_err(|_| io::Error::from_raw_os_error(libc::EBADF))
}

fn set_filter(filter: &[libc::sock_filter], flags: libc::c_ulong) -> io::Result<libc::c_long> {
    let Ok(len) = libc::c_ushort::try_from(filter.len()) else {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    };
    // The kernel only reads it, whatever the type says.
    let program = libc::sock_fprog { len, filter: filter.as_ptr().cast_mut() };
    let (call, mode) = (libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER);
    // SAFETY: pointer and length are the slice's own; it and the structure live through the call.
    check_long(unsafe { libc::syscall(call, mode, flags, &raw const program) })
}

/// A call that waits for an answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    id: u64,
    pub(crate) number: libc::c_long,
    pub(crate) args: [u64; 6],
}

/// The next call that waits. Where epoll has just called the listener readable this does not block:
/// a call that was given up meanwhile is an error.
pub(crate) fn receive(listener: BorrowedFd<'_>) -> io::Result<Asked> {
    // SAFETY: plain data; the kernel wants all zero.
    let mut asked: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    let fd = listener.as_raw_fd();
    // SAFETY: the kernel writes one such structure, whose size is part of the number.
    check(unsafe { libc::ioctl(fd, libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut asked) })?;
    Ok(Asked { id: asked.id, number: asked.data.nr.into(), args: asked.data.args })
}

/// Answer it with an error number. Whoever asked may be gone: nothing is lost.
pub(crate) fn refuse(listener: BorrowedFd<'_>, asked: Asked, errno: i32) {
    let mut answer = libc::seccomp_notif_resp { id: asked.id, val: 0, error: -errno, flags: 0 };
    // SAFETY: the kernel reads one such structure, whose size is part of the number.
    let _ = unsafe {
        libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut answer)
    };
}

/// No program gives more rights than its caller has.
pub(crate) fn no_new_privileges() -> io::Result<()> {
    // SAFETY: plain numbers.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }).map(drop)
}

/// Set a resource limit of this process.
pub(crate) fn set_limit(resource: i32, soft: u64, hard: u64) -> io::Result<()> {
    let limit = libc::rlimit64 { rlim_cur: soft, rlim_max: hard };
    let old = std::ptr::null_mut::<libc::rlimit64>();
    let call = libc::SYS_prlimit64;
    // SAFETY: the structure lives through the call; the old limit is not asked for.
    check_long(unsafe { libc::syscall(call, 0, resource, &raw const limit, old) }).map(drop)
}

/// The hard limit this process has now.
pub(crate) fn hard_limit(resource: i32) -> io::Result<u64> {
    let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    let new = std::ptr::null::<libc::rlimit64>();
    let call = libc::SYS_prlimit64;
    // SAFETY: a whole structure to be written; no new limit is given.
    check_long(unsafe { libc::syscall(call, 0, resource, new, &raw mut limit) })?;
    Ok(limit.rlim_max)
}
