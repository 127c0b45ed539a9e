//! User and group ids of this process. Raw calls: the C library's would look for other threads.

use super::kernel::check_long;
use std::io;

/// Become this user and group everywhere, with these supplementary groups.
pub(crate) fn become_id(id: u32, groups: &[u32]) -> io::Result<()> {
    // SAFETY: plain numbers.
    check_long(unsafe { libc::syscall(libc::SYS_setresgid, id, id, id) })?;
    // SAFETY: the pointer and the count are the slice's own.
    check_long(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) })?;
    // SAFETY: plain numbers.
    check_long(unsafe { libc::syscall(libc::SYS_setresuid, id, id, id) })?;
    Ok(())
}

/// Make files, and look at them, as this user and group; all other ids stay.
pub(crate) fn file_id(id: u32) -> io::Result<()> {
    for call in [libc::SYS_setfsgid, libc::SYS_setfsuid] {
        // SAFETY: a plain number.
        let _ = unsafe { libc::syscall(call, id) };
        // It answers with the id before, also when it refuses; so ask again to know.
        // SAFETY: a plain number; -1 is never an id and changes nothing.
        let now = unsafe { libc::syscall(call, -1) };
        if now != libc::c_long::from(id) {
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
    }
    Ok(())
}
