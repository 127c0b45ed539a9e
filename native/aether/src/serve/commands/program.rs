//! What a command's child executes: words, environment, places to look; and why it could not.

use crate::serve::proto::{self, Env, Refusal};
use crate::serve::users::User;
use crate::sys::process::{Candidate, Exec, ExecStep};
use serde_bytes::ByteBuf;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;

const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

pub(crate) fn c_string(what: &str, bytes: &[u8]) -> Result<CString, Refusal> {
    CString::new(bytes).map_err(|_| Refusal::invalid(format!("{what} holds a NUL byte")))
}

/// NUL-terminated `NAME=value` strings, and the PATH among them.
pub(crate) fn environment(
    user: &User,
    layers: [Option<&Env>; 2],
    terminal: bool,
) -> Result<(Vec<CString>, Vec<u8>), Refusal> {
    let mut all: BTreeMap<&[u8], &[u8]> = BTreeMap::from([
        (&b"PATH"[..], DEFAULT_PATH),
        (b"HOME", &user.home),
        (b"USER", &user.name),
        (b"LOGNAME", &user.name),
        (b"SHELL", &user.shell),
    ]);
    if terminal {
        all.insert(b"TERM", b"xterm-256color");
    }
    for layer in layers.into_iter().flatten() {
        for (name, value) in layer {
            if name.is_empty() || name.contains(&b'=') {
                return Err(Refusal::invalid("env: a name is empty or holds '='"));
            }
            all.insert(name, value);
        }
    }
    let path = all.get(&b"PATH"[..]).map_or_else(Vec::new, |p| p.to_vec());
    let strings =
        all.iter().map(|(name, value)| c_string("env", &[name, &b"="[..], value].concat()));
    Ok((strings.collect::<Result<_, _>>()?, path))
}

pub(super) fn candidates(argv: &[ByteBuf], path: &[u8]) -> Result<Vec<Candidate>, Refusal> {
    let name = argv.first().filter(|n| !n.is_empty());
    let name = name.ok_or_else(|| Refusal::invalid("argv: the first word is empty"))?;
    let words = || argv.iter().map(|word| c_string("argv", word)).collect::<Result<Vec<_>, _>>();
    if name.contains(&b'/') {
        return Ok(vec![Candidate::new(c_string("argv", name)?, words()?, -1)]);
    }
    let places = path.split(|b| *b == b':').take(256);
    let files = places.map(|place| {
        let place: &[u8] = if place.is_empty() { b"." } else { place };
        c_string("argv", &[place, b"/", name].concat())
    });
    // The words are shared by the search, not copied for each place.
    let words = words()?;
    Ok(vec![Candidate::search(files.collect::<Result<_, _>>()?, words)])
}

pub(crate) fn shells(text: &[u8]) -> Result<Vec<Candidate>, Refusal> {
    let shell = |path: &str| -> Result<Candidate, Refusal> {
        let name = path.rsplit('/').next().unwrap_or(path);
        let words = vec![
            c_string("shell", name.as_bytes())?,
            c_string("shell", b"-c")?,
            c_string("shell", text)?,
        ];
        Ok(Candidate::new(c_string("shell", path.as_bytes())?, words, -1))
    };
    Ok(vec![shell("/bin/bash")?, shell("/bin/sh")?])
}

/// What the environment of a command's processes says where no cgroup knows them.
pub(crate) fn mark(generation: u64, key: u64) -> Vec<u8> {
    format!("DSEC_COMMAND={generation:x}-{key}").into_bytes()
}

/// Why a child did not become its program, in the words of the error table.
pub(crate) fn start_refusal(exec: &Exec, step: ExecStep, errno: i32) -> Refusal {
    let error = io::Error::from_raw_os_error(errno);
    let program = exec.name().to_bytes();
    let name = String::from_utf8_lossy(program).into_owned();
    let (path, refusal) = match (step, errno) {
        (ExecStep::Cwd, libc::ENOENT) => {
            let refusal = Refusal::new(proto::NOT_FOUND, "the working directory does not exist");
            (exec.cwd.as_bytes(), refusal.kind("cwd"))
        }
        (ExecStep::Cwd, _) => {
            return Refusal::file("cwd", exec.cwd.as_bytes(), &error);
        }
        (ExecStep::Execute, libc::ENOENT | libc::ENOTDIR) => {
            let refusal = Refusal::new(proto::NOT_FOUND, format!("{name}: no such program"));
            (program, refusal.kind("executable"))
        }
        (ExecStep::Execute, libc::EACCES | libc::EPERM) => {
            (program, Refusal::new(proto::DENIED, format!("{name}: not executable")))
        }
        (ExecStep::Execute, libc::E2BIG) => {
            (program, Refusal::new(proto::TOO_LARGE, "arguments and environment are too large"))
        }
        (ExecStep::Execute, libc::ENOEXEC | libc::EISDIR | libc::ELOOP | libc::ENAMETOOLONG) => {
            (program, Refusal::invalid(format!("{name}: {error}")))
        }
        (ExecStep::Execute, libc::EIO) => {
            (program, Refusal::new(proto::UNREADABLE, format!("{name}: {error}")))
        }
        (ExecStep::Terminal, libc::ENOSPC) => {
            (&b""[..], Refusal::new(proto::BUSY, "no more terminals").kind("terminals"))
        }
        _ => return Refusal::broken(step.name(), &error),
    };
    refusal.step(step.name()).path(path).errno(errno)
}
