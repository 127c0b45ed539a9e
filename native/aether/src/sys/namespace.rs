//! Namespaces and what is set once in each: host name, loopback, session.

use super::clock;
use super::kernel::{check, check_long, owned};
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Leave the shared mount namespace for a copy of it.
pub(crate) fn unshare_mounts() -> io::Result<()> {
    // SAFETY: a plain number.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) }).map(drop)
}

/// A cgroup namespace whose root is the cgroups this process is in now.
pub(crate) fn unshare_cgroups() -> io::Result<()> {
    // SAFETY: a plain number.
    check(unsafe { libc::unshare(libc::CLONE_NEWCGROUP) }).map(drop)
}

/// Have the next processes made be in a time namespace of their own, which begins now: their
/// uptime, and when they were started, count from here.
pub(crate) fn begin_time() -> io::Result<()> {
    const NEW_TIME: libc::c_int = 0x80;
    // SAFETY: a plain number.
    match check(unsafe { libc::unshare(NEW_TIME) }) {
        // A kernel without them, or a host that allows none.
        Err(error) if [Some(libc::EINVAL), Some(libc::ENOSPC)].contains(&error.raw_os_error()) => {
            return Ok(());
        }
        done => done.map(drop)?,
    }
    let passed = clock::since_start();
    let (seconds, nanos) = match passed.subsec_nanos() {
        0 => (passed.as_secs(), 0),
        nanos => (passed.as_secs() + 1, 1_000_000_000 - nanos),
    };
    match std::fs::write("/proc/self/timens_offsets", format!("boottime -{seconds} {nanos}\n")) {
        // A root that may not, or one in a time namespace itself, for offsets count from the host's
        // clock: they tell the time of that.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::ERANGE) => Ok(()),
        done => done,
    }
}

/// Go to another mount namespace; root and working directory become its root.
pub(crate) fn enter_mounts(namespace: impl AsFd) -> io::Result<()> {
    let namespace = namespace.as_fd().as_raw_fd();
    // SAFETY: plain numbers.
    check(unsafe { libc::setns(namespace, libc::CLONE_NEWNS) }).map(drop)
}

/// Go to another network namespace.
pub(crate) fn enter_network(namespace: impl AsFd) -> io::Result<()> {
    let namespace = namespace.as_fd().as_raw_fd();
    // SAFETY: plain numbers.
    check(unsafe { libc::setns(namespace, libc::CLONE_NEWNET) }).map(drop)
}

/// Name the host.
pub(crate) fn set_hostname(name: &str) -> io::Result<()> {
    // SAFETY: the pointer and the length are the string's own.
    check(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) }).map(drop)
}

/// Bring the loopback interface up.
pub(crate) fn loopback_up() -> io::Result<()> {
    // SAFETY: plain numbers.
    let answer = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    let socket = owned(answer.into())?;
    // SAFETY: all-zero is a valid value of this plain structure: an empty name, no address.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = libc::c_char::try_from(*from).unwrap_or(0);
    }
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(libc::IFF_UP).unwrap_or(0);
    let raw = socket.as_raw_fd();
    // SAFETY: this request reads one ifreq, which lives through the call.
    check(unsafe { libc::ioctl(raw, libc::SIOCSIFFLAGS, &raw const request) }).map(drop)
}

/// Lead a session of its own.
pub(crate) fn new_session() -> io::Result<()> {
    // SAFETY: no arguments.
    check(unsafe { libc::setsid() }).map(drop)
}

/// A session keyring of its own: the launcher's is not the sandbox's business.
pub(crate) fn new_keyring() -> io::Result<()> {
    const JOIN: libc::c_int = 1;
    let anonymous = std::ptr::null::<libc::c_char>();
    // SAFETY: a null name asks for a new keyring without one.
    match check_long(unsafe { libc::syscall(libc::SYS_keyctl, JOIN, anonymous) }) {
        // A kernel without keyrings.
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => Ok(()),
        done => done.map(drop),
    }
}

/// The name of this process in listings.
pub(crate) fn set_name(name: &CStr) -> io::Result<()> {
    // SAFETY: a C string that lives through the call.
    check(unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr(), 0, 0, 0) }).map(drop)
}

/// Neither core dumps nor, for anybody without rights in the initial user namespace, ptrace.
pub(crate) fn forbid_dumps() -> io::Result<()> {
    // SAFETY: plain numbers.
    check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) }).map(drop)
}

/// Permission bits that new files never get.
pub(crate) fn set_umask(mask: u32) {
    // SAFETY: a plain number; it cannot fail.
    let _ = unsafe { libc::umask(mask) };
}
