//! The dependency graph of a crate's files, and its cycles.

use crate::source_tree::{Source, Token, module_path, without_test_code};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The imports and re-exports of a module, by local name.
type Imports = HashMap<String, Vec<String>>;

/// A crate's files as modules.
pub(crate) struct Crate {
    /// Modules by path from the crate's root.
    modules: BTreeMap<Vec<String>, Module>,
}

struct Module {
    file: String,
    tokens: Vec<Token>,
    imports: Imports,
}

impl Crate {
    /// Reads the crate with the root `root`, such as `src/`, without its test modules.
    pub(crate) fn read(root: &str, sources: &[Source]) -> Self {
        let mut modules = BTreeMap::new();
        let mut test_modules = BTreeSet::new();
        for source in sources {
            let Some(path) = source.path.strip_prefix(root) else { continue };
            let path: Vec<String> = module_path(path).into_iter().map(str::to_owned).collect();
            let (tokens, tests) = without_test_code(crate::source_tree::tokens(source));
            test_modules.extend(tests.into_iter().map(|name| [path.clone(), vec![name]].concat()));
            modules.insert(path, Module { file: source.path.clone(), tokens, imports: Imports::new() });
        }
        modules.retain(|path, _| !(1..=path.len()).any(|depth| test_modules.contains(&path[..depth])));
        for (path, module) in &mut modules {
            module.imports = imports(path, &module.tokens);
        }
        Self { modules }
    }

    /// Returns pairs of files of which the first uses a name of the second.
    ///
    /// Dependencies between a folder's `mod.rs` and the folder's files do not count.
    pub(crate) fn arrows(&self) -> BTreeSet<(&str, &str)> {
        let mut arrows = BTreeSet::new();
        for (from, module) in &self.modules {
            for path in self.paths(from, module) {
                if let Some(to) = self.resolve(&path, 0)
                    && !(to.starts_with(from) || from.starts_with(to))
                {
                    arrows.insert((module.file.as_str(), self.modules[to].file.as_str()));
                }
            }
        }
        arrows
    }

    /// Returns the full paths of all names that a module imports or uses inline.
    fn paths(&self, from: &[String], module: &Module) -> Vec<Vec<String>> {
        let mut paths: Vec<Vec<String>> = module.imports.values().cloned().collect();
        let mut index = 0;
        while index < module.tokens.len() {
            if module.tokens[index].text == "use" {
                index += module.tokens[index..].iter().take_while(|token| token.text != ";").count();
            }
            let (segments, next) = path_at(&module.tokens, index);
            index = next;
            if segments.len() < 2 {
                continue;
            }
            match segments[0].as_str() {
                "crate" | "super" | "self" => paths.extend(absolute(from, &segments)),
                first => match module.imports.get(first) {
                    Some(imported) => paths.push([imported, &segments[1..]].concat()),
                    None => paths.push([from, &segments].concat()),
                },
            }
        }
        paths
    }

    /// Returns the module that defines a path, following re-exports.
    fn resolve(&self, path: &[String], hops: usize) -> Option<&[String]> {
        let depth = (0..=path.len()).rev().find(|&depth| self.modules.contains_key(&path[..depth]))?;
        let (found, module) = self.modules.get_key_value(&path[..depth])?;
        let item = path.get(depth);
        let handed_on = item.and_then(|item| module.imports.get(item)).filter(|_| hops < 8);
        match handed_on {
            Some(to) if to.as_slice() != path => self.resolve(to, hops + 1),
            // A path outside the crate resolves to its root, which has no such name.
            _ => (depth > 0 || module.declares(item?)).then_some(found),
        }
    }
}

impl Module {
    fn declares(&self, item: &str) -> bool {
        let kinds = ["fn", "struct", "enum", "trait", "type", "const", "static"];
        self.tokens.windows(2).any(|pair| kinds.contains(&pair[0].text.as_str()) && pair[1].text == item)
    }
}

/// Returns the names of a path that starts at a token, and the index after it.
fn path_at(tokens: &[Token], start: usize) -> (Vec<String>, usize) {
    let is_name = |index: usize| {
        tokens.get(index).is_some_and(|token| token.text.starts_with(|c: char| c.is_alphabetic() || c == '_'))
    };
    let is_separator =
        |index: usize| (index..index + 2).all(|i| tokens.get(i).is_some_and(|t| t.text == ":"));
    if !is_name(start) {
        return (Vec::new(), start + 1);
    }
    let mut segments = vec![tokens[start].text.clone()];
    let mut index = start + 1;
    while is_separator(index) && is_name(index + 2) {
        segments.push(tokens[index + 2].text.clone());
        index += 3;
    }
    (segments, index)
}

/// Returns a path from the crate's root, or `None` for a path in another crate.
fn absolute(module: &[String], segments: &[String]) -> Option<Vec<String>> {
    let mut base = match segments[0].as_str() {
        "crate" => Vec::new(),
        "self" | "super" => module.to_vec(),
        _ => return None,
    };
    let supers = segments.iter().take_while(|segment| *segment == "super").count();
    base.truncate(base.len().saturating_sub(supers));
    Some([&base[..], &segments[supers.max(1)..]].concat())
}

/// Returns the names that a module's `use` declarations import.
fn imports(module: &[String], tokens: &[Token]) -> Imports {
    let mut found = Imports::new();
    let uses = tokens.iter().enumerate().filter(|(_, token)| token.text == "use");
    for (index, _) in uses {
        let end = tokens[index..]
            .iter()
            .position(|token| token.text == ";")
            .map_or(tokens.len(), |len| index + len);
        use_tree(&[], &tokens[index + 1..end], &mut |path| {
            let (name, path) = match path.iter().position(|segment| segment == "as") {
                Some(at) => (path[at + 1].clone(), &path[..at]),
                None => (path[path.len() - 1].clone(), path),
            };
            let path = path.strip_suffix(&["self".to_owned()]).unwrap_or(path);
            let name = if name == "self" { path[path.len() - 1].clone() } else { name };
            // A child of this module, unless it is a crate.
            let full = absolute(module, path).unwrap_or_else(|| [module, path].concat());
            found.insert(name, full);
        });
    }
    found
}

/// Calls `each` with every path of a `use` tree.
fn use_tree(prefix: &[String], tokens: &[Token], each: &mut dyn FnMut(&[String])) {
    let mut path = prefix.to_vec();
    for (index, token) in tokens.iter().enumerate() {
        match token.text.as_str() {
            ":" | "*" => {}
            "{" => {
                let (mut depth, mut start) = (0, index + 1);
                for (at, token) in tokens.iter().enumerate().skip(index) {
                    match token.text.as_str() {
                        "{" => depth += 1,
                        "}" => depth -= 1,
                        _ => {}
                    }
                    let ends = depth == 0 || (depth == 1 && token.text == ",");
                    if ends && at > start {
                        use_tree(&path, &tokens[start..at], each);
                    }
                    if ends {
                        start = at + 1;
                    }
                    if depth == 0 {
                        return;
                    }
                }
            }
            name => path.push(name.to_owned()),
        }
    }
    if path.len() > prefix.len() {
        each(&path);
    }
}

/// Returns the cycles of files, each sorted.
pub(crate) fn circles<'a>(arrows: &BTreeSet<(&'a str, &'a str)>) -> Vec<Vec<&'a str>> {
    let files: BTreeSet<&str> = arrows.iter().flat_map(|&(from, to)| [from, to]).collect();
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        files.iter().map(|&file| (file, reached(file, arrows))).collect();
    let mut circles: BTreeSet<Vec<&str>> = BTreeSet::new();
    for &file in files.iter().filter(|&&file| reached[file].contains(file)) {
        circles.insert(
            files
                .iter()
                .copied()
                .filter(|other| reached[file].contains(other) && reached[other].contains(file))
                .collect(),
        );
    }
    circles.into_iter().collect()
}

fn reached<'a>(from: &str, arrows: &BTreeSet<(&'a str, &'a str)>) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut next = vec![from];
    while let Some(file) = next.pop() {
        for &(_, to) in arrows.iter().filter(|(from, _)| *from == file) {
            if found.insert(to) {
                next.push(to);
            }
        }
    }
    found
}
