//! PID 1 of a sandbox: one channel to the edge, commands, sessions, files; words in spec/frames.md.
//!
//! Start reading at `server.rs` (the loop), then `edge.rs` and `streams.rs` (requests), `commands/`.
//! Whatever may block runs in a forked child: a command, or a worker (`worker.rs`, `files/`).

mod cgroup;
mod commands;
mod conn;
mod connect;
mod denials;
mod edge;
mod files;
mod hunt;
mod load;
mod phase;
mod processes;
mod proto;
mod ring;
mod server;
mod sessions;
mod shutdown;
mod streams;
pub(crate) mod truth;
mod users;
mod worker;

use crate::confine::Confinement;
use crate::rules::Rules;
use crate::spec::LaunchSpec;
use crate::sys::{io as standard, memory, process};
use rustix::fs::{Mode, OFlags};
use serde::Serialize;
use server::{Door, Server};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitCode;
use truth::Truth;

/// What the launcher hands over. Every other descriptor is closed.
#[derive(Debug)]
pub(crate) struct Handover {
    pub(crate) spec: LaunchSpec,
    pub(crate) confinement: Confinement,
    /// Listening Unix stream socket; the edge connects to it.
    pub(crate) listener: OwnedFd,
    /// Delegated cgroup v2 directory for commands, if the host has v2.
    pub(crate) work_v2: Option<OwnedFd>,
    /// Open `tasks` files (cgroup v1): a child writes "0" to each before it executes.
    pub(crate) work_v1: Vec<OwnedFd>,
    /// What the sandbox is shown of its limits, if it is.
    pub(crate) truth: Option<Truth>,
    /// Its file rules, in force.
    pub(crate) rules: Rules,
}

/// Serve until shutdown. Everything about the sandbox's surroundings is already in place.
pub(crate) fn run(handover: Handover) -> ! {
    serve(handover, None)
}

fn serve(handover: Handover, door: Option<Door>) -> ! {
    memory::keep_little();
    process::default_signals();
    process::ignore_broken_pipes();
    process::set_undumpable();
    if std::process::id() != 1 {
        process::adopt_orphans();
    }
    match move_up(handover).and_then(|handover| Server::new(handover, door)) {
        Ok(server) => server.serve(),
        Err(_) => process::exit_now(71),
    }
}

/// Descriptors 0 to 2 are overwritten in every command: nothing of ours may have such a number.
fn move_up(handover: Handover) -> io::Result<Handover> {
    let up = |fd: OwnedFd| -> io::Result<OwnedFd> {
        if fd.as_raw_fd() > 2 {
            Ok(fd)
        } else {
            Ok(rustix::io::fcntl_dupfd_cloexec(&fd, 3)?)
        }
    };
    Ok(Handover {
        spec: handover.spec,
        confinement: handover.confinement,
        listener: up(handover.listener)?,
        work_v2: handover.work_v2.map(up).transpose()?,
        work_v1: handover.work_v1.into_iter().map(up).collect::<io::Result<_>>()?,
        // Opened while 0 to 2 were taken.
        truth: handover.truth,
        rules: handover.rules,
    })
}

/// /dev/null at 0, 1 and 2, and once more above them to hand out.
fn standard_streams() -> io::Result<OwnedFd> {
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let null = rustix::io::fcntl_dupfd_cloexec(&null, 3)?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    Ok(null)
}

fn open_directory(path: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(path, flags, Mode::empty())?;
    Ok(rustix::io::fcntl_dupfd_cloexec(&fd, 3)?)
}

/// A number nobody can guess.
fn random() -> u64 {
    let mut bytes = [0_u8; 8];
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_ne_bytes(bytes) >> 1
}

/// A length as it is written.
fn long(size: usize) -> u64 {
    u64::try_from(size).unwrap_or(u64::MAX)
}

const USAGE: &str = "usage: aether serve (--socket PATH | --port DEVICE) [--spec FILE] \
    [--work-v2 DIRECTORY] [--work-v1 TASKS]...";

/// What a specification cannot do without, for serving without one.
#[derive(Serialize)]
struct Plain {
    id: &'static str,
    hostname: &'static str,
    uid_base: u32,
    layers: [&'static str; 0],
    upper: &'static str,
    work: &'static str,
    socket: &'static str,
    seccomp: &'static str,
    default_timeout_s: f64,
    max_timeout_s: f64,
    output_limit_bytes: u64,
    max_running_commands: u32,
}

const PLAIN: Plain = Plain {
    id: "local",
    hostname: "",
    uid_base: 0,
    layers: [],
    upper: "",
    work: "",
    socket: "",
    seccomp: "none",
    default_timeout_s: 3600.0,
    max_timeout_s: 86400.0,
    output_limit_bytes: 1 << 20,
    max_running_commands: 256,
};

#[derive(Debug, Default)]
struct Options {
    socket: Option<PathBuf>,
    port: Option<PathBuf>,
    spec: Option<PathBuf>,
    work_v2: Option<String>,
    work_v1: Vec<String>,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Option<Self> {
        let mut options = Self::default();
        while let Some(arg) = args.next() {
            let value = args.next()?;
            match arg.as_str() {
                "--socket" => options.socket = Some(value.into()),
                "--port" => options.port = Some(value.into()),
                "--spec" => options.spec = Some(value.into()),
                "--work-v2" => options.work_v2 = Some(value),
                "--work-v1" => options.work_v1.push(value),
                _ => return None,
            }
        }
        (options.socket.is_some() != options.port.is_some()).then_some(options)
    }

    fn open(self) -> io::Result<(Handover, Option<Door>)> {
        let spec = match &self.spec {
            Some(path) => std::fs::read(path)?,
            None => proto::pack(&PLAIN),
        };
        let spec: LaunchSpec = rmp_serde::from_slice(&spec).map_err(io::Error::other)?;
        let confinement = Confinement::from_spec(&spec).map_err(io::Error::other)?;
        let (listener, door) = match (self.socket, self.port) {
            (Some(path), _) => {
                let _ = std::fs::remove_file(&path);
                (std::os::unix::net::UnixListener::bind(path)?.into(), None)
            }
            (None, Some(path)) => (open_directory("/")?, Some(Door::Port(path))),
            (None, None) => return Err(io::ErrorKind::InvalidInput.into()),
        };
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let tasks =
            self.work_v1.iter().map(|path| Ok(rustix::fs::open(path, flags, Mode::empty())?));
        let work_v1 = tasks.collect::<io::Result<_>>()?;
        let work_v2 = self.work_v2.map(|path| open_directory(&path)).transpose()?;
        Ok((
            Handover {
                spec,
                confinement,
                listener,
                work_v2,
                work_v1,
                truth: None,
                rules: Rules::default(),
            },
            door,
        ))
    }
}

/// `aether serve`, for kernels of our own (VMs) and for tests.
pub(crate) fn main(args: impl Iterator<Item = String>) -> ExitCode {
    let Some(options) = Options::parse(args) else {
        standard::eprint_line(USAGE);
        return ExitCode::from(64);
    };
    match options.open() {
        Ok((handover, door)) => serve(handover, door),
        Err(error) => {
            standard::eprint_line(&format!("aether serve: {error}"));
            ExitCode::from(71)
        }
    }
}
