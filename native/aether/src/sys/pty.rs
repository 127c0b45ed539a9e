//! Pseudo-terminals, opened from a directory descriptor of devpts so that no path of the image is
//! trusted, and descriptors passed from a child to its parent.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Set the size in characters.
pub(crate) fn set_size(terminal: BorrowedFd<'_>, rows: u16, cols: u16) -> io::Result<()> {
    let size = libc::winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCSWINSZ reads one winsize, which outlives the call.
    let done = unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Open a new terminal: (master, slave). Allocates nothing: used between clone and exec.
pub(crate) fn open(devpts: RawFd) -> io::Result<(RawFd, RawFd)> {
    let flags =
        libc::O_RDWR | libc::O_NOCTTY | libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: a NUL-terminated constant name; no mode is needed without O_CREAT.
    let master = unsafe { libc::openat(devpts, c"ptmx".as_ptr(), flags) };
    if master < 0 {
        return Err(io::Error::last_os_error());
    }
    let unlock: libc::c_int = 0;
    // SAFETY: TIOCSPTLCK reads one int, which outlives the call.
    if unsafe { libc::ioctl(master, libc::TIOCSPTLCK, &raw const unlock) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: TIOCGPTPEER takes open flags by value and returns a new descriptor.
    let slave = unsafe { libc::ioctl(master, libc::TIOCGPTPEER, libc::O_RDWR | libc::O_NOCTTY) };
    if slave < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((master, slave))
}

/// Make it the controlling terminal of the calling session leader.
pub(crate) fn take_control(slave: RawFd) -> io::Result<()> {
    // SAFETY: TIOCSCTTY takes an integer by value.
    if unsafe { libc::ioctl(slave, libc::TIOCSCTTY, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[repr(C, align(8))]
struct Control([u8; 64]);

/// Send a small record, with a descriptor or without. Allocates nothing.
pub(crate) fn send_record(channel: RawFd, record: [u8; 8], fd: Option<RawFd>) -> io::Result<()> {
    let mut record = record;
    let mut part = libc::iovec { iov_base: record.as_mut_ptr().cast(), iov_len: record.len() };
    let mut control = Control([0; 64]);
    // SAFETY: msghdr is plain data for which all zero is the empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    if let Some(fd) = fd {
        message.msg_control = control.0.as_mut_ptr().cast();
        // SAFETY: pure arithmetic.
        message.msg_controllen = usize::try_from(unsafe { libc::CMSG_SPACE(4) }).unwrap_or(0);
        // SAFETY: the message's control buffer is set and large enough for one header.
        let head = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
        // SAFETY: pure arithmetic.
        let length = usize::try_from(unsafe { libc::CMSG_LEN(4) }).unwrap_or(0);
        let filled = libc::cmsghdr {
            cmsg_len: length,
            cmsg_level: libc::SOL_SOCKET,
            cmsg_type: libc::SCM_RIGHTS,
        };
        // SAFETY: head points into `control`, aligned and with room for a header.
        unsafe { head.write(filled) };
        // SAFETY: head is a valid header inside `control`.
        let data = unsafe { libc::CMSG_DATA(head) };
        // SAFETY: CMSG_SPACE(4) bytes were reserved, so four bytes of data fit.
        unsafe { data.cast::<libc::c_int>().write_unaligned(fd) };
    }
    // SAFETY: the message and all it points to live until the call returns.
    if unsafe { libc::sendmsg(channel, &raw const message, libc::MSG_NOSIGNAL) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A record as it was sent, and the descriptor that came with it.
pub(crate) type Record = ([u8; 8], Option<OwnedFd>);

/// Receive one record; None when the other side is closed.
pub(crate) fn receive_record(channel: impl AsFd) -> io::Result<Option<Record>> {
    let mut record = [0_u8; 8];
    let mut part = libc::iovec { iov_base: record.as_mut_ptr().cast(), iov_len: record.len() };
    let mut control = Control([0; 64]);
    // SAFETY: msghdr is plain data for which all zero is the empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len();
    let fd = channel.as_fd().as_raw_fd();
    // SAFETY: the message and all it points to live until the call returns.
    let size = unsafe { libc::recvmsg(fd, &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    if size < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel filled the control buffer and its length.
    let head = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    let mut passed = None;
    if !head.is_null() {
        // SAFETY: not null, so it points to a whole header inside `control`.
        let header = unsafe { head.read() };
        if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: head is a valid header inside `control`.
            let data = unsafe { libc::CMSG_DATA(head) };
            // SAFETY: SCM_RIGHTS carries at least one descriptor.
            let fd = unsafe { data.cast::<libc::c_int>().read_unaligned() };
            // SAFETY: the kernel just made this descriptor for us.
            passed = Some(unsafe { OwnedFd::from_raw_fd(fd) });
        }
    }
    if size == 0 {
        return Ok(None);
    }
    Ok(Some((record, passed)))
}
