//! Does one thing, or reports what it sees. Run inside sandboxes by tests; never panics, whatever
//! its streams are connected to.

mod report;
mod sys;

use std::io::{Read, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const USAGE: &str = "usage: probe VERB
  echo ARGS...   args ARGS...   cat   exit N   sleep SECONDS   spin SECONDS
  flood BYTES [stdout|stderr]   both   bytes   env [NAME]   cwd   id   report
  tree DEPTH   forkbomb N   ignore-term   tty [wait]   alloc MIB   listen PORT";

fn main() -> ExitCode {
    let args: Vec<std::ffi::OsString> = std::env::args_os().skip(1).collect();
    let words: Vec<&[u8]> = args.iter().map(|a| sys::bytes(a)).collect();
    let Some((verb, rest)) = words.split_first() else {
        return usage();
    };
    let done = match *verb {
        b"echo" => say(&[&rest.join(&b' '), &b"\n"[..]].concat()),
        b"args" => args_prefixed(rest),
        b"cat" => cat(),
        b"exit" => {
            return ExitCode::from(number(rest, 0).and_then(|n| u8::try_from(n).ok()).unwrap_or(64))
        }
        b"sleep" => {
            sleep(rest);
            Ok(())
        }
        b"spin" => {
            spin(rest);
            Ok(())
        }
        b"flood" => flood(rest),
        b"both" => say(b"out\n").and_then(|()| complain(b"err\n")),
        b"bytes" => say(&(0..=u8::MAX).collect::<Vec<u8>>()),
        b"env" => return env(rest),
        b"cwd" => cwd(),
        b"id" => say(report::id().as_bytes()),
        b"report" => say(report::all().as_bytes()),
        b"tree" => tree(number(rest, 0).unwrap_or(1)),
        b"forkbomb" => forkbomb(number(rest, 0).unwrap_or(1)),
        b"ignore-term" => ignore_term(),
        b"tty" => tty(!rest.is_empty()),
        b"alloc" => alloc(number(rest, 0).unwrap_or(1)),
        b"listen" => listen(number(rest, 0).and_then(|n| u16::try_from(n).ok()).unwrap_or(0)),
        _ => return usage(),
    };
    if done.is_ok() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(74)
    }
}

type Done = std::io::Result<()>;

fn usage() -> ExitCode {
    let _ = complain(USAGE.as_bytes());
    let _ = complain(b"\n");
    ExitCode::from(64)
}

fn say(bytes: &[u8]) -> Done {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()
}

fn complain(bytes: &[u8]) -> Done {
    std::io::stderr().lock().write_all(bytes)
}

fn number(words: &[&[u8]], at: usize) -> Option<u64> {
    std::str::from_utf8(words.get(at)?).ok()?.parse().ok()
}

fn seconds(words: &[&[u8]]) -> Duration {
    let text = words.first().and_then(|w| std::str::from_utf8(w).ok());
    let seconds = text.and_then(|t| t.parse().ok()).unwrap_or(0.0);
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO)
}

/// Each argument as its length, a colon, itself and a newline.
fn args_prefixed(words: &[&[u8]]) -> Done {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for word in words {
        write!(out, "{}:", word.len())?;
        out.write_all(word)?;
        out.write_all(b"\n")?;
    }
    out.flush()
}

fn cat() -> Done {
    let mut buffer = vec![0; 64 * 1024];
    let mut input = std::io::stdin().lock();
    loop {
        match input.read(&mut buffer)? {
            0 => return Ok(()),
            size => say(buffer.get(..size).unwrap_or(&[]))?,
        }
    }
}

fn sleep(words: &[&[u8]]) {
    std::thread::sleep(seconds(words));
}

fn spin(words: &[&[u8]]) {
    let end = Instant::now() + seconds(words);
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

/// A known pattern: line n is n in fifteen digits.
fn flood(words: &[&[u8]]) -> Done {
    let mut left = number(words, 0).unwrap_or(0);
    let to_stderr = words.get(1).is_some_and(|w| *w == b"stderr");
    let mut line = 0_u64;
    let mut block = Vec::new();
    while left > 0 {
        block.clear();
        while block.len() < 64 * 1024 {
            writeln!(block, "{line:015}")?;
            line += 1;
        }
        let size = usize::try_from(left).unwrap_or(usize::MAX).min(block.len());
        let part = block.get(..size).unwrap_or(&[]);
        if to_stderr {
            complain(part)?;
        } else {
            say(part)?;
        }
        left -= u64::try_from(size).unwrap_or(left);
    }
    Ok(())
}

fn env(words: &[&[u8]]) -> ExitCode {
    let mut out = Vec::new();
    let mut found = words.is_empty();
    for (name, value) in std::env::vars_os() {
        let (name, value) = (sys::bytes(&name), sys::bytes(&value));
        match words.first() {
            Some(wanted) if *wanted == name => {
                found = true;
                out.extend_from_slice(&[value, b"\n"].concat());
            }
            Some(_) => {}
            None => out.extend_from_slice(&[name, b"=", value, b"\n"].concat()),
        }
    }
    if say(&out).is_ok() && found {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn cwd() -> Done {
    let cwd = std::env::current_dir()?;
    say(&[sys::bytes(cwd.as_os_str()), b"\n"].concat())
}

fn rest_for_ever() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

/// A chain of children, and a daemon that left the session and its parent; all sleep. One pid a
/// line, from each of them, as soon as it is there; the caller counts DEPTH + 2 lines.
fn tree(depth: u64) -> Done {
    say(format!("{}\n", std::process::id()).as_bytes())?;
    if sys::fork() == Some(sys::Side::Child) {
        sys::new_session();
        if sys::fork() == Some(sys::Side::Child) {
            let _ = say(format!("{}\n", std::process::id()).as_bytes());
            rest_for_ever();
        }
        sys::leave(0);
    }
    for _ in 0..depth {
        if sys::fork() != Some(sys::Side::Child) {
            break;
        }
        say(format!("{}\n", std::process::id()).as_bytes())?;
    }
    rest_for_ever()
}

/// N children at once, each of which sleeps; says how many there are, then sleeps too.
fn forkbomb(count: u64) -> Done {
    let mut made = 0;
    for _ in 0..count {
        match sys::fork() {
            Some(sys::Side::Child) => rest_for_ever(),
            Some(sys::Side::Parent) => made += 1,
            None => break,
        }
    }
    say(format!("{made}\n").as_bytes())?;
    rest_for_ever()
}

fn ignore_term() -> Done {
    sys::ignore_polite_signals();
    say(b"ready\n")?;
    rest_for_ever()
}

fn tty(wait: bool) -> Done {
    let show = || match sys::terminal_size() {
        Some((rows, cols)) => format!("tty {rows} {cols}\n"),
        None => String::from("not a tty\n"),
    };
    if wait {
        sys::watch_size();
    }
    say(show().as_bytes())?;
    if wait {
        sys::wait_for_size();
        say(show().as_bytes())?;
    }
    Ok(())
}

fn alloc(mib: u64) -> Done {
    let mut blocks = Vec::new();
    for _ in 0..mib {
        let mut block = vec![0_u8; 1 << 20];
        block.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
        blocks.push(std::hint::black_box(block));
    }
    say(format!("{}\n", blocks.len()).as_bytes())
}

/// An echo server; says the port it has, 0 asks for any.
fn listen(port: u16) -> Done {
    let listener = std::net::TcpListener::bind(("127.0.0.1", port))?;
    say(format!("ready {}\n", listener.local_addr()?.port()).as_bytes())?;
    for socket in listener.incoming() {
        let Ok(mut socket) = socket else { continue };
        std::thread::spawn(move || {
            let mut buffer = vec![0; 64 * 1024];
            while let Ok(size) = socket.read(&mut buffer) {
                if size == 0 || socket.write_all(buffer.get(..size).unwrap_or(&[])).is_err() {
                    break;
                }
            }
        });
    }
    Ok(())
}
