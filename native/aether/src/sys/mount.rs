//! Mounts as descriptors: made or copied unattached, then attached where they belong.

use super::kernel::{check, check_long, owned};
use std::ffi::CStr;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

pub(crate) const READ_ONLY: u64 = 0x01;
pub(crate) const NO_SUID: u64 = 0x02;
pub(crate) const NO_DEVICES: u64 = 0x04;
pub(crate) const NO_EXEC: u64 = 0x08;
const IDMAP: u64 = 0x0010_0000;

const OPEN_CLOEXEC: libc::c_uint = 1;
const SET_FLAG: libc::c_uint = 0;
const SET_STRING: libc::c_uint = 1;
const SET_FD: libc::c_uint = 5;
const CREATE: libc::c_uint = 6;
const TREE_CLONE: libc::c_uint = 1;
const MOVE_FROM_EMPTY: libc::c_uint = 0x04;
const MOVE_TO_EMPTY: libc::c_uint = 0x40;

/// A file system that is being put together.
#[derive(Debug)]
pub(crate) struct Context(OwnedFd);

impl Context {
    pub(crate) fn open(kind: &CStr) -> io::Result<Self> {
        // SAFETY: a C string that lives through the call.
        owned(unsafe { libc::syscall(libc::SYS_fsopen, kind.as_ptr(), OPEN_CLOEXEC) }).map(Self)
    }

    pub(crate) fn flag(&self, key: &CStr) -> io::Result<()> {
        let context = self.0.as_raw_fd();
        let none = std::ptr::null::<libc::c_char>();
        // SAFETY: the key is a C string that lives through the call; a flag has no value.
        let answer =
            unsafe { libc::syscall(libc::SYS_fsconfig, context, SET_FLAG, key.as_ptr(), none, 0) };
        check_long(answer).map(drop)
    }

    pub(crate) fn string(&self, key: &CStr, value: &CStr) -> io::Result<()> {
        let (context, key, value) = (self.0.as_raw_fd(), key.as_ptr(), value.as_ptr());
        // SAFETY: both are C strings that live through the call.
        let answer =
            unsafe { libc::syscall(libc::SYS_fsconfig, context, SET_STRING, key, value, 0) };
        check_long(answer).map(drop)
    }

    pub(crate) fn descriptor(&self, key: &CStr, value: BorrowedFd<'_>) -> io::Result<()> {
        let (context, value) = (self.0.as_raw_fd(), value.as_raw_fd());
        let none = std::ptr::null::<libc::c_char>();
        // SAFETY: the key is a C string that lives through the call; the value is a descriptor.
        let answer = unsafe {
            libc::syscall(libc::SYS_fsconfig, context, SET_FD, key.as_ptr(), none, value)
        };
        check_long(answer).map(drop)
    }

    /// Make the file system and a mount of it.
    pub(crate) fn mount(&self, attributes: u64) -> io::Result<OwnedFd> {
        let context = self.0.as_raw_fd();
        let none = std::ptr::null::<libc::c_char>();
        // SAFETY: this command takes neither key nor value.
        let answer = unsafe { libc::syscall(libc::SYS_fsconfig, context, CREATE, none, none, 0) };
        check_long(answer)?;
        // SAFETY: plain numbers.
        owned(unsafe { libc::syscall(libc::SYS_fsmount, context, OPEN_CLOEXEC, attributes) })
    }

    /// What the file system said about a failure, in its own words.
    pub(crate) fn complaint(self) -> String {
        let mut file = std::fs::File::from(self.0);
        let mut words = [0; 512];
        let length = file.read(&mut words).unwrap_or(0);
        let text = String::from_utf8_lossy(words.get(..length).unwrap_or_default());
        text.trim().to_owned()
    }
}

/// Copy the mount `path` lies on, with `path` as its root, unattached.
pub(crate) fn copy(from: Option<BorrowedFd<'_>>, path: &CStr) -> io::Result<OwnedFd> {
    let from = from.map_or(libc::AT_FDCWD, |from| from.as_raw_fd());
    let close = libc::c_uint::try_from(libc::O_CLOEXEC | libc::AT_EMPTY_PATH).unwrap_or(0);
    let flags = TREE_CLONE | close;
    // SAFETY: a C string that lives through the call.
    owned(unsafe { libc::syscall(libc::SYS_open_tree, from, path.as_ptr(), flags) })
}

/// Add attributes to a mount and, with a user namespace, map the owners of its files by it.
pub(crate) fn restrict(
    mount: impl AsFd,
    attributes: u64,
    owners: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    // SAFETY: all-zero is a valid value of this plain structure of integers.
    let mut change: libc::mount_attr = unsafe { std::mem::zeroed() };
    change.attr_set = attributes;
    if let Some(owners) = owners {
        change.attr_set |= IDMAP;
        change.userns_fd = u64::try_from(owners.as_raw_fd()).unwrap_or(u64::MAX);
    }
    let size = std::mem::size_of::<libc::mount_attr>();
    let mount = mount.as_fd().as_raw_fd();
    let (call, flags) = (libc::SYS_mount_setattr, libc::AT_EMPTY_PATH);
    // SAFETY: the empty path and the structure live through the call; the size is its own.
    let answer =
        unsafe { libc::syscall(call, mount, c"".as_ptr(), flags, &raw const change, size) };
    check_long(answer).map(drop)
}

/// Attach an unattached mount on an opened place.
pub(crate) fn attach(mount: impl AsFd, place: impl AsFd) -> io::Result<()> {
    let (mount, place) = (mount.as_fd().as_raw_fd(), place.as_fd().as_raw_fd());
    let (call, here) = (libc::SYS_move_mount, c"".as_ptr());
    let flags = MOVE_FROM_EMPTY | MOVE_TO_EMPTY;
    // SAFETY: the empty paths are static.
    check_long(unsafe { libc::syscall(call, mount, here, place, here, flags) }).map(drop)
}

/// Take away a mount that is attached, opened at its root.
pub(crate) fn detach(mount: impl AsFd) -> io::Result<()> {
    let path = format!("/proc/self/fd/{}\0", mount.as_fd().as_raw_fd());
    // SAFETY: ends with a zero byte, and lives through the call.
    check(unsafe { libc::umount2(path.as_ptr().cast(), libc::MNT_DETACH) }).map(drop)
}

/// Nothing mounted below `/` here or elsewhere is seen on the other side from now on.
pub(crate) fn make_private() -> io::Result<()> {
    let none = std::ptr::null();
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: a static path; this change takes neither source, type nor data.
    let answer = unsafe { libc::mount(none, c"/".as_ptr(), none, flags, std::ptr::null()) };
    check(answer).map(drop)
}

/// Make `root`, a mount, the root of this mount namespace and let go of the old one with all that
/// was mounted in it.
pub(crate) fn pivot(root: impl AsFd) -> io::Result<()> {
    let here = c".".as_ptr();
    let root = root.as_fd().as_raw_fd();
    // SAFETY: a descriptor that is open.
    check(unsafe { libc::fchdir(root) })?;
    // Old and new root stacked on one place: no directory for the old one is needed.
    // SAFETY: static paths.
    check_long(unsafe { libc::syscall(libc::SYS_pivot_root, here, here) })?;
    // SAFETY: a static path; "." is the old root, on top of the new one.
    check(unsafe { libc::umount2(here, libc::MNT_DETACH) })?;
    // SAFETY: a static path.
    check(unsafe { libc::chdir(c"/".as_ptr()) }).map(drop)
}
