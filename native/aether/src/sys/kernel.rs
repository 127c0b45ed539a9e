//! How the kernel answers: -1 and errno, or a number, or a descriptor that is now ours.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// The answer of a C library wrapper.
pub(super) fn check(answer: libc::c_int) -> io::Result<libc::c_int> {
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(answer)
}

/// The answer of a raw system call.
pub(super) fn check_long(answer: libc::c_long) -> io::Result<libc::c_long> {
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(answer)
}

/// The answer of a system call that makes a descriptor.
pub(super) fn owned(answer: libc::c_long) -> io::Result<OwnedFd> {
    let raw = RawFd::try_from(check_long(answer)?)
        .map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
    // SAFETY: the kernel made this descriptor for us a moment ago; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}
