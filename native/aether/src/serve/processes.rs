//! `processes` (in a worker: reading a process's arguments can be made to wait by that process) and
//! `usage`.

use super::cgroup::read_at;
use super::files::{send_more, Answer, Channel};
use super::proto::{pack, More, Usage};
use super::server::Server;
use serde::Serialize;
use std::io::Read;

#[derive(Debug, Serialize)]
struct Process {
    pid: i32,
    ppid: i32,
    uid: u32,
    state: String,
    rss_bytes: u64,
    cpu_s: f64,
    argv: Vec<String>,
}

fn pids() -> Vec<i32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let mut pids: Vec<i32> = names.collect();
    pids.sort_unstable();
    pids
}

fn look(pid: i32) -> Option<Process> {
    use std::os::unix::fs::MetadataExt;
    let uid = std::fs::metadata(format!("/proc/{pid}")).ok()?.uid();
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (begin, rest) = stat.rsplit_once(") ")?;
    let name = begin.split_once('(').map_or("", |(_, name)| name);
    let fields: Vec<&str> = rest.split(' ').collect();
    let number = |at: usize| fields.get(at).and_then(|f| f.parse::<u64>().ok()).unwrap_or(0);
    let mut line = Vec::new();
    if let Ok(file) = std::fs::File::open(format!("/proc/{pid}/cmdline")) {
        let _ = file.take(4096).read_to_end(&mut line);
    }
    let line = line.strip_suffix(b"\0").unwrap_or(&line);
    let mut argv: Vec<String> = Vec::new();
    if line.is_empty() {
        argv.push(format!("[{name}]"));
    } else {
        argv.extend(line.split(|b| *b == 0).map(|word| String::from_utf8_lossy(word).into_owned()));
    }
    let ticks = u32::try_from(number(11) + number(12)).unwrap_or(u32::MAX);
    Some(Process {
        pid,
        ppid: fields.get(1).and_then(|f| f.parse().ok()).unwrap_or(0),
        uid,
        state: fields.first().map_or_else(String::new, |s| (*s).to_owned()),
        rss_bytes: number(21).saturating_mul(4096),
        cpu_s: f64::from(ticks) / 100.0,
        argv,
    })
}

pub(super) fn list(channel: &Channel) -> Answer {
    let me = i32::try_from(std::process::id()).unwrap_or(0);
    let mut batch = Vec::new();
    for pid in pids() {
        if pid != me {
            batch.extend(look(pid));
        }
        // A process is at most its arguments and less than a kilobyte.
        if batch.len() == 100 {
            send_more(channel, &More { more: std::mem::take(&mut batch) })?;
        }
    }
    Ok(pack(&batch))
}

impl Server {
    pub(super) fn usage(&mut self, id: u32) {
        let read = |file| self.work.as_ref().and_then(|work| read_at(work, file).ok());
        let micros = read("cpu.stat").and_then(|text| {
            let line = text.lines().find_map(|l| l.strip_prefix("usage_usec "))?;
            line.trim().parse::<u64>().ok()
        });
        let number = |file| read(file).and_then(|text| text.trim().parse().ok());
        let usage = Usage {
            at: super::commands::now(),
            cpu_s: micros.map(|m| std::time::Duration::from_micros(m).as_secs_f64()),
            memory_bytes: number("memory.current"),
            memory_peak_bytes: number("memory.peak"),
            pids: super::long(pids().len()),
        };
        if let Some(conn) = &mut self.conn {
            conn.result(id, &usage);
        }
    }
}
