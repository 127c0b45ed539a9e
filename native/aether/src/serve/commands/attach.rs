//! Output on its way to the edge: all that is kept, at the end (`run`, `wait`), or as it comes
//! (`attach`).

use super::{Command, State};
use crate::frame;
use crate::serve::conn::{Conn, Copying, Op, Reader};
use crate::serve::long;
use crate::serve::proto::{self, OneCommand, Refusal};
use crate::serve::ring::{Piece, Ring};
use crate::serve::server::Server;
use serde_bytes::Bytes;

/// Kept output up to this size comes inside the answer, more comes as DATA before it.
const INLINE: usize = 256 * 1024;

impl Server {
    pub(crate) fn step_wait(
        &mut self,
        stream: u32,
        key: u64,
        copying: Option<Copying>,
    ) -> Option<Op> {
        let (Some(conn), Some(command)) = (&mut self.conn, self.commands.get_mut(&key)) else {
            return None;
        };
        if command.state != State::Ended {
            return Some(Op::Wait(key, copying));
        }
        let inline = copying.is_none() && command.kept() <= INLINE;
        if !inline {
            let mut copying = copying.unwrap_or_default();
            if !copy_out(conn, stream, command, &mut copying) {
                return Some(Op::Wait(key, Some(copying)));
            }
        }
        let view = command.view();
        let [out, err] = &mut command.rings;
        let result = proto::CommandResult {
            view,
            stdout: captured(out, inline),
            stderr: captured(err, inline),
        };
        conn.result(stream, &result);
        self.leave(stream, key);
        None
    }

    pub(crate) fn attach(&mut self, stream: u32, payload: &[u8]) -> Result<(), Refusal> {
        let args: OneCommand = proto::unpack(payload)?;
        let key = self.key(&args.command_id)?;
        let from = [args.stdout_from, args.stderr_from];
        let reader = Reader { command: key, at: [0, 0], from, begun: false };
        self.follow(stream, key, Op::Attach(reader));
        Ok(())
    }

    pub(crate) fn step_attach(&mut self, stream: u32, mut reader: Reader) -> Option<Op> {
        let key = reader.command;
        let (Some(conn), Some(command)) = (&mut self.conn, self.commands.get(&key)) else {
            return None;
        };
        if command.state == State::Starting {
            return Some(Op::Attach(reader));
        }
        if !reader.begun {
            reader.begun = true;
            for ((at, from), ring) in reader.at.iter_mut().zip(reader.from).zip(&command.rings) {
                *at = from.unwrap_or(ring.total());
                if *at > ring.total() {
                    let refusal = Refusal::invalid("an offset beyond what has been written");
                    conn.refuse(stream, &refusal);
                    self.leave(stream, key);
                    return None;
                }
            }
            conn.event(stream, &proto::Started { started: command.view() });
        }
        let mut quota = 128 * 1024;
        for ((at, ring), channel) in reader.at.iter_mut().zip(&command.rings).zip(frame::STDOUT..) {
            while quota > 0 {
                match ring.at(*at) {
                    Piece::Data(data) => {
                        let size = data.len().min(conn.credit(stream)).min(quota);
                        if size == 0 {
                            break;
                        }
                        conn.data(stream, channel, data.get(..size).unwrap_or(&[]));
                        *at += long(size);
                        quota -= size;
                    }
                    Piece::Gap { offset, dropped } => {
                        // Said only when it can be followed by data, so there is one per data.
                        if conn.credit(stream) == 0 {
                            break;
                        }
                        let gap = proto::Gap { channel, offset, dropped_bytes: dropped };
                        conn.event(stream, &proto::GapEvent { gap });
                        *at = offset;
                    }
                    Piece::Nothing => break,
                }
            }
        }
        let done = reader.at.iter().zip(&command.rings).all(|(at, ring)| *at >= ring.total());
        if command.state == State::Ended && done {
            conn.event(stream, &proto::Exited { exited: command.view() });
            conn.result(stream, &());
            self.leave(stream, key);
            return None;
        }
        if !done && conn.credit(stream) > 0 {
            conn.poke(stream);
        }
        Some(Op::Attach(reader))
    }
}

fn captured(ring: &mut Ring, inline: bool) -> proto::Captured<'_> {
    let dropped_bytes = ring.dropped();
    let (head, tail) = (ring.head().len(), ring.kept() - ring.head().len());
    if !inline {
        return proto::Captured {
            head: None,
            tail: None,
            head_bytes: Some(long(head)),
            tail_bytes: Some(long(tail)),
            dropped_bytes,
        };
    }
    let (head, tail) = ring.halves();
    proto::Captured {
        head: Some(Bytes::new(head)),
        tail: Some(Bytes::new(tail)),
        head_bytes: None,
        tail_bytes: None,
        dropped_bytes,
    }
}

/// Send some of the kept output as DATA; true when all of it is out.
fn copy_out(conn: &mut Conn, stream: u32, command: &mut Command, copying: &mut Copying) -> bool {
    let mut quota = 128 * 1024;
    while let Some(ring) = command.rings.get_mut(copying.part / 2) {
        let (head, tail) = ring.halves();
        let part = if copying.part % 2 == 0 { head } else { tail };
        let rest = part.get(copying.at..).unwrap_or(&[]);
        if rest.is_empty() {
            copying.part += 1;
            copying.at = 0;
            continue;
        }
        let credit = conn.credit(stream);
        let size = rest.len().min(credit).min(quota);
        if size == 0 {
            if credit > 0 {
                conn.poke(stream);
            }
            return false;
        }
        let channel = if copying.part < 2 { frame::STDOUT } else { frame::STDOUT + 1 };
        conn.data(stream, channel, rest.get(..size).unwrap_or(&[]));
        copying.at += size;
        quota -= size;
    }
    true
}
