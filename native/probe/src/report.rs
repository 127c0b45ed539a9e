//! What this process sees of itself and its surroundings, as JSON.

use crate::sys;
use std::fmt::Write;
use std::fs;

fn text(path: &str) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}

fn quote(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => {
                out.push('\\');
                out.push(c);
            }
            c if c < ' ' => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

fn list(items: impl IntoIterator<Item = String>) -> String {
    format!("[{}]", items.into_iter().collect::<Vec<_>>().join(","))
}

fn map(items: impl IntoIterator<Item = (String, String)>) -> String {
    let pairs = items.into_iter().map(|(name, value)| format!("{}:{value}", quote(&name)));
    format!("{{{}}}", pairs.collect::<Vec<_>>().join(","))
}

fn lines(path: &str) -> String {
    list(text(path).lines().map(quote))
}

fn status() -> Vec<(String, String)> {
    let status = text("/proc/self/status");
    let pairs = status.lines().filter_map(|line| line.split_once(":\t"));
    pairs.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect()
}

/// `{"uid": 0, "gid": 0, "groups": [0]}` and a newline.
pub(crate) fn id() -> String {
    let status = status();
    let field = |wanted: &str| {
        let found = status.iter().find(|(name, _)| name == wanted);
        found.map_or("", |(_, value)| value.as_str())
    };
    let first = |text: &str| text.split_whitespace().next().unwrap_or("-1").to_owned();
    let groups = list(field("Groups").split_whitespace().map(str::to_owned));
    let items = [("uid", first(field("Uid"))), ("gid", first(field("Gid"))), ("groups", groups)];
    format!("{}\n", map(items.map(|(name, value)| (name.to_owned(), value))))
}

fn namespaces() -> String {
    let entries = fs::read_dir("/proc/self/ns").into_iter().flatten().flatten();
    map(entries.filter_map(|entry| {
        let target = fs::read_link(entry.path()).ok()?;
        let name = entry.file_name().to_string_lossy().into_owned();
        Some((name, quote(&target.to_string_lossy())))
    }))
}

fn descriptors() -> String {
    // Names first: the directory being read is a descriptor itself until it is dropped.
    let entries = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
    map(names.iter().filter_map(|name| {
        let target = fs::read_link(std::path::Path::new("/proc/self/fd").join(name)).ok()?;
        Some((name.to_string_lossy().into_owned(), quote(&target.to_string_lossy())))
    }))
}

fn limits() -> String {
    let known = [
        ("nofile", libc::RLIMIT_NOFILE),
        ("nproc", libc::RLIMIT_NPROC),
        ("core", libc::RLIMIT_CORE),
        ("fsize", libc::RLIMIT_FSIZE),
        ("memlock", libc::RLIMIT_MEMLOCK),
        ("stack", libc::RLIMIT_STACK),
        ("as", libc::RLIMIT_AS),
        ("cpu", libc::RLIMIT_CPU),
    ];
    map(known.map(|(name, which)| {
        let (soft, hard) = sys::limit(which);
        (name.to_owned(), format!("[{soft},{hard}]"))
    }))
}

pub(crate) fn all() -> String {
    let status = status().into_iter().map(|(name, value)| (name, quote(&value)));
    let number = |path: &str| quote(text(path).trim());
    let items = [
        ("pid", std::process::id().to_string()),
        ("id", id().trim().to_owned()),
        ("status", map(status)),
        ("uid_map", lines("/proc/self/uid_map")),
        ("gid_map", lines("/proc/self/gid_map")),
        ("namespaces", namespaces()),
        ("mounts", lines("/proc/self/mountinfo")),
        ("limits", limits()),
        ("fds", descriptors()),
        ("cgroup", lines("/proc/self/cgroup")),
        ("oom_score_adj", number("/proc/self/oom_score_adj")),
        ("hostname", number("/proc/sys/kernel/hostname")),
        ("cpus", number("/sys/devices/system/cpu/online")),
        ("cwd", quote(&std::env::current_dir().unwrap_or_default().to_string_lossy())),
    ];
    format!("{}\n", map(items.map(|(name, value)| (name.to_owned(), value))))
}
