//! Work that may block runs in a forked child, as the user it is for: a FIFO, a hung mount or a huge
//! tree holds up nobody, permissions are the kernel's to judge, and the cost is the sandbox's.
//!
//! Child and loop are joined by a socket with the same frames as the edge's; the loop relays them
//! under the stream's credit.

use super::cgroup::Cgroup;
use super::conn::Op;
use super::files::{self, Channel, Request};
use super::hunt;
use super::proto::{self, FileArgs, Refusal};
use super::server::{Owner, Server, Source, Timer};
use super::users::Accounts;
use crate::frame::{self, Kind};
use crate::sys::poll::Interest;
use crate::sys::process::{self, Forked, Ids};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// What is left to do when a worker ends.
#[derive(Debug)]
pub(super) struct Bereaved {
    cgroup: Option<Cgroup>,
    /// The command it was hunting for.
    hunted: Option<u64>,
}

/// A worker, from the side of the loop.
#[derive(Debug)]
pub(super) struct Work {
    socket: OwnedFd,
    token: u64,
    pid: i32,
    /// It may have something half done to remove.
    tidies: bool,
    /// From the worker: frames, from `at` on.
    input: Vec<u8>,
    at: usize,
    /// Of a DATA frame whose header is taken: its channel and what is still to come.
    data: (u16, usize),
    /// To the worker.
    output: Vec<u8>,
    sent: usize,
    /// DATA bytes in `output`, given back as credit once they are through.
    owed: usize,
}

impl Work {
    pub(super) fn take_data(&mut self, payload: &[u8]) {
        frame::push(&mut self.output, Kind::Data, 0, frame::MAIN, payload);
        self.owed += payload.len();
    }

    pub(super) fn take_end(&mut self) {
        frame::push(&mut self.output, Kind::End, 0, frame::MAIN, b"");
    }

    /// Write to the worker; true when something is still waiting.
    fn feed(&mut self) -> bool {
        while let Some(rest) = self.output.get(self.sent..).filter(|r| !r.is_empty()) {
            match rustix::io::write(&self.socket, rest) {
                Ok(size) => self.sent += size,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return true,
                // It is gone or has said its last; what it said is still to be read.
                Err(_) => break,
            }
        }
        self.output.clear();
        self.sent = 0;
        false
    }

    /// Read more, with the loop's buffer if this one has none.
    fn fill(&mut self, spare: &mut Vec<u8>) -> Fill {
        self.input.drain(..self.at);
        self.at = 0;
        if self.input.capacity() == 0 {
            self.input = std::mem::take(spare);
            self.input.clear();
        }
        self.input.reserve(160 * 1024);
        match rustix::io::read(&self.socket, rustix::buffer::spare_capacity(&mut self.input)) {
            Ok(0) => Fill::Closed,
            Ok(_) => Fill::Some,
            Err(Errno::AGAIN | Errno::INTR) => {
                if self.input.is_empty() {
                    *spare = std::mem::take(&mut self.input);
                }
                Fill::Later
            }
            Err(_) => Fill::Closed,
        }
    }
}

enum Fill {
    Some,
    Later,
    Closed,
}

impl Server {
    /// Fork: the child runs `body` as `ids` (None: as it is) and ends.
    fn fork_worker(
        &mut self,
        ids: Option<&Ids>,
        keep: RawFd,
        hunted: Option<u64>,
        body: impl FnOnce(),
    ) -> Result<i32, Refusal> {
        let number = self.number();
        let cgroup = match &self.work {
            Some(work) => {
                let name = format!("files-{number}");
                Some(Cgroup::create(work, name).map_err(|e| Refusal::broken("cgroup", &e))?)
            }
            None => None,
        };
        match process::fork(cgroup.as_ref().map(Cgroup::fd)) {
            Ok(Forked::Child) => {
                let ready = process::join_groups(&self.tasks)
                    .and_then(|()| self.confinement.apply())
                    .and_then(|()| match ids {
                        Some(ids) => process::become_user(ids, self.confinement.keep_capabilities),
                        None => Ok(()),
                    });
                // After the change of ids, which would take it back.
                process::die_with_parent();
                process::prefer_for_oom();
                process::close_others(keep);
                if ready.is_ok() {
                    body();
                }
                process::exit_now(i32::from(ready.is_err()))
            }
            Ok(Forked::Parent(pid)) => {
                self.owners.insert(pid, Owner::Worker(Bereaved { cgroup, hunted }));
                Ok(pid)
            }
            Err(error) => {
                self.leftovers.extend(cgroup);
                Err(Refusal::broken("clone", &error))
            }
        }
    }

    pub(super) fn file_method(
        &mut self,
        id: u32,
        method: &str,
        payload: &[u8],
    ) -> Result<(), Refusal> {
        let Some(method) = files::method(method) else {
            return Err(Refusal::new(proto::UNSUPPORTED, format!("no method {method}")));
        };
        let args: FileArgs = proto::unpack(payload)?;
        let user = if method == files::Method::Processes {
            Accounts::default().resolve("root")?
        } else {
            self.user(args.user.as_ref().map(|u| u.0.as_str()))?
        };
        for path in [Some(&args.path), args.to.as_ref()].into_iter().flatten() {
            if path.contains(&0) {
                return Err(Refusal::invalid("path holds a NUL byte"));
            }
        }
        let base = if self.spec.workdir.is_empty() { "/" } else { &self.spec.workdir };
        let request = Request { method, base: base.as_bytes().to_vec(), args };
        let pair = || {
            rustix::net::socketpair(
                rustix::net::AddressFamily::UNIX,
                rustix::net::SocketType::STREAM,
                rustix::net::SocketFlags::CLOEXEC,
                None,
            )
        };
        let (socket, theirs) = pair().map_err(|e| Refusal::broken("socket", &e.into()))?;
        let keep = theirs.as_raw_fd();
        let ruled = self.rules.any();
        let body = move || files::work(&request, &Channel::new(theirs), &Accounts::read(ruled));
        let pid = self.fork_worker(Some(&user.ids), keep, None, body)?;
        super::commands::nonblocking(&socket)?;
        let token = self
            .watch(&socket, Source::Stream(id), Interest::ONESHOT | Interest::IN)
            .map_err(|e| Refusal::broken("watch", &e))?;
        let work = Work {
            socket,
            token,
            pid,
            tidies: method == files::Method::Write,
            input: Vec::new(),
            at: 0,
            data: (0, 0),
            output: Vec::new(),
            sent: 0,
            owed: 0,
        };
        if let Some(conn) = &mut self.conn {
            conn.open(id, Op::Work(Box::new(work)));
        }
        Ok(())
    }

    pub(super) fn step_work(&mut self, id: u32, mut work: Box<Work>) -> Option<Op> {
        let waiting_out = work.feed();
        let Some(conn) = &mut self.conn else { return Some(Op::Work(work)) };
        if !waiting_out && work.owed > 0 {
            conn.grant(id, work.owed);
            work.owed = 0;
        }
        let mut interest = Interest::ONESHOT;
        interest.set(Interest::OUT, waiting_out);
        let mut quota: usize = 256 * 1024;
        loop {
            let available = work.input.get(work.at..).unwrap_or(&[]);
            let (channel, left) = work.data;
            if left > 0 && !available.is_empty() {
                let size = left.min(available.len()).min(conn.credit(id));
                if size == 0 {
                    break;
                }
                conn.data(id, channel, available.get(..size).unwrap_or(&[]));
                work.at += size;
                work.data.1 -= size;
                quota = quota.saturating_sub(size);
                if quota == 0 {
                    conn.poke(id);
                    break;
                }
                continue;
            }
            let header = if left > 0 { Ok(None) } else { frame::parse(available) };
            let payload = match &header {
                Ok(Some(head)) if head.kind != Kind::Data => {
                    available.get(frame::HEADER..frame::HEADER + head.size)
                }
                _ => Some(&[][..]),
            };
            match (header, payload) {
                (Ok(Some(head)), Some(payload)) => {
                    match head.kind {
                        Kind::Data => {
                            work.data = (head.channel, head.size);
                            work.at += frame::HEADER;
                            continue;
                        }
                        Kind::Event | Kind::Result | Kind::Error => {
                            conn.push(head.kind, id, frame::MAIN, payload);
                        }
                        Kind::End => conn.push(Kind::End, id, head.channel, b""),
                        _ => {}
                    }
                    work.at += frame::HEADER + payload.len();
                    quota = quota.saturating_sub(payload.len() + 64);
                    if matches!(head.kind, Kind::Result | Kind::Error) {
                        conn.streams.remove(&id);
                        self.unwatch(&work.socket, work.token);
                        return None;
                    }
                    if quota == 0 {
                        conn.poke(id);
                        break;
                    }
                }
                (Ok(_), _) => match work.fill(&mut self.spare) {
                    Fill::Some => {}
                    Fill::Later => {
                        interest |= Interest::IN;
                        break;
                    }
                    Fill::Closed => {
                        conn.refuse(
                            id,
                            &Refusal::new(proto::INTERNAL, "the worker for this was killed"),
                        );
                        self.unwatch(&work.socket, work.token);
                        return None;
                    }
                },
                (Err(_), _) => {
                    conn.refuse(
                        id,
                        &Refusal::new(proto::INTERNAL, "the worker for this is broken"),
                    );
                    self.abandon_work(*work);
                    return None;
                }
            }
        }
        if interest != Interest::ONESHOT {
            let _ = self.poll.modify(&work.socket, work.token, interest);
        }
        Some(Op::Work(work))
    }

    /// Nobody wants it any more: it is killed. One that has something half done sees its channel
    /// close and has a moment to remove it.
    pub(super) fn abandon_work(&mut self, work: Work) {
        self.unwatch(&work.socket, work.token);
        let (pid, tidies) = (work.pid, work.tidies);
        drop(work);
        if tidies {
            self.after(Duration::from_millis(500), Timer::KillWorker(pid));
        } else {
            self.kill_worker(pid);
        }
    }

    pub(super) fn kill_worker(&mut self, pid: i32) {
        // Not reaped, so the number is still its own; that it is another worker's would need it to
        // be reaped and its number used again within the delay: that worker's stream says so.
        if matches!(self.owners.get(&pid), Some(Owner::Worker(_))) {
            let _ = process::kill(pid, libc::SIGKILL);
        }
    }

    pub(super) fn worker_ended(&mut self, bereaved: Bereaved) {
        self.leftovers.extend(bereaved.cgroup);
        if let Some(key) = bereaved.hunted {
            if let Some(command) = self.commands.get_mut(&key) {
                command.hunted = command.hunted.saturating_sub(1);
            }
            self.poke_command(key);
        }
        self.trim_later();
    }

    /// Without cgroups: a worker looks for all that descends from a command and ends it.
    pub(super) fn hunt(&mut self, key: u64, pid: i32) {
        let mark = super::commands::mark(self.generation(), key);
        let keep = self.null.as_raw_fd();
        if let Ok(_pid) = self.fork_worker(None, keep, Some(key), move || hunt::run(pid, &mark)) {
            if let Some(command) = self.commands.get_mut(&key) {
                command.hunted += 1;
            }
        }
    }
}
