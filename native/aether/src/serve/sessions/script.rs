//! What the shell is told.

/// A word the shell takes as it is.
pub(super) fn quote(text: &[u8]) -> Vec<u8> {
    let mut quoted = vec![b'\''];
    for byte in text {
        if *byte == b'\'' {
            quoted.extend_from_slice(b"'\\''");
        } else {
            quoted.push(*byte);
        }
    }
    quoted.push(b'\'');
    quoted
}

/// What the shell is told to do. `command` keeps a syntax error in the text from ending the shell.
/// First `$?` becomes what the text before left, and not the status of what was told in between; as a
/// part of a list that is neither "set -e"'s nor a trap's business.
pub(super) fn script(text: &[u8], answers_at: i32, key: u64, before: i32) -> Vec<u8> {
    let mut script = Vec::new();
    if before != 0 {
        script.extend_from_slice(format!("(command exit {before}) && :\n").as_bytes());
    }
    script.extend_from_slice(b"command eval ");
    script.extend_from_slice(&quote(text));
    let rest = format!(
        " </dev/null {answers_at}>&-\ncommand printf '%s %s\\n' {key} \"$?\" >&{answers_at}\n"
    );
    script.extend_from_slice(rest.as_bytes());
    script
}

/// Nothing in it could run after a part of it was killed, so the shell may go on: one command or
/// pipeline, or several joined by "&&". Errs to "no": then the shell is ended as well.
pub(super) fn stops_when_killed(text: &[u8]) -> bool {
    let text = String::from_utf8_lossy(text.trim_ascii()).replace("2>&1", "").replace("&&", "");
    !text.contains(['&', ';', '\n', '(', '{', '`', '!']) && !text.contains("||")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_anything() {
        assert_eq!(quote(b"it's\n\\ \xff"), b"'it'\\''s\n\\ \xff'");
        let text = script(b"echo 'a'", 63, 7, 0);
        let wanted = "command eval 'echo '\\''a'\\''' </dev/null 63>&-\n\
            command printf '%s %s\\n' 7 \"$?\" >&63\n";
        assert_eq!(String::from_utf8_lossy(&text), wanted);
        let text = script(b"echo 'a'", 63, 7, 3);
        assert_eq!(String::from_utf8_lossy(&text), format!("(command exit 3) && :\n{wanted}"));
    }

    #[test]
    fn knows_what_would_go_on() {
        for text in
            ["sleep 100", " sleep 100\n", "cd /x && make test", "a | b", "A=1 sleep 9 >x 2>y"]
        {
            assert!(stops_when_killed(text.as_bytes()), "{text}");
        }
        for text in [
            "sleep 9; rm x",
            "sleep 9\nrm x",
            "sleep 9 || rm x",
            "sleep 9 & rm x",
            "while :; do a; done",
            "(a)",
            "$(a) b",
            "`a` b",
            "! a && b",
            "a 2>&1 & b",
        ] {
            assert!(!stops_when_killed(text.as_bytes()), "{text}");
        }
    }
}
