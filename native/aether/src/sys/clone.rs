//! Make a process in new namespaces, without a new program.

use super::kernel::check_long;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

pub(crate) const NEW_MOUNT: u64 = 0x0002_0000;
pub(crate) const NEW_UTS: u64 = 0x0400_0000;
pub(crate) const NEW_IPC: u64 = 0x0800_0000;
pub(crate) const NEW_USER: u64 = 0x1000_0000;
pub(crate) const NEW_PID: u64 = 0x2000_0000;
pub(crate) const NEW_NET: u64 = 0x4000_0000;
const INTO_CGROUP: u64 = 0x2_0000_0000;
const SIGCHLD: u64 = 17;

/// Which side of the clone this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Parent { child: i32 },
    Child,
}

/// Clone this process into new namespaces and, if given, straight into a cgroup v2 directory.
/// Only for a process with one thread: another thread's locks would stay locked in the child.
pub(crate) fn clone(namespaces: u64, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Side> {
    // SAFETY: all-zero is a valid value of this plain structure of integers.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = namespaces;
    args.exit_signal = SIGCHLD;
    if let Some(cgroup) = cgroup {
        args.flags |= INTO_CGROUP;
        args.cgroup = u64::try_from(cgroup.as_raw_fd()).unwrap_or(u64::MAX);
    }
    let size = std::mem::size_of::<libc::clone_args>();
    // SAFETY: no CLONE_VM, so the child runs on its own copy of the memory and stack like after
    // fork(); the caller has one thread; the structure lives through the call.
    let answer = check_long(unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size) })?;
    match i32::try_from(answer) {
        Ok(0) => Ok(Side::Child),
        Ok(child) => Ok(Side::Parent { child }),
        Err(_) => Err(io::Error::from_raw_os_error(libc::EOVERFLOW)),
    }
}
