//! The commands that README and book tell users to run.

#![allow(clippy::unwrap_used, reason = "this is test code")]

use std::fs;
use std::path::Path;

/// A line of a `console` block that begins with `$ `.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Documented {
    /// From the repository's root.
    pub(crate) file: String,
    pub(crate) line: usize,
    /// Without the prompt and the comment.
    pub(crate) command: String,
}

/// The files that have commands: README.md, the book, and the READMEs of folders for users.
pub(crate) fn documents(root: &Path) -> Vec<String> {
    let book = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().file_name());
    let book = book.map(|name| format!("docs/{}", name.into_string().unwrap()));
    let mut files: Vec<String> = book.filter(|name| name.ends_with(".md")).collect();
    files.extend(["README.md", "configs/README.md", "examples/README.md"].map(str::to_owned));
    files.sort();
    files
}

/// The commands of every `console` block of a text, block by block.
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

/// All commands of all documents.
pub(crate) fn all_blocks(root: &Path) -> Vec<Vec<Documented>> {
    let read = |file: &String| blocks(file, &fs::read_to_string(root.join(file)).unwrap());
    documents(root).iter().flat_map(read).collect()
}
