//! `aether launch` runs on the host and starts sandboxes; `aether serve` is PID 1 where a sandbox
//! has a kernel of its own. In a container serving needs no second program: the launched child
//! goes straight on into `serve::run`.
//!
//! Start reading at `launch/mod.rs` (how a sandbox comes to be) and `serve/mod.rs` (what it
//! answers). `unsafe` lives in `sys/` alone.

mod confine;
mod error;
mod frame;
mod fuse;
mod launch;
mod rules;
mod serve;
mod spec;
mod sys;
mod write;

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    match args.next().as_deref() {
        Some("launch") => launch::main(args),
        Some("serve") => serve::main(args),
        Some("write") => write::main(args),
        Some("--version") => {
            sys::io::print_line(env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        _ => {
            sys::io::eprint_line(
                "usage: aether launch [--plan] | serve | write FILE TEXT PARENT | --version",
            );
            ExitCode::from(64)
        }
    }
}
