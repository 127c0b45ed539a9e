//! The fork server: spec in, sandbox out; words in spec/launch.md.
//!
//! `plan.rs` says what will be done, `host.rs` does the launcher's part, `inside.rs` the new
//! process's part until it serves, `ground.rs` is what all sandboxes start from, `report.rs` what
//! the two say to each other, `server.rs` the loop and the edge's socket.

mod ground;
mod host;
mod inside;
mod plan;
mod report;
mod server;
mod trip;

use crate::spec::LaunchSpec;
use crate::sys::io::{eprint_line, print_line};
use std::io::Read;
use std::process::ExitCode;

/// sysexits: what the caller gave us is wrong.
const BAD_INPUT: u8 = 65;

/// `aether launch`.
pub(crate) fn main(mut args: impl Iterator<Item = String>) -> ExitCode {
    match args.next().as_deref() {
        None => server::main(),
        Some("--plan") => print_plan(),
        Some(_) => {
            eprint_line("usage: aether launch [--plan]");
            ExitCode::from(64)
        }
    }
}

fn print_plan() -> ExitCode {
    match read_plan() {
        Ok(plan) => {
            print_line(&plan::describe(&plan).join("\n"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprint_line(&format!("aether launch --plan: {error}"));
            ExitCode::from(BAD_INPUT)
        }
    }
}

fn read_plan() -> Result<plan::Plan, Box<dyn std::error::Error>> {
    let mut bytes = Vec::new();
    std::io::stdin().read_to_end(&mut bytes)?;
    let spec: LaunchSpec = rmp_serde::from_slice(&bytes)?;
    Ok(plan::plan(&spec)?)
}
