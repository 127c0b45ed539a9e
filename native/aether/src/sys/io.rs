//! Text to the standard streams of the host process.

use std::io::Write;

/// Print a line to standard output; a closed pipe is not an error worth dying for.
pub(crate) fn print_line(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Print a line to standard error.
pub(crate) fn eprint_line(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
