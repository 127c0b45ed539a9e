//! Frames on the channel to the edge; words in spec/frames.md.
