//! `connect`: a TCP connection to a port inside, relayed under credit in both directions.

use super::conn::Op;
use super::proto::{self, ConnectArgs, Refusal};
use super::server::{Server, Source};
use crate::frame::{self, Kind};
use crate::sys::poll::Interest;
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType};
use serde::Serialize;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;

#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each direction's state")]
pub(super) struct Relay {
    socket: OwnedFd,
    token: u64,
    connected: bool,
    /// To the port.
    output: Vec<u8>,
    sent: usize,
    /// The edge has said END; passed on when `output` is out.
    ended: bool,
    shut: bool,
    /// The port has said its last.
    heard: bool,
}

#[derive(Debug, Serialize)]
struct Connected {
    connected: bool,
}

impl Relay {
    pub(super) fn take_data(&mut self, payload: &[u8]) {
        if !self.ended {
            self.output.extend_from_slice(payload);
        }
    }

    pub(super) fn take_end(&mut self) {
        self.ended = true;
    }

    /// Send what is waiting: bytes that went out, and whether more waits.
    fn feed(&mut self) -> Result<(usize, bool), Errno> {
        let before = self.sent;
        while let Some(rest) = self.output.get(self.sent..).filter(|r| !r.is_empty()) {
            match rustix::net::send(&self.socket, rest, rustix::net::SendFlags::NOSIGNAL) {
                Ok(size) => self.sent += size,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok((self.sent - before, true)),
                Err(errno) => return Err(errno),
            }
        }
        let went = self.sent - before;
        self.output.clear();
        self.sent = 0;
        if self.ended && !self.shut {
            self.shut = true;
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
        }
        Ok((went, false))
    }
}

impl Server {
    pub(super) fn connect(&mut self, id: u32, payload: &[u8]) -> Result<(), Refusal> {
        let args: ConnectArgs = proto::unpack(payload)?;
        let host = match args.host.as_deref() {
            None | Some("" | "localhost") => IpAddr::V4(Ipv4Addr::LOCALHOST),
            Some(host) => {
                host.parse().map_err(|_| Refusal::invalid("host must be a numeric address"))?
            }
        };
        let address = SocketAddr::new(host, args.port);
        let family = if host.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)
            .map_err(|e| Refusal::broken("socket", &e.into()))?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(errno) => return Err(no_port(args.port, errno)),
        }
        let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
        let token = self
            .watch(&socket, Source::Stream(id), Interest::OUT | Interest::ONESHOT)
            .map_err(|e| Refusal::broken("watch", &e))?;
        let relay = Relay {
            socket,
            token,
            connected: false,
            output: Vec::new(),
            sent: 0,
            ended: false,
            shut: false,
            heard: false,
        };
        if let Some(conn) = &mut self.conn {
            conn.open(id, Op::Relay(Box::new(relay)));
        }
        Ok(())
    }

    pub(super) fn abandon_relay(&mut self, relay: &Relay) {
        self.unwatch(&relay.socket, relay.token);
    }

    pub(super) fn step_relay(&mut self, id: u32, mut relay: Box<Relay>) -> Option<Op> {
        match self.relay(id, &mut relay) {
            Ok(true) => Some(Op::Relay(relay)),
            Ok(false) => {
                self.unwatch(&relay.socket, relay.token);
                if let Some(conn) = &mut self.conn {
                    conn.result(id, &());
                }
                None
            }
            Err(refusal) => {
                self.unwatch(&relay.socket, relay.token);
                if let Some(conn) = &mut self.conn {
                    conn.refuse(id, &refusal);
                }
                None
            }
        }
    }

    /// Do what can be done; false when both directions are over.
    fn relay(&mut self, id: u32, relay: &mut Relay) -> Result<bool, Refusal> {
        let mut buffer = self.take_spare(64 * 1024);
        let outcome = self.relay_with(id, relay, &mut buffer);
        self.spare = buffer;
        outcome
    }

    fn relay_with(
        &mut self,
        id: u32,
        relay: &mut Relay,
        buffer: &mut Vec<u8>,
    ) -> Result<bool, Refusal> {
        let Some(conn) = &mut self.conn else { return Ok(true) };
        let mut interest = Interest::ONESHOT;
        if !relay.connected {
            if let Ok(Err(errno)) = rustix::net::sockopt::socket_error(&relay.socket) {
                return Err(no_port(0, errno));
            }
            if rustix::net::getpeername(&relay.socket).is_err() {
                let _ = self.poll.modify(&relay.socket, relay.token, interest | Interest::OUT);
                return Ok(true);
            }
            relay.connected = true;
            conn.event(id, &Connected { connected: true });
        }
        let (went, waiting) = relay.feed().map_err(reset)?;
        if went > 0 {
            conn.grant(id, went);
        }
        interest.set(Interest::OUT, waiting);
        let mut quota = 4;
        while !relay.heard {
            let credit = conn.credit(id).min(64 * 1024);
            if credit == 0 {
                break;
            }
            buffer.clear();
            let space = buffer.spare_capacity_mut();
            match rustix::io::read(&relay.socket, space.get_mut(..credit).unwrap_or(&mut [])) {
                Ok(([], _)) => {
                    relay.heard = true;
                    conn.push(Kind::End, id, frame::MAIN, b"");
                }
                Ok((data, _)) => {
                    conn.data(id, frame::MAIN, data);
                    quota -= 1;
                    if quota == 0 {
                        conn.poke(id);
                        break;
                    }
                }
                Err(Errno::AGAIN) => {
                    interest |= Interest::IN;
                    break;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(reset(errno)),
            }
        }
        if relay.heard && relay.shut {
            return Ok(false);
        }
        if interest != Interest::ONESHOT {
            let _ = self.poll.modify(&relay.socket, relay.token, interest);
        }
        Ok(true)
    }
}

fn no_port(port: u16, errno: Errno) -> Refusal {
    let refusal = Refusal::new(proto::NOT_FOUND, format!("nothing answers at the port: {errno}"));
    let refusal = refusal.kind("port").errno(errno.raw_os_error());
    if port == 0 {
        refusal
    } else {
        refusal.path(port.to_string().as_bytes())
    }
}

fn reset(errno: Errno) -> Refusal {
    Refusal::new(proto::CANCELLED, format!("the connection broke: {errno}"))
        .errno(errno.raw_os_error())
}
