//! The repository's files: Rust tokens without comments and test code, and imports between modules of `src/`.

#![allow(clippy::unwrap_used, reason = "this is test code")]

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::collections::HashSet;
use std::fmt;
use std::path::Path;

/// A file. Its path starts at the repository's root and uses `/`.
pub(crate) struct Source {
    pub(crate) path: String,
    pub(crate) text: String,
}

/// A violation of a rule.
pub(crate) struct Violation {
    pub(crate) path: String,
    pub(crate) line: usize,
    pub(crate) rule: String,
}

impl Violation {
    pub(crate) fn new(source: &Source, line: usize, rule: String) -> Self {
        Self { path: source.path.clone(), line, rule }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.rule)
    }
}

/// Returns the sorted paths of all files of the repository.
pub(crate) fn repository_files(root: &Path) -> Vec<String> {
    let mut files = Vec::new();
    let mut folders = vec![String::new()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(root.join(&folder)).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            if name.starts_with('.') || (folder.is_empty() && ["target", "runs"].contains(&name.as_str())) {
                continue;
            }
            let is_folder = entry.file_type().unwrap().is_dir();
            if is_folder {
                folders.push(format!("{folder}{name}/"))
            } else {
                files.push(folder.clone() + &name)
            }
        }
    }
    files.sort();
    files
}

/// Reads the Rust files in some folders.
pub(crate) fn read_rust_files(root: &Path, folders: &[&str]) -> Vec<Source> {
    let is_below = |path: &String| folders.iter().any(|folder| path.starts_with(&format!("{folder}/")));
    let files = repository_files(root).into_iter().filter(|path| path.ends_with(".rs") && is_below(path));
    files.map(|path| Source { text: std::fs::read_to_string(root.join(&path)).unwrap(), path }).collect()
}

/// A token. Brackets are tokens, `::` is two tokens, literals are `"…"`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Token {
    pub(crate) text: String,
    pub(crate) line: usize,
}

/// Returns a file's tokens, without comments. Doc comments are literals.
pub(crate) fn tokens(source: &Source) -> Vec<Token> {
    let stream: TokenStream = source.text.parse().unwrap_or_else(|error| panic!("{}: {error}", source.path));
    let mut tokens = Vec::new();
    flatten(stream, &mut tokens);
    tokens
}

fn flatten(stream: TokenStream, tokens: &mut Vec<Token>) {
    for tree in stream {
        let line = tree.span().start().line;
        let mut push = |text: &str, line| tokens.push(Token { text: text.to_owned(), line });
        match tree {
            TokenTree::Literal(_) => push("\"…\"", line),
            TokenTree::Ident(ident) => push(&ident.to_string(), line),
            TokenTree::Punct(punct) => push(&punct.to_string(), line),
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Parenthesis => ("(", ")"),
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::None => ("", ""),
                };
                push(open, line);
                flatten(group.stream(), tokens);
                tokens.push(Token { text: close.to_owned(), line: group.span_close().start().line });
            }
        }
    }
}

/// An import of a module of `src/` or of the crate `ulysses_kernels`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Import {
    pub(crate) path: String,
    pub(crate) line: usize,
    pub(crate) from: String,
    pub(crate) to: String,
}

/// Returns all imports between modules of `src/`, by `use` or inline path, outside test code. `lib.rs` and `main.rs`
/// belong to no module.
pub(crate) fn imports(sources: &[Source]) -> Vec<Import> {
    let sources: Vec<(&Source, Vec<Token>, HashSet<String>)> = sources
        .iter()
        .map(|source| {
            let (tokens, test_modules) = without_test_code(tokens(source));
            (source, tokens, test_modules.into_iter().map(|name| child(&source.path, &name)).collect())
        })
        .collect();
    let test_modules: HashSet<&str> =
        sources.iter().flat_map(|(_, _, modules)| modules).map(String::as_str).collect();
    let mut found = Vec::new();
    for (source, tokens, _) in &sources {
        let module = module_path(&source.path);
        let is_test =
            (1..=module.len()).any(|depth| test_modules.contains(module[..depth].join("/").as_str()));
        if let (Some(from), false) = (module.first(), is_test) {
            found.extend(imported(tokens, module.len()).map(|(to, line)| {
                let path = source.path.clone();
                Import { path, line, from: (*from).to_owned(), to }
            }));
        }
    }
    found
}

/// `src/comm/thread/mod.rs` is `[comm, thread]`; the crate's root is empty.
pub(crate) fn module_path(path: &str) -> Vec<&str> {
    let path = path.strip_prefix("src/").unwrap_or(path);
    let mut parts: Vec<&str> = path.strip_suffix(".rs").unwrap_or(path).split('/').collect();
    if ["mod", "lib", "main"].contains(&parts[parts.len() - 1]) {
        parts.pop();
    }
    parts
}

/// Returns the path of a module that a file declares, joined with `/`.
fn child(path: &str, name: &str) -> String {
    module_path(path).into_iter().chain([name]).collect::<Vec<_>>().join("/")
}

/// Returns the names after `crate::`, after a chain of `super::` from a file `depth` modules deep to the crate's
/// root, after `ulysses_kernels::` (as `kernels::…`), and `chat` for `ulysses_chat::`.
fn imported(tokens: &[Token], depth: usize) -> impl Iterator<Item = (String, usize)> {
    let mut found = Vec::new();
    let mut index = 0;
    while index < tokens.len() {
        let (start, mut supers) = (index, 0);
        while tokens[index].text == "super" && is_path_separator(tokens, index + 1) {
            supers += 1;
            index += 3;
        }
        if tokens[start].text == "crate" && is_path_separator(tokens, start + 1) {
            found.extend(names_at(&tokens[start + 3..]));
        } else if tokens[start].text == "ulysses_kernels" && is_path_separator(tokens, start + 1) {
            let names = names_at(&tokens[start + 3..]).into_iter();
            found.extend(names.map(|(name, line)| (format!("kernels::{name}"), line)));
        } else if tokens[start].text == "ulysses_chat" && is_path_separator(tokens, start + 1) {
            found.push(("chat".to_owned(), tokens[start].line));
        } else if supers >= depth && supers > 0 {
            found.extend(names_at(&tokens[index..]));
        }
        index = index.max(start + 1);
    }
    found.into_iter()
}

fn is_path_separator(tokens: &[Token], index: usize) -> bool {
    index + 2 < tokens.len() && tokens[index].text == ":" && tokens[index + 1].text == ":"
}

/// Returns the first name, or the top-level names of a `{…}` list.
fn names_at(tokens: &[Token]) -> Vec<(String, usize)> {
    if tokens[0].text != "{" {
        return vec![(tokens[0].text.clone(), tokens[0].line)];
    }
    let mut names = Vec::new();
    let mut depth = 0;
    for pair in tokens.windows(2) {
        match pair[0].text.as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            break;
        }
        if depth == 1 && ["{", ","].contains(&pair[0].text.as_str()) && pair[1].text != "}" {
            names.push((pair[1].text.clone(), pair[1].line));
        }
    }
    names
}

/// Returns the tokens without `#[cfg(test)]` and `#[cfg(all(test, …))]` items, and the names of the modules among these items.
pub(crate) fn without_test_code(tokens: Vec<Token>) -> (Vec<Token>, Vec<String>) {
    const ATTRIBUTES: [&[&str]; 2] =
        [&["#", "[", "cfg", "(", "test", ")", "]"], &["#", "[", "cfg", "(", "all", "(", "test", ","]];
    let (mut kept, mut test_modules) = (Vec::new(), Vec::new());
    let mut rest = &tokens[..];
    while !rest.is_empty() {
        let begins = |attribute: &[&str]| {
            rest.len() > attribute.len()
                && rest.iter().zip(attribute).all(|(token, expected)| token.text == *expected)
        };
        if ATTRIBUTES.into_iter().any(begins) {
            let (item, after) = rest.split_at(item_len(rest));
            let declared = item.windows(3).find(|tokens| tokens[0].text == "mod" && tokens[2].text == ";");
            test_modules.extend(declared.map(|tokens| tokens[1].text.clone()));
            rest = after;
        } else {
            kept.push(rest[0].clone());
            rest = &rest[1..];
        }
    }
    (kept, test_modules)
}

/// Returns the number of tokens of the first item with its attributes: up to the first `;` or `{…}` outside other
/// brackets.
fn item_len(tokens: &[Token]) -> usize {
    let mut depth = 0;
    for (index, token) in tokens.iter().enumerate() {
        match token.text.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" => depth -= 1,
            "}" => {
                depth -= 1;
                if depth == 0 {
                    return index + 1;
                }
            }
            ";" if depth == 0 => return index + 1,
            _ => {}
        }
    }
    tokens.len()
}
