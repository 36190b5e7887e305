//! The book's table of contents, and the relative links of all documents.

use super::root;
use regex::Regex;
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Returns every Markdown file for users and contributors.
pub(crate) fn documents() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            let is_foreign =
                name.starts_with('.') || ["target", "runs", "book", "fixtures"].contains(&name.as_str());
            if path.is_dir() && !is_foreign {
                folders.push(path);
            } else if name.ends_with(".md") && !is_foreign {
                found.push(path);
            }
        }
    }
    found
}

/// Returns the anchors of headings, as GitHub and mdBook make them.
fn anchors(text: &str) -> HashSet<String> {
    let headings =
        text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    let keep = |c: char| match c {
        ' ' => Some('-'),
        c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c.to_ascii_lowercase()),
        _ => None,
    };
    headings.map(|heading| heading.chars().filter_map(keep).collect()).collect()
}

/// Returns the targets of links outside of code.
fn links(text: &str) -> Vec<String> {
    let code = Regex::new(r"(?s)```.*?```|`[^`\n]*`").unwrap();
    let link = Regex::new(r"\]\(([^)\s]+)\)").unwrap();
    let prose = code.replace_all(text, "");
    link.captures_iter(&prose).map(|found| found[1].to_owned()).collect()
}

/// Returns the broken relative links of a document.
fn broken(document: &Path) -> Vec<String> {
    let text = fs::read_to_string(document).unwrap();
    let leads_nowhere = |link: &String| {
        if link.contains("://") {
            return false;
        }
        let (file, anchor) =
            link.split_once('#').map_or((link.as_str(), None), |(file, at)| (file, Some(at)));
        let target =
            if file.is_empty() { document.to_owned() } else { document.parent().unwrap().join(file) };
        let has = |anchor| fs::read_to_string(&target).is_ok_and(|text| anchors(&text).contains(anchor));
        !target.exists() || anchor.is_some_and(|anchor| !has(anchor))
    };
    links(&text).into_iter().filter(leads_nowhere).collect()
}

#[test]
fn every_relative_link_leads_to_a_file_and_a_heading() {
    let documents = documents();
    assert!(documents.len() > 20 && documents.iter().any(|path| path.ends_with("docs/concepts.md")));
    for document in documents {
        assert_eq!(broken(&document), Vec::<String>::new(), "{}", document.display());
    }
}

#[test]
fn a_broken_link_is_seen() {
    let place = tempfile::tempdir().unwrap();
    let document = place.path().join("a.md");
    let text = "# One & two\n[a](#one--two) [b](#three) [c](b.md) [d](https://x.org/y) `[e](nowhere)`\n";
    fs::write(&document, text).unwrap();
    assert_eq!(broken(&document), ["#three", "b.md"]);
}

#[test]
fn the_summary_lists_every_chapter_once() {
    let listed = links(&fs::read_to_string(root().join("docs/SUMMARY.md")).unwrap());
    let mut chapters: Vec<String> = fs::read_dir(root().join("docs"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".md") && name != "SUMMARY.md")
        .collect();
    chapters.sort();
    let mut sorted = listed.clone();
    sorted.sort();
    assert_eq!(sorted, chapters);
    assert_eq!(listed[0], "quick-start.md", "the book begins with the quick start");
}
