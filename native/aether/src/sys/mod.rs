//! The only place where `unsafe` is allowed: one safe function per system call, argument types that
//! cannot be mixed up. A SAFETY note says which requirement holds and why.
#![expect(unsafe_code, reason = "system calls")]

pub(crate) mod io;
pub(crate) mod memory;
pub(crate) mod poll;
pub(crate) mod process;
pub(crate) mod pty;
