//! The shell itself: started, found not to start, ended, cleared away.

use super::{HIGH, LOW};
use crate::serve::commands::{c_string, environment, mark, nonblocking, pipe, start_refusal, Pipe};
use crate::serve::proto::{self, Refusal};
use crate::serve::server::{Owner, Server, Source};
use crate::sys::poll::Interest;
use crate::sys::process::{self, Candidate, Exec, ExecStep};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

impl Server {
    pub(super) fn start_shell(&mut self, key: u64) -> Result<(), Refusal> {
        let Some(session) = self.sessions.get(&key) else { return Ok(()) };
        let args = session.args.clone();
        let user = self.user(args.user.as_ref().map(|u| u.0.as_str()))?;
        let own = self.spec_env();
        let (mut env, _) = environment(&user, [Some(&own), args.env.as_ref()], false)?;
        let number = self.number();
        if self.work.is_none() {
            env.push(c_string("mark", &mark(self.generation(), number))?);
        }
        let shell = |path: &[u8]| -> Result<Candidate, Refusal> {
            let name = path.rsplit(|b| *b == b'/').next().unwrap_or(path);
            let at = if name == b"bash" { HIGH } else { LOW };
            let words = vec![c_string("shell", name)?, c_string("shell", b"-s")?];
            Ok(Candidate::new(c_string("shell", path)?, words, at))
        };
        let candidates = match &args.shell {
            Some(path) => vec![shell(path)?],
            None => vec![shell(b"/bin/bash")?, shell(b"/bin/sh")?],
        };
        let cwd = self.working_directory(args.cwd.as_deref().map(Vec::as_slice))?;
        let mut exec = Exec::new(candidates, env, cwd, user.ids);
        let (feed_read, feed) = pipe()?;
        let (status, status_write) = pipe()?;
        let (out, out_write) = pipe()?;
        let (err, err_write) = pipe()?;
        for fd in [&feed, &status, &out, &err] {
            nonblocking(fd)?;
        }
        exec.stdio = [feed_read.as_raw_fd(), out_write.as_raw_fd(), err_write.as_raw_fd()];
        // Out of the way of the numbers it may get.
        let extra = rustix::io::fcntl_dupfd_cloexec(&status_write, 100)
            .map_err(|e| Refusal::broken("session", &e.into()))?;
        exec.extra = Some(extra.as_raw_fd());
        let launch = self.launch(exec, &format!("session-{key}-{number}"))?;
        self.owners.insert(launch.pid, Owner::Session(key));
        let mut member = |fd: OwnedFd, source: Source, interest: Interest| {
            let token = self.watch(&fd, source, interest).unwrap_or(0);
            Some(Pipe { fd, token })
        };
        let report = member(launch.report, Source::SessionReport(key), Interest::IN);
        let feed = member(feed, Source::SessionFeed(key), Interest::ONESHOT);
        let status = member(status, Source::SessionStatus(key), Interest::IN);
        let out = member(out, Source::SessionOutput(key, 0), Interest::IN);
        let err = member(err, Source::SessionOutput(key, 1), Interest::IN);
        if let Some(session) = self.sessions.get_mut(&key) {
            session.user = String::from_utf8_lossy(&user.name).into_owned();
            session.pid = launch.pid;
            session.shell = number;
            session.starting = true;
            session.exec = Some(launch.exec);
            session.cgroup = launch.cgroup;
            session.report = report;
            session.feed = feed;
            session.status = status;
            session.pipes = [out, err];
        }
        Ok(())
    }

    /// The shell's child says where it got to.
    pub(crate) fn session_report(&mut self, key: u64) {
        loop {
            let Some(session) = self.sessions.get_mut(&key) else { return };
            let Some(report) = &session.report else { return };
            match process::receive_progress(report.fd.as_fd()) {
                Ok(Some(progress)) if progress.step == ExecStep::Trying => {
                    let exec = session.exec.as_ref();
                    session.answers_at =
                        exec.map_or(LOW, |e| e.extra_at(usize::from(progress.candidate)));
                }
                Ok(Some(progress)) if progress.step == ExecStep::Listener => {
                    self.adopt_listener(progress.fd);
                }
                Ok(Some(progress)) => {
                    let refusal = session.exec.as_ref().map_or_else(
                        || Refusal::new(proto::INTERNAL, "the shell did not start"),
                        |exec| start_refusal(exec, progress.step, progress.errno),
                    );
                    return self.session_failed(key, &refusal);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Ok(None) | Err(_) => {
                    session.starting = false;
                    session.exec = None;
                    let report = session.report.take();
                    if let Some(report) = report {
                        self.unwatch(&report.fd, report.token);
                    }
                    self.feed_command(key);
                    return self.session_streams(key);
                }
            }
        }
    }

    /// The shell cannot be started: there is no such session.
    fn session_failed(&mut self, key: u64, refusal: &Refusal) {
        self.drop_shell(key);
        let Some(session) = self.sessions.remove(&key) else { return };
        if let Some(command) = session.current {
            self.end_session_command(command, 127 << 8, true);
        }
        if let Some(conn) = &mut self.conn {
            for id in session.streams {
                conn.refuse(id, refusal);
            }
        }
    }

    /// The shell itself ended: the command in it did too, and all it had left behind.
    pub(crate) fn session_ended(&mut self, key: u64, status: i32) {
        self.session_report(key);
        self.drain_session(key);
        self.drop_shell(key);
        let Some(session) = self.sessions.get_mut(&key) else { return };
        session.lost = session.current.is_none();
        if let Some(command) = session.current {
            self.end_session_command(command, status, true);
        }
        if self.sessions.get(&key).is_some_and(|s| s.closing) {
            self.forget_session(key);
        } else {
            self.session_streams(key);
        }
    }

    /// Everything of the shell that is no more (or is not to be).
    pub(super) fn drop_shell(&mut self, key: u64) {
        let Some(session) = self.sessions.get_mut(&key) else { return };
        session.kill_group();
        let pid = std::mem::take(&mut session.pid);
        session.starting = false;
        session.exec = None;
        session.told = None;
        session.last_code = 0;
        session.said.clear();
        session.pending = Vec::new();
        let [out, err] = &mut session.pipes;
        let slots = [out, err, &mut session.report, &mut session.feed, &mut session.status];
        let pipes: Vec<Pipe> = slots.into_iter().filter_map(Option::take).collect();
        let group = session.cgroup.take();
        self.leftovers.extend(group);
        self.owners.remove(&pid);
        for pipe in pipes {
            self.unwatch(&pipe.fd, pipe.token);
        }
    }
}
