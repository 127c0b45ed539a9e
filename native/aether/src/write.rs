//! `aether write FILE TEXT PARENT`: one write that keeps the kernel busy for long, in a process that
//! can be killed over it and ends with the parent.

use crate::sys::process;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::process::ExitCode;

/// The exit status says whether the kernel took it.
pub(crate) fn main(args: impl Iterator<Item = String>) -> ExitCode {
    let args: Vec<String> = args.collect();
    let [file, text, parent] = args.as_slice() else {
        return ExitCode::from(64);
    };
    process::die_with_parent();
    // One that has ended before that is not waited for by anybody.
    if std::os::unix::process::parent_id().to_string() != *parent {
        return ExitCode::FAILURE;
    }
    write(file, text).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS)
}

fn write(file: &str, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(file)?.write_all(text.as_bytes())
}
