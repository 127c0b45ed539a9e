//! Sockets between processes, descriptors sent over them, and which descriptors stay open.

use super::kernel::{check, check_long, owned};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// At most this many descriptors in one message.
const MOST: usize = 8;

/// Room for one control message with MOST descriptors: header and numbers, aligned as the kernel
/// wants it.
#[repr(C, align(8))]
struct Control([u8; 16 + 4 * MOST]);

fn socket_option(socket: RawFd, option: libc::c_int) -> io::Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut size = libc::socklen_t::try_from(std::mem::size_of::<libc::c_int>()).unwrap_or(0);
    let target = (&raw mut value).cast();
    // SAFETY: an integer to be written, with its own size.
    let answer =
        unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, option, target, &raw mut size) };
    check(answer)?;
    Ok(value)
}

/// Take over an inherited descriptor, which must be a Unix stream socket.
pub(crate) fn inherit_stream(raw: RawFd) -> io::Result<UnixStream> {
    let wrong = || io::Error::from_raw_os_error(libc::EPROTOTYPE);
    if socket_option(raw, libc::SO_DOMAIN)? != libc::AF_UNIX {
        return Err(wrong());
    }
    if socket_option(raw, libc::SO_TYPE)? != libc::SOCK_STREAM {
        return Err(wrong());
    }
    // SAFETY: plain numbers.
    check(unsafe { libc::fcntl(raw, libc::F_SETFD, libc::FD_CLOEXEC) })?;
    // SAFETY: it is open (asked above) and it is ours: whoever started us left it here for us.
    Ok(unsafe { UnixStream::from_raw_fd(raw) })
}

/// Two connected ends that keep the borders of messages.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends: [RawFd; 2] = [-1, -1];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: an array of two to be written.
    check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) })?;
    Ok((owned(ends[0].into())?, owned(ends[1].into())?))
}

/// Send one message with descriptors; returns what `sendmsg` says.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    if descriptors.len() > MOST {
        return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
    }
    let mut numbers = [0_u8; 4 * MOST];
    for (to, from) in numbers.chunks_exact_mut(4).zip(descriptors) {
        to.copy_from_slice(&from.as_raw_fd().to_ne_bytes());
    }
    let used = 4 * descriptors.len();
    let mut control = Control([0; 16 + 4 * MOST]);
    // A cmsghdr as the kernel lays it out on 64 bits: length, level, type, then the data.
    control.0[..8].copy_from_slice(&(16 + used).to_ne_bytes());
    control.0[8..12].copy_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
    control.0[12..16].copy_from_slice(&libc::SCM_RIGHTS.to_ne_bytes());
    control.0[16..16 + used].copy_from_slice(&numbers[..used]);

    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: all-zero is a valid value: no name, no parts, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    if !descriptors.is_empty() {
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = (16 + used).next_multiple_of(8);
    }
    let raw = socket.as_raw_fd();
    // SAFETY: the message points at the part and control data above with their own lengths; all
    // live through the call and are only read.
    let sent = unsafe { libc::sendmsg(raw, &raw const message, libc::MSG_NOSIGNAL) };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Receive one message: how many bytes (0: the other end is closed) and the descriptors in it.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut control = Control([0; 16 + 4 * MOST]);
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: all-zero is a valid value: no name, no parts, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len();
    let raw = socket.as_raw_fd();
    // SAFETY: the message points at the buffers above with their own lengths; all live through
    // the call.
    let got = unsafe { libc::recvmsg(raw, &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
    let mut descriptors = Vec::new();
    let length = usize::from_ne_bytes(first_word(&control.0));
    if message.msg_controllen > 16 && length <= control.0.len() {
        for number in control.0.get(16..length).unwrap_or_default().chunks_exact(4) {
            let number = RawFd::from_ne_bytes([number[0], number[1], number[2], number[3]]);
            descriptors.push(owned(number.into())?);
        }
    }
    Ok((got, descriptors))
}

fn first_word(bytes: &[u8]) -> [u8; 8] {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[..8]);
    word
}

/// Wait until one of these can be read, or until the time is over; says which can.
pub(crate) fn wait_readable<const N: usize>(
    sockets: [BorrowedFd<'_>; N],
    timeout_ms: i32,
) -> io::Result<[bool; N]> {
    let mut polled = sockets.map(|socket| libc::pollfd {
        fd: socket.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    });
    let count = libc::nfds_t::try_from(N).unwrap_or(0);
    loop {
        // SAFETY: the pointer and the count are the array's own.
        match check(unsafe { libc::poll(polled.as_mut_ptr(), count, timeout_ms) }) {
            Ok(_) => return Ok(polled.map(|one| one.revents != 0)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Open a descriptor's file also as these numbers, without close-on-exec.
pub(crate) fn place_at(file: impl AsFd, numbers: &[RawFd]) -> io::Result<()> {
    for number in numbers {
        let raw = file.as_fd().as_raw_fd();
        // SAFETY: plain numbers; whoever owned the numbers is replaced on purpose.
        check(unsafe { libc::dup2(raw, *number) })?;
    }
    Ok(())
}

/// Close everything from 3 on but these. What owned the closed ones must never be dropped: this is
/// for a process that has left all that behind.
pub(crate) fn close_all_but(keep: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut keep: Vec<libc::c_uint> =
        keep.iter().filter_map(|fd| libc::c_uint::try_from(fd.as_raw_fd()).ok()).collect();
    keep.sort_unstable();
    let mut from = 3;
    for number in keep {
        if number > from {
            close_range(from, number - 1)?;
        }
        from = from.max(number + 1);
    }
    close_range(from, libc::c_uint::MAX)
}

fn close_range(first: libc::c_uint, last: libc::c_uint) -> io::Result<()> {
    // SAFETY: plain numbers; the caller answers for what is closed.
    check_long(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) }).map(drop)
}
