//! The commands in README.md and the book.

#![allow(clippy::unwrap_used, reason = "this is test code")]

use std::fs;
use std::path::Path;

/// A command: a line of a `console` block that starts with `$ `.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Documented {
    /// Path from the repository's root.
    pub(crate) file: String,
    pub(crate) line: usize,
    /// The command without prompt and comment.
    pub(crate) command: String,
}

/// Returns the files with commands: README.md, the book, and the READMEs of folders for users.
pub(crate) fn documents(root: &Path) -> Vec<String> {
    let book = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().file_name());
    let book = book.map(|name| format!("docs/{}", name.into_string().unwrap()));
    let mut files: Vec<String> = book.filter(|name| name.ends_with(".md")).collect();
    files.extend(["README.md", "configs/README.md", "examples/README.md"].map(str::to_owned));
    files.sort();
    files
}

/// Returns the commands of each `console` block of a text.
pub(crate) fn blocks(file: &str, text: &str) -> Vec<Vec<Documented>> {
    let mut blocks = Vec::new();
    let mut block: Option<Vec<Documented>> = None;
    for (index, line) in text.lines().enumerate() {
        match (&mut block, line) {
            (None, "```console") => block = Some(Vec::new()),
            (Some(_), "```") => blocks.extend(block.take()),
            (Some(commands), _) => {
                commands.extend(line.strip_prefix("$ ").map(|command| Documented {
                    file: file.to_owned(),
                    line: index + 1,
                    command: command.split(" #").next().unwrap_or(command).trim_end().to_owned(),
                }));
            }
            (None, _) => {}
        }
    }
    blocks
}

/// Returns the commands of all documents, by block.
pub(crate) fn all_blocks(root: &Path) -> Vec<Vec<Documented>> {
    let read = |file: &String| blocks(file, &fs::read_to_string(root.join(file)).unwrap());
    documents(root).iter().flat_map(read).collect()
}
