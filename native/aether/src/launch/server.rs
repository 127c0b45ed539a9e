//! The loop: requests from the edge one at a time, children that end in between.

use super::ground::Ground;
use super::report::Report;
use super::{host, plan, BAD_INPUT};
use crate::serve::truth;
use crate::spec::{ExitNotice, LaunchReply, LaunchRequest};
use crate::sys::io::eprint_line;
use crate::sys::{fdpass, namespace, reap};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// Where the edge left its socket.
const EDGE: i32 = 3;
/// The longest request; a specification is a few kilobytes.
const LONGEST: usize = 4 << 20;

#[derive(Debug)]
struct Server {
    edge: UnixStream,
    signals: OwnedFd,
    ground: Ground,
    /// Sandbox ids by the process id of their first process.
    running: HashMap<i32, String>,
}

/// A sandbox's first process is a copy of our memory, so the secrets of one sandbox must be gone
/// from it before the next is made.
fn forget(secrets: impl Iterator<Item = String>) {
    secrets.map(String::into_bytes).for_each(|mut secret| erase(&mut secret));
}

fn erase(bytes: &mut [u8]) {
    bytes.fill(0);
    // Else the compiler leaves out writes to memory that nobody reads again.
    std::hint::black_box(bytes);
}

/// Just enough to answer a request that cannot be read.
#[derive(Debug, Deserialize)]
struct Asked {
    id: u64,
}

/// Serve until the edge closes its end.
pub(super) fn main() -> ExitCode {
    if let Some(error) = shed() {
        eprint_line(&format!("aether launch: cannot start anew: {error}"));
        return ExitCode::from(71);
    }
    let edge = match fdpass::inherit_stream(EDGE) {
        Ok(edge) => edge,
        Err(error) => {
            eprint_line(&format!(
                "aether launch: descriptor 3 must be a Unix stream socket: {error}"
            ));
            return ExitCode::from(BAD_INPUT);
        }
    };
    truth::learn();
    let ground = match Ground::prepare() {
        Ok(ground) => ground,
        Err(error) => {
            eprint_line(&format!("aether launch: {error}"));
            return ExitCode::from(71);
        }
    };
    let served = reap::child_signals()
        .and_then(|signals| Server { edge, signals, ground, running: HashMap::new() }.serve());
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if edge_is_gone(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprint_line(&format!("aether launch: {error}"));
            ExitCode::from(BAD_INPUT)
        }
    }
}

/// Start again without our arguments and environment, unless that is done: PID 1 of a sandbox is a
/// copy of this process, and everybody inside can read its command line.
fn shed() -> Option<io::Error> {
    const NAME: &str = "aether";
    let for_tests =
        |name: &OsStr| cfg!(debug_assertions) && name.to_string_lossy().starts_with("AETHER_");
    let kept: Vec<_> = std::env::vars_os().filter(|(name, _)| for_tests(name)).collect();
    let shed = std::env::vars_os().count() == kept.len();
    if shed && std::env::args_os().next().is_some_and(|name| name == NAME) {
        return namespace::set_name(c"aether-launch").err();
    }
    let mut again = Command::new("/proc/self/exe");
    Some(again.arg0(NAME).arg("launch").env_clear().envs(kept).exec())
}

fn edge_is_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

impl Server {
    fn serve(mut self) -> io::Result<()> {
        loop {
            let sources = [self.edge.as_fd(), self.signals.as_fd()];
            let [asked, ended] = fdpass::wait_readable(sources, -1)?;
            if ended {
                reap::drain(&self.signals);
                self.reap()?;
            }
            if asked {
                let Some(mut request) = self.read()? else { return Ok(()) };
                self.answer(&request)?;
                erase(&mut request);
            }
        }
    }

    fn reap(&mut self) -> io::Result<()> {
        while let Some((pid, status)) = reap::ended() {
            if let Some(exited) = self.running.remove(&pid) {
                self.write(&ExitNotice { exited, status })?;
            }
        }
        Ok(())
    }

    fn answer(&mut self, request: &[u8]) -> io::Result<()> {
        let reply = match rmp_serde::from_slice::<LaunchRequest>(request) {
            Ok(request) => self.launch(request),
            Err(error) => {
                let unreadable = |_| io::Error::new(io::ErrorKind::InvalidData, error.to_string());
                let id = rmp_serde::from_slice::<Asked>(request).map_err(unreadable)?.id;
                let errno = libc::EINVAL;
                let (step, message) = ("read request".to_owned(), error.to_string());
                LaunchReply { id, step, errno, message, ..LaunchReply::default() }
            }
        };
        self.write(&reply)
    }

    fn launch(&mut self, request: LaunchRequest) -> LaunchReply {
        let LaunchRequest { id, spec } = &request;
        let launched = plan::plan(spec)
            .map_err(Report::from)
            .and_then(|plan| host::launch(&self.ground, spec, &plan));
        let reply = match launched {
            Ok(host::Launched { pid, micros }) => {
                self.running.insert(pid, spec.id.clone());
                LaunchReply { id: *id, pid, micros, ..LaunchReply::default() }
            }
            Err(Report { step, path, errno, message, micros }) => {
                LaunchReply { id: *id, pid: 0, step, path, errno, message, micros }
            }
        };
        forget(request.spec.env.into_values());
        reply
    }

    /// One request; `None` when the edge has closed its end.
    fn read(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut length = [0; 4];
        let got = self.edge.read(&mut length)?;
        if got == 0 {
            return Ok(None);
        }
        self.edge.read_exact(length.get_mut(got..).unwrap_or_default())?;
        let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
        if length > LONGEST {
            let text = format!("a request of {length} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let mut request = vec![0; length];
        self.edge.read_exact(&mut request)?;
        Ok(Some(request))
    }

    fn write(&mut self, message: &impl Serialize) -> io::Result<()> {
        let body = rmp_serde::to_vec_named(message).map_err(io::Error::other)?;
        let length = u32::try_from(body.len()).map_err(io::Error::other)?;
        let mut frame = length.to_be_bytes().to_vec();
        frame.extend(body);
        self.edge.write_all(&frame)
    }
}
