//! The only place where `unsafe` is allowed: one safe function per system call, argument types that
//! cannot be mixed up. A SAFETY note says which requirement holds and why.
#![expect(unsafe_code, reason = "system calls")]

pub(crate) mod affinity;
pub(crate) mod beneath;
pub(crate) mod caps;
pub(crate) mod clock;
pub(crate) mod clone;
pub(crate) mod fdpass;
pub(crate) mod identity;
pub(crate) mod io;
mod kernel;
pub(crate) mod memory;
pub(crate) mod mount;
pub(crate) mod namespace;
pub(crate) mod poll;
pub(crate) mod process;
pub(crate) mod pty;
pub(crate) mod reap;
pub(crate) mod seccomp;
