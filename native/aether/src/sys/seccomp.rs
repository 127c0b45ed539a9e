//! Installing what `confine.rs` computed. Nothing here allocates: it runs between clone and exec.

use super::kernel::{check, check_long};
use std::io;

/// Hold this thread, and all it starts, to a filter.
pub(crate) fn install(filter: &[libc::sock_filter]) -> io::Result<()> {
    let Ok(len) = libc::c_ushort::try_from(filter.len()) else {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    };
    // The kernel only reads it, whatever the type says.
    let program = libc::sock_fprog { len, filter: filter.as_ptr().cast_mut() };
    let (call, mode) = (libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER);
    // SAFETY: pointer and length are the slice's own; it and the structure live through the call.
    check_long(unsafe { libc::syscall(call, mode, 0, &raw const program) }).map(drop)
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
