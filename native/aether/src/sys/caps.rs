//! Capabilities of this process: the sets, the bounding set, securebits.

use super::kernel::{check, check_long};
use std::io;

/// Kernel names in the order of their numbers.
const NAMES: [&str; 41] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_LINUX_IMMUTABLE",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_SYS_MODULE",
    "CAP_SYS_RAWIO",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_PACCT",
    "CAP_SYS_ADMIN",
    "CAP_SYS_BOOT",
    "CAP_SYS_NICE",
    "CAP_SYS_RESOURCE",
    "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG",
    "CAP_MKNOD",
    "CAP_LEASE",
    "CAP_AUDIT_WRITE",
    "CAP_AUDIT_CONTROL",
    "CAP_SETFCAP",
    "CAP_MAC_OVERRIDE",
    "CAP_MAC_ADMIN",
    "CAP_SYSLOG",
    "CAP_WAKE_ALARM",
    "CAP_BLOCK_SUSPEND",
    "CAP_AUDIT_READ",
    "CAP_PERFMON",
    "CAP_BPF",
    "CAP_CHECKPOINT_RESTORE",
];

/// The bit of a capability by its kernel name.
pub(crate) fn by_name(name: &str) -> Option<u64> {
    NAMES.iter().position(|known| *known == name).map(|number| 1 << number)
}

#[repr(C)]
struct Header {
    version: u32,
    pid: libc::c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Data {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// `_LINUX_CAPABILITY_VERSION_3`: 64 bits in two halves.
const VERSION: u32 = 0x2008_0522;

/// Keep these as permitted and effective, nothing inheritable (and so nothing ambient).
pub(crate) fn keep(set: u64) -> io::Result<()> {
    let half = |shift: u32| {
        let bits = u32::try_from(set >> shift & 0xffff_ffff).unwrap_or(0);
        Data { effective: bits, permitted: bits, inheritable: 0 }
    };
    let header = Header { version: VERSION, pid: 0 };
    let data = [half(0), half(32)];
    // SAFETY: the version asks for two halves and `data` holds two; both live through the call.
    check_long(unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) })?;
    Ok(())
}

/// Drop all that is not in `keep` from the bounding set. Allocates nothing.
pub(crate) fn bound(keep: u64) -> io::Result<()> {
    for number in 0..64_u32 {
        if keep & (1 << number) != 0 {
            continue;
        }
        let number = libc::c_ulong::from(number);
        // SAFETY: plain numbers; changes only this thread's bounding set.
        match check(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, number, 0, 0, 0) }) {
            Ok(_) => {}
            // Past the last capability this kernel knows.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Changing ids no longer changes capabilities.
pub(crate) fn hold_across_id_changes() -> io::Result<()> {
    let bits = libc::c_ulong::try_from(libc::SECBIT_NO_SETUID_FIXUP).unwrap_or(0);
    // SAFETY: plain numbers; changes only this thread's securebits.
    check(unsafe { libc::prctl(libc::PR_SET_SECUREBITS, bits, 0, 0, 0) })?;
    Ok(())
}
