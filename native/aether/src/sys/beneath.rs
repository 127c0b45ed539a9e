//! Paths inside a tree that somebody else filled: nothing leaves it, and symbolic links are followed
//! where it is said alone.

use super::kernel::{check, owned};
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// What an opened path is wanted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A place to attach a mount to, or to look from.
    Place,
    /// The same, and it must be a directory.
    Directory,
    /// A directory to change the owner and mode of.
    Change,
    Write,
}

impl Purpose {
    fn flags(self) -> libc::c_int {
        libc::O_CLOEXEC
            | match self {
                Self::Place => libc::O_PATH,
                Self::Directory => libc::O_PATH | libc::O_DIRECTORY,
                Self::Change => libc::O_RDONLY | libc::O_DIRECTORY,
                Self::Write => libc::O_WRONLY,
            }
    }
}

/// Text as the kernel wants it.
pub(crate) fn c_string(text: &str) -> io::Result<CString> {
    CString::new(text).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// `path` as it must be written to be looked up below a directory.
pub(crate) fn relative(path: &str) -> &str {
    let path = path.trim_start_matches('/');
    if path.is_empty() {
        "."
    } else {
        path
    }
}

/// Open `path` below `root`; a symbolic link anywhere on the way is ELOOP.
pub(crate) fn open(root: impl AsFd, path: &str, purpose: Purpose) -> io::Result<OwnedFd> {
    let strict = libc::RESOLVE_IN_ROOT | libc::RESOLVE_NO_SYMLINKS | libc::RESOLVE_NO_MAGICLINKS;
    open_how(root.as_fd(), path, purpose, strict)
}

/// How often a path is looked up that other renames and mounts of this host get in the way of.
const FOLLOW_TRIES: u32 = 1_000;

/// Open `path` below `root` as the sandbox would: links are followed, but never out of `root`, and
/// not into another mount (EXDEV): a file system there may be anything's but the sandbox's.
pub(crate) fn follow(root: impl AsFd, path: &str, purpose: Purpose) -> io::Result<OwnedFd> {
    let within = libc::RESOLVE_IN_ROOT | libc::RESOLVE_NO_XDEV | libc::RESOLVE_NO_MAGICLINKS;
    // EAGAIN: the kernel could not tell whether a ".." of a link stayed inside.
    let busy = |opened: &io::Result<OwnedFd>| {
        opened.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EAGAIN))
    };
    let open = || open_how(root.as_fd(), path, purpose, within);
    (1..FOLLOW_TRIES).map(|_| open()).find(|opened| !busy(opened)).unwrap_or_else(open)
}

fn open_how(
    root: BorrowedFd<'_>,
    path: &str,
    purpose: Purpose,
    resolve: u64,
) -> io::Result<OwnedFd> {
    let path = c_string(relative(path))?;
    // SAFETY: all-zero is a valid value of this plain structure of integers.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = u64::from(purpose.flags().unsigned_abs());
    how.resolve = resolve;
    let size = std::mem::size_of::<libc::open_how>();
    let root = root.as_raw_fd();
    // SAFETY: path and structure live through the call and the size is the structure's own.
    owned(unsafe { libc::syscall(libc::SYS_openat2, root, path.as_ptr(), &raw const how, size) })
}

/// Create a regular file and open it for writing; anything already there, even a dangling link,
/// is EEXIST.
pub(crate) fn create(directory: impl AsFd, name: &str, mode: u32) -> io::Result<OwnedFd> {
    let name = c_string(name)?;
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    let directory = directory.as_fd().as_raw_fd();
    // SAFETY: the name is a C string that lives through the call.
    let answer = unsafe { libc::openat(directory, name.as_ptr(), flags, mode) };
    owned(answer.into())
}

/// Make a directory.
pub(crate) fn make_directory(parent: impl AsFd, name: &str, mode: u32) -> io::Result<()> {
    let name = c_string(name)?;
    let parent = parent.as_fd().as_raw_fd();
    // SAFETY: the name is a C string that lives through the call.
    check(unsafe { libc::mkdirat(parent, name.as_ptr(), mode) })?;
    Ok(())
}

/// Make a character device node.
pub(crate) fn make_device(
    parent: impl AsFd,
    name: &CStr,
    major: u32,
    minor: u32,
) -> io::Result<()> {
    let parent = parent.as_fd().as_raw_fd();
    let device = libc::makedev(major, minor);
    // SAFETY: the name is a C string that lives through the call.
    check(unsafe { libc::mknodat(parent, name.as_ptr(), libc::S_IFCHR | 0o666, device) })?;
    Ok(())
}

/// Make a symbolic link called `name` that says `target`.
pub(crate) fn make_link(parent: impl AsFd, name: &CStr, target: &CStr) -> io::Result<()> {
    let parent = parent.as_fd().as_raw_fd();
    // SAFETY: both are C strings that live through the call.
    check(unsafe { libc::symlinkat(target.as_ptr(), parent, name.as_ptr()) })?;
    Ok(())
}

/// Take away a name that is no directory.
pub(crate) fn unlink(parent: impl AsFd, name: &str) -> io::Result<()> {
    let name = c_string(name)?;
    let parent = parent.as_fd().as_raw_fd();
    // SAFETY: the name is a C string that lives through the call.
    check(unsafe { libc::unlinkat(parent, name.as_ptr(), 0) })?;
    Ok(())
}

/// What a name stands for, not following it if it is a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Directory,
    Link,
    File { empty: bool },
    Other,
}

fn kind_of(stat: &libc::stat) -> Kind {
    match stat.st_mode & libc::S_IFMT {
        libc::S_IFDIR => Kind::Directory,
        libc::S_IFLNK => Kind::Link,
        libc::S_IFREG => Kind::File { empty: stat.st_size == 0 },
        _ => Kind::Other,
    }
}

/// The kind of `name` in `directory`; `None` if there is nothing.
pub(crate) fn look(directory: impl AsFd, name: &str) -> io::Result<Option<Kind>> {
    match look_c(directory.as_fd(), &c_string(name)?, libc::AT_SYMLINK_NOFOLLOW) {
        Ok(kind) => Ok(Some(kind)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The kind of what a descriptor is open on.
pub(crate) fn look_at(opened: impl AsFd) -> io::Result<Kind> {
    look_c(opened.as_fd(), c"", libc::AT_EMPTY_PATH)
}

fn look_c(directory: BorrowedFd<'_>, name: &CStr, flags: libc::c_int) -> io::Result<Kind> {
    // SAFETY: all-zero is a valid value of this plain structure of integers.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    let directory = directory.as_raw_fd();
    // SAFETY: the name lives through the call and `stat` is a whole structure to be written.
    check(unsafe { libc::fstatat(directory, name.as_ptr(), &raw mut stat, flags) })?;
    Ok(kind_of(&stat))
}
