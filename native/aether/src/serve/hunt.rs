//! Ending a command's processes where no cgroup knows them: group, session, descent, and a mark in
//! the environment for those that left all three.

use crate::sys::process;
use std::collections::HashMap;
use std::time::Duration;

struct Found {
    parent: i32,
    group: i32,
    session: i32,
    marked: bool,
}

fn look(pid: i32, mark: &[u8]) -> Option<Found> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    let mut next = || fields.next()?.parse().ok();
    let (parent, group, session) = (next()?, next()?, next()?);
    let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let marked = environ.split(|b| *b == 0).any(|entry| entry == mark);
    Some(Found { parent, group, session, marked })
}

fn processes(mark: &[u8]) -> HashMap<i32, Found> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return HashMap::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|pid| Some((pid, look(pid, mark)?)))
        .collect()
}

fn descends(all: &HashMap<i32, Found>, mut pid: i32, from: i32) -> bool {
    for _ in 0..all.len() {
        match all.get(&pid) {
            Some(found) if found.parent == from => return true,
            Some(found) => pid = found.parent,
            None => return false,
        }
    }
    false
}

/// Until two looks in a row find nothing, at most for a few seconds.
pub(super) fn run(root: i32, mark: &[u8]) {
    let me = i32::try_from(std::process::id()).unwrap_or(0);
    let mut clean = 0;
    for _ in 0..250 {
        let all = processes(mark);
        let prey = all.iter().filter(|(pid, found)| {
            let belongs = found.group == root || found.session == root || found.marked;
            **pid != me && **pid != 1 && (belongs || descends(&all, **pid, root))
        });
        let mut seen = 0;
        for (pid, _) in prey {
            let _ = process::kill(*pid, libc::SIGKILL);
            seen += 1;
        }
        clean = if seen == 0 { clean + 1 } else { 0 };
        if clean == 2 {
            return;
        }
        std::thread::sleep(Duration::from_millis(if seen == 0 { 5 } else { 20 }));
    }
}
