//! What is said in frames: arguments of methods, views, refusals. Words: spec/frames.md.

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize};
use serde_bytes::{ByteBuf, Bytes};
use std::collections::BTreeMap;
use std::fmt;
use std::io;

pub(crate) const NOT_FOUND: &str = "not_found";
pub(crate) const INVALID: &str = "invalid_request";
pub(crate) const CONFLICT: &str = "conflict";
pub(crate) const FULL: &str = "storage_full";
/// What the kernel cannot read: of a layer whose data the store does not give.
pub(crate) const UNREADABLE: &str = "data_unavailable";
pub(crate) const DENIED: &str = "permission_denied";
pub(crate) const TOO_LARGE: &str = "payload_too_large";
pub(crate) const UNSUPPORTED: &str = "unsupported";
pub(crate) const BUSY: &str = "rate_limited";
pub(crate) const INTERNAL: &str = "internal_error";
pub(crate) const CANCELLED: &str = "cancelled";

/// The payload of an ERROR frame.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Refusal {
    code: &'static str,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    errno: Option<i32>,
}

impl Refusal {
    pub(crate) fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), kind: None, step: None, path: None, errno: None }
    }

    pub(crate) fn kind(mut self, kind: &'static str) -> Self {
        self.kind = Some(kind);
        self
    }

    pub(crate) fn step(mut self, step: &'static str) -> Self {
        self.step = Some(step);
        self
    }

    pub(crate) fn path(mut self, path: &[u8]) -> Self {
        let path = &path[..path.len().min(4096)];
        self.path = Some(String::from_utf8_lossy(path).into_owned());
        self
    }

    pub(crate) fn errno(mut self, errno: i32) -> Self {
        self.errno = Some(errno);
        self
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(INVALID, message)
    }

    pub(crate) fn cancelled() -> Self {
        Self::new(CANCELLED, "cancelled")
    }

    /// Our own system call failed where nobody asked for trouble.
    pub(crate) fn broken(step: &'static str, error: &io::Error) -> Self {
        let code = match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EMFILE | libc::ENFILE | libc::ENOMEM) => BUSY,
            _ => INTERNAL,
        };
        let refusal = Self::new(code, format!("{step}: {error}")).step(step);
        refusal.errno(error.raw_os_error().unwrap_or(0))
    }

    /// A call on a path failed as its user.
    pub(crate) fn file(step: &'static str, path: &[u8], error: &io::Error) -> Self {
        let errno = error.raw_os_error().unwrap_or(0);
        let code = match errno {
            libc::ENOENT => NOT_FOUND,
            libc::EACCES | libc::EPERM | libc::EROFS => DENIED,
            libc::EEXIST | libc::ENOTEMPTY | libc::EBUSY | libc::ETXTBSY => CONFLICT,
            libc::ENOSPC | libc::EDQUOT => FULL,
            libc::EIO => UNREADABLE,
            libc::ENOTDIR
            | libc::EISDIR
            | libc::ELOOP
            | libc::EINVAL
            | libc::ENAMETOOLONG
            | libc::EFBIG
            | libc::ENXIO => INVALID,
            libc::EXDEV | libc::EOPNOTSUPP | libc::ENOSYS => UNSUPPORTED,
            _ => INTERNAL,
        };
        let name = String::from_utf8_lossy(&path[..path.len().min(4096)]).into_owned();
        let refusal = Self::new(code, format!("{step} {name}: {error}")).step(step).path(path);
        let refusal = if code == NOT_FOUND { refusal.kind("path") } else { refusal };
        refusal.errno(errno)
    }
}

/// `MessagePack` of a message of our own.
pub(crate) fn pack(value: &impl Serialize) -> Vec<u8> {
    // Maps of plain values into memory: there is nothing that could fail.
    rmp_serde::to_vec_named(value).unwrap_or_default()
}

/// Arguments of a method out of its OPEN.
pub(crate) fn unpack<'a, T: Deserialize<'a>>(payload: &'a [u8]) -> Result<T, Refusal> {
    rmp_serde::from_slice(payload).map_err(|e| Refusal::invalid(format!("arguments: {e}")))
}

/// A user's name; a number is taken for its digits.
#[derive(Debug, Clone)]
pub(crate) struct UserName(pub(crate) String);

impl<'de> Deserialize<'de> for UserName {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = UserName;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a user's name or number")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<UserName, E> {
                Ok(UserName(text.to_owned()))
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<UserName, E> {
                Ok(UserName(number.to_string()))
            }
        }
        input.deserialize_any(Name)
    }
}

#[derive(Debug, Deserialize)]
pub(crate) struct Method<'a> {
    pub(crate) m: &'a str,
}

#[derive(Debug, Clone, Copy, Deserialize)]
pub(crate) struct PtySize {
    #[serde(default = "default_rows")]
    pub(crate) rows: u16,
    #[serde(default = "default_cols")]
    pub(crate) cols: u16,
}

fn default_rows() -> u16 {
    24
}

fn default_cols() -> u16 {
    80
}

pub(crate) type Env = BTreeMap<ByteBuf, ByteBuf>;

/// `start` and `run`.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct CommandArgs {
    pub(crate) command_id: Option<String>,
    pub(crate) argv: Option<Vec<ByteBuf>>,
    pub(crate) shell: Option<ByteBuf>,
    pub(crate) session: Option<String>,
    pub(crate) cwd: Option<ByteBuf>,
    pub(crate) env: Option<Env>,
    pub(crate) user: Option<UserName>,
    pub(crate) stdin: Option<String>,
    pub(crate) pty: Option<PtySize>,
    pub(crate) timeout_s: Option<f64>,
    pub(crate) output_limit_bytes: Option<u64>,
    pub(crate) input: Option<ByteBuf>,
}

/// Methods that name a command.
#[derive(Debug, Deserialize)]
pub(crate) struct OneCommand {
    pub(crate) command_id: String,
    pub(crate) stdout_from: Option<u64>,
    pub(crate) stderr_from: Option<u64>,
    pub(crate) eof: Option<bool>,
    pub(crate) offset: Option<u64>,
    pub(crate) rows: Option<u16>,
    pub(crate) cols: Option<u16>,
    pub(crate) signal: Option<i32>,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct SessionArgs {
    pub(crate) session_id: Option<String>,
    pub(crate) cwd: Option<ByteBuf>,
    pub(crate) env: Option<Env>,
    pub(crate) user: Option<UserName>,
    pub(crate) shell: Option<ByteBuf>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ConnectArgs {
    pub(crate) port: u16,
    pub(crate) host: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ShutdownArgs {
    pub(crate) grace_s: Option<f64>,
}

/// Every file method: each uses what it needs.
#[derive(Debug, Deserialize)]
pub(crate) struct FileArgs {
    #[serde(default)]
    pub(crate) path: ByteBuf,
    pub(crate) to: Option<ByteBuf>,
    pub(crate) user: Option<UserName>,
    pub(crate) offset: Option<u64>,
    pub(crate) length: Option<u64>,
    pub(crate) mode: Option<u32>,
    pub(crate) atomic: Option<bool>,
    pub(crate) sync: Option<bool>,
    pub(crate) parents: Option<bool>,
    pub(crate) sha256: Option<String>,
    pub(crate) append: Option<bool>,
    pub(crate) follow: Option<bool>,
    pub(crate) depth: Option<u32>,
    pub(crate) overwrite: Option<bool>,
    pub(crate) recursive: Option<bool>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Hello<'a> {
    pub(crate) protocol: u32,
    pub(crate) version: &'a str,
    pub(crate) id: &'a str,
    pub(crate) generation: u64,
    pub(crate) pid: u32,
}

/// The keys of `dsec.wire.sandbox.CommandView`.
#[derive(Debug, Clone, Serialize)]
#[expect(clippy::struct_excessive_bools, reason = "the shape of the message")]
pub(crate) struct CommandView {
    pub(crate) command_id: String,
    pub(crate) argv: Vec<String>,
    pub(crate) session: String,
    pub(crate) running: bool,
    pub(crate) pid: i32,
    pub(crate) started_at: f64,
    pub(crate) exit_code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) timed_out: bool,
    pub(crate) oom_killed: bool,
    pub(crate) killed: bool,
    pub(crate) duration_s: f64,
    pub(crate) timeout_s: f64,
    pub(crate) session_reset: bool,
    pub(crate) stdout_bytes: u64,
    pub(crate) stderr_bytes: u64,
}

/// What is kept of a stream: here, or sent as DATA before this (then the lengths are set).
#[derive(Debug, Serialize)]
pub(crate) struct Captured<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) head: Option<&'a Bytes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tail: Option<&'a Bytes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) head_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tail_bytes: Option<u64>,
    pub(crate) dropped_bytes: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct CommandResult<'a> {
    #[serde(flatten)]
    pub(crate) view: CommandView,
    pub(crate) stdout: Captured<'a>,
    pub(crate) stderr: Captured<'a>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Started {
    pub(crate) started: CommandView,
}

#[derive(Debug, Serialize)]
pub(crate) struct Exited {
    pub(crate) exited: CommandView,
}

#[derive(Debug, Serialize)]
pub(crate) struct GapEvent {
    pub(crate) gap: Gap,
}

#[derive(Debug, Serialize)]
pub(crate) struct Gap {
    pub(crate) channel: u16,
    pub(crate) offset: u64,
    pub(crate) dropped_bytes: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct Written {
    pub(crate) written: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct More<T> {
    pub(crate) more: Vec<T>,
}

#[derive(Debug, Serialize)]
pub(crate) struct SessionView {
    pub(crate) session_id: String,
    pub(crate) pid: i32,
    pub(crate) busy: bool,
    pub(crate) user: String,
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct Usage {
    pub(crate) at: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cpu_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) memory_peak_bytes: Option<u64>,
    pub(crate) pids: u64,
}
