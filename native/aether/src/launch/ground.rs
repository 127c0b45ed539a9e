//! What all sandboxes start from, made once: the template mount namespace.
//!
//! Copying a mount namespace costs per mount, and a copy shows the new process everything in it
//! until it pivots away. So sandboxes copy a small one: a tmpfs root with `newroot`, `/dev`, a place
//! and a device for the file system that tells of limits (`crate::fuse`), covers for denied paths
//! (`crate::rules`), and a proc and a sysfs, which the kernel wants to see unmasked before it lets a user namespace mount
//! its own.

use crate::error::{AtStep, StepError};
use crate::rules;
use crate::sys::mount::{self, Context, NO_DEVICES, NO_EXEC, NO_SUID, READ_ONLY};
use crate::sys::{beneath, caps, identity, namespace};
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

/// The launcher's surroundings.
#[derive(Debug)]
pub(super) struct Ground {
    pub(super) host: File,
    pub(super) network: File,
    pub(super) template: File,
}

const DEVICES: [(&CStr, u32, u32); 6] = [
    (c"null", 1, 3),
    (c"zero", 1, 5),
    (c"full", 1, 7),
    (c"random", 1, 8),
    (c"urandom", 1, 9),
    (c"tty", 5, 0),
];

const LINKS: [(&CStr, &CStr); 5] = [
    (c"fd", c"/proc/self/fd"),
    (c"stdin", c"/proc/self/fd/0"),
    (c"stdout", c"/proc/self/fd/1"),
    (c"stderr", c"/proc/self/fd/2"),
    (c"ptmx", c"pts/ptmx"),
];

impl Ground {
    /// Make the template and come back. On failure the caller must end: it may be in between.
    pub(super) fn prepare() -> Result<Self, StepError> {
        caps::hold_across_id_changes().at("hold capabilities", "")?;
        identity::become_id(0, &[]).at("become root", "")?;
        let open = |path: &str| File::open(path).at("open namespace", path);
        let (host, network) = (open("/proc/self/ns/mnt")?, open("/proc/self/ns/net")?);
        namespace::unshare_mounts().at("unshare mounts", "")?;
        mount::make_private().at("make private", "/")?;
        let root = make_root().at("make template root", "/")?;
        let template = open("/proc/self/ns/mnt")?;
        enter(&root).at("enter template", "/")?;
        namespace::enter_mounts(&host).at("return to host", "/")?;
        Ok(Self { host, network, template })
    }
}

fn make_root() -> io::Result<OwnedFd> {
    let tmpfs = Context::open(c"tmpfs")?;
    tmpfs.string(c"source", c"template")?;
    tmpfs.string(c"mode", c"0755")?;
    let root = tmpfs.mount(NO_SUID)?;
    namespace::set_umask(0);
    for name in ["newroot", "dev", "proc", "sys", "truth", rules::COVERS] {
        beneath::make_directory(&root, name, 0o755)?;
    }
    // Beside /dev, which sandboxes get a copy of: this one is for their first process alone.
    beneath::make_device(&root, c"fuse", 10, 229)?;
    make_covers(&beneath::open(&root, rules::COVERS, beneath::Purpose::Directory)?)?;
    fill_devices(&beneath::open(&root, "dev", beneath::Purpose::Directory)?)?;
    namespace::set_umask(0o022);
    Ok(root)
}

fn make_covers(covers: &OwnedFd) -> io::Result<()> {
    let name = |name: &CStr| name.to_string_lossy().into_owned();
    beneath::create(covers, &name(rules::FILE), 0)?;
    beneath::make_directory(covers, &name(rules::DIRECTORY), 0)
}

fn fill_devices(dev: &OwnedFd) -> io::Result<()> {
    for (name, major, minor) in DEVICES {
        beneath::make_device(dev, name, major, minor)?;
    }
    for (name, target) in LINKS {
        beneath::make_link(dev, name, target)?;
    }
    for (name, mode) in [("pts", 0o755), ("shm", 0o1777), ("mqueue", 0o1777)] {
        beneath::make_directory(dev, name, mode)?;
    }
    Ok(())
}

fn enter(root: &OwnedFd) -> io::Result<()> {
    mount::attach(root, beneath::open(File::open("/")?, "/", beneath::Purpose::Directory)?)?;
    for (kind, place) in [(c"proc", "proc"), (c"sysfs", "sys")] {
        let made = Context::open(kind)?.mount(NO_SUID | NO_DEVICES | NO_EXEC)?;
        mount::attach(made, beneath::open(root, place, beneath::Purpose::Directory)?)?;
    }
    mount::restrict(root, READ_ONLY, None)?;
    mount::pivot(root)
}
