//! The rules of the source tree, checked by reading it: who may import whom, where `unsafe`
//! may stand, how long a file may be, and what must lie beside what.
//!
//! Every checker takes paths and texts, so the second half of this file runs it on made-up
//! sources that break its rule.

#[path = "support/file_graph.rs"]
mod file_graph;
#[path = "support/source_tree.rs"]
mod source_tree;

use source_tree::{Source, Violation, imports, read_rust_files, repository_files, tokens};
use std::path::Path;

/// What each module of `src/` may import besides itself and the leaves; `kernels` is the crate below. That
/// `kernels/` knows nothing of `src/`, nor `src/` of `cli/`, is Cargo's own rule. `CONTRIBUTING.md` has
/// the same table, with what the modules hold.
const MAY_IMPORT: [(&str, &[&str]); 12] = [
    ("mesh", &[]),
    ("comm", &["mesh", "kernels"]),
    ("config", &["mesh"]),
    ("sequence_parallel", &["mesh", "comm", "kernels"]),
    ("model", &["kernels"]),
    ("zero", &["comm", "config", "kernels"]),
    ("data", &["mesh", "config"]),
    ("checkpoint", &["mesh", "comm", "model", "zero"]),
    ("monitor", &["comm"]),
    (
        "engine",
        &[
            "mesh",
            "comm",
            "config",
            "kernels",
            "sequence_parallel",
            "model",
            "zero",
            "data",
            "checkpoint",
            "monitor",
        ],
    ),
    (
        "estimate",
        &["mesh", "comm", "config", "kernels", "sequence_parallel", "model", "zero", "data", "engine"],
    ),
    ("trainer", &["comm", "config", "kernels", "model", "data", "checkpoint", "monitor", "engine"]),
];

/// Modules that all others may import and that import none, and those of the kernels that stand for plain tensors.
const LEAVES: [&str; 7] = [
    "fnv1a",
    "regular_file",
    "safetensors_file",
    "kernels::device",
    "kernels::memory",
    "kernels::offload",
    "kernels::tensor",
];

/// Where `unsafe` may stand.
const MAY_BE_UNSAFE: [&str; 6] = [
    "kernels/",
    "src/comm/thread/",
    "src/comm/nccl/",
    "src/comm/mpi/",
    "cli/src/allocator.rs",
    "cli/src/settings.rs",
];

/// Files that lead to one another, and why they may: each is one idea in several files.
const CIRCLES: [(&str, &str); 8] = [
    (
        "kernels/src/device/dry.rs kernels/src/memory.rs kernels/src/tensor.rs",
        "a dry tensor is counted where it is made, and the counters ask whether their thread is dry",
    ),
    (
        "src/comm/thread/communicator.rs src/comm/thread/mailbox.rs",
        "a communicator has a mailbox, whose messages wait in the communicator's world",
    ),
    (
        "src/config/config.rs src/config/overrides.rs src/config/raw.rs src/config/sections/mesh_rules.rs \
         src/config/sections/ulysses.rs",
        "a rule of `mesh_rules` is a partial config",
    ),
    (
        "src/data/error.rs src/data/source/files.rs src/data/storage/layout.rs src/data/storage/llm_c.rs \
         src/data/storage/megatron.rs src/data/storage/own.rs src/data/storage/token_file.rs",
        "formats of token files, which are detected in one place and each read in their own",
    ),
    ("src/data/source/document.rs src/data/source/lines.rs", "a line of a file becomes a document"),
    (
        "src/engine/consistency.rs src/engine/initialize.rs src/engine/memory.rs src/engine/step.rs src/engine/times.rs",
        "the engine, and the parts of its step as `impl` blocks",
    ),
    (
        "src/model/decoder.rs src/model/decoder_attention.rs src/model/decoder_mlp.rs src/model/decoder_weights.rs \
         src/model/hf_config.rs src/model/hf_model.rs src/model/hf_rope.rs src/model/llama.rs \
         src/model/model.rs src/model/qkv_projection.rs",
        "the decoder's halves as `impl` blocks, and the model with the description that it is made from and exported with",
    ),
    ("src/zero/param_group_ranges.rs src/zero/unit.rs", "a unit's parameters in the ranges of their groups"),
];

/// Folders that hide something hard, and so explain it.
const NEEDS_README: [&str; 6] =
    ["kernels/src/attention", "src/checkpoint", "src/comm", "src/data", "src/sequence_parallel", "src/zero"];

const MAX_LINES: usize = 500;
const RUST_FOLDERS: [&str; 6] = ["kernels", "src", "cli", "tests", "examples", "benches"];

fn may_import(module: &str) -> Option<&'static [&'static str]> {
    let of_leaf = LEAVES.contains(&module).then_some(&[][..]);
    of_leaf.or_else(|| MAY_IMPORT.iter().find(|(name, _)| *name == module).map(|(_, imports)| *imports))
}

/// Modules import only what the table allows. `lib.rs` stands above the modules.
fn check_imports(sources: &[Source]) -> Vec<Violation> {
    let mut violations = Vec::new();
    for import in imports(sources) {
        let to = match import.to.split_once("::") {
            Some((of_kernels, _)) if !LEAVES.contains(&import.to.as_str()) => of_kernels,
            _ => &import.to,
        };
        let rule = match may_import(&import.from) {
            None => format!("`{}` has no row in the table of imports", import.from),
            Some(_) if to == import.from || LEAVES.contains(&to) => continue,
            Some(allowed) if allowed.contains(&to) => continue,
            Some(allowed) => {
                format!("`{}` must not import `{to}`; it may import {allowed:?}", import.from)
            }
        };
        violations.push(Violation { path: import.path, line: import.line, rule });
    }
    violations
}

fn check_unsafe(sources: &[Source]) -> Vec<Violation> {
    let folders = ["kernels/src/", "src/", "cli/src/", "examples/"];
    let guarded = |source: &&Source| folders.iter().any(|folder| source.path.starts_with(folder));
    let forbidden = |source: &&Source| !MAY_BE_UNSAFE.iter().any(|allowed| source.path.starts_with(allowed));
    let mut violations = Vec::new();
    for source in sources.iter().filter(guarded).filter(forbidden) {
        let found = tokens(source).into_iter().filter(|token| token.text == "unsafe");
        let rule = format!("`unsafe` may stand only in {}", MAY_BE_UNSAFE.join(", "));
        violations.extend(found.map(|token| Violation::new(source, token.line, rule.clone())));
    }
    violations
}

fn check_stubs(sources: &[Source]) -> Vec<Violation> {
    let mut violations = Vec::new();
    for source in sources {
        for pair in tokens(source).windows(2) {
            if ["todo", "unimplemented"].contains(&pair[0].text.as_str()) && pair[1].text == "!" {
                let rule = format!("no stubs: `{}!`", pair[0].text);
                violations.push(Violation::new(source, pair[0].line, rule));
            }
        }
    }
    violations
}

fn check_length(sources: &[Source]) -> Vec<Violation> {
    let long = |source: &&Source| source.text.lines().count() > MAX_LINES;
    let violation = |source: &Source| {
        let rule =
            format!("a file has at most {MAX_LINES} lines, this one has {}", source.text.lines().count());
        Violation::new(source, MAX_LINES + 1, rule)
    };
    sources.iter().filter(long).map(violation).collect()
}

/// A CUDA kernel belongs to the op of the same name: `kernels/cuda/rope.cu` to `kernels/src/rope`, and
/// `kernels/cuda/lamb.cu` to `kernels/src/optimizer/lamb`.
fn check_kernels(files: &[String]) -> Vec<Violation> {
    let has_op = |stem: &str| {
        let of_op = files.iter().filter_map(|path| path.strip_prefix("kernels/src/"));
        of_op.flat_map(|path| path.split('/')).any(|part| part.strip_suffix(".rs").unwrap_or(part) == stem)
    };
    let kernels = files.iter().filter_map(|path| Some((path, path.strip_prefix("kernels/cuda/")?)));
    let stems = kernels.filter_map(|(path, name)| Some((path, name.strip_suffix(".cu")?)));
    stems
        .filter(|(_, stem)| !has_op(stem))
        .map(|(path, stem)| Violation {
            path: path.clone(),
            line: 1,
            rule: format!("a kernel has an op of the same name: there is no {stem} in kernels/src"),
        })
        .collect()
}

fn check_readmes(files: &[String]) -> Vec<Violation> {
    let readmes = NEEDS_README.iter().map(|folder| format!("{folder}/README.md"));
    let missing = readmes.filter(|readme| !files.contains(readme));
    let rule = "this folder hides something hard, so a README.md explains it".to_owned();
    missing.map(|path| Violation { path, line: 1, rule: rule.clone() }).collect()
}

/// The rows of `CONTRIBUTING.md`'s table that are missing or say something else.
fn check_contributing(text: &str) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (module, allowed) in MAY_IMPORT {
        let expected = if allowed.is_empty() { "–".to_owned() } else { allowed.join(", ") };
        let start = format!("| `{module}` |");
        let found = text.lines().enumerate().find(|(_, line)| line.starts_with(&start));
        let (index, line) = found.unwrap_or((0, "no row"));
        if !line.ends_with(&format!("| {expected} |")) {
            let rule = format!("`{module}` may import {expected}, but here is: {line}");
            violations.push(Violation { path: "CONTRIBUTING.md".into(), line: index + 1, rule });
        }
    }
    violations
}

#[track_caller]
fn assert_none(violations: &[Violation]) {
    let lines: Vec<String> = violations.iter().map(ToString::to_string).collect();
    assert!(violations.is_empty(), "\n{}", lines.join("\n"));
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn modules_import_only_what_the_table_allows() {
    let sources = read_rust_files(root(), &["src"]);
    assert_none(&check_imports(&sources));
    for (module, _) in MAY_IMPORT.iter().filter(|(module, _)| !["mesh", "config"].contains(module)) {
        let found = imports(&sources).iter().any(|import| import.from == *module);
        assert!(found, "no import found in `{module}`: is the table stale, or the scanner blind?");
    }
}

#[test]
fn the_table_of_contributing_is_the_one_that_is_checked() {
    assert_none(&check_contributing(&std::fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap()));
}

#[test]
fn unsafe_code_stays_in_kernels_and_backends() {
    let sources = read_rust_files(root(), &RUST_FOLDERS);
    assert_none(&check_unsafe(&sources));
    let kernel = sources.iter().find(|source| source.path == "kernels/src/gemm/mod.rs").unwrap();
    assert!(tokens(kernel).iter().any(|token| token.text == "unsafe"), "the scanner must see it where it is");
}

#[test]
fn there_are_no_stubs_and_no_endless_files() {
    let sources = read_rust_files(root(), &RUST_FOLDERS);
    assert!(RUST_FOLDERS.iter().all(|folder| sources.iter().any(|source| source.path.starts_with(folder))));
    assert_none(&check_stubs(&sources));
    assert_none(&check_length(&sources));
}

#[test]
fn hard_folders_are_explained_and_kernels_belong_to_ops() {
    let files = repository_files(root());
    assert!(files.contains(&"src/lib.rs".to_owned()));
    assert_none(&check_readmes(&files));
    assert_none(&check_kernels(&files));
}

#[test]
fn files_take_names_from_one_another_in_one_direction() {
    let sources = read_rust_files(root(), &["kernels/src", "src", "cli/src"]);
    let mut found = Vec::new();
    for root in ["kernels/src/", "src/", "cli/src/"] {
        let graph = file_graph::Crate::read(root, &sources);
        assert!(graph.arrows().len() > 100, "the scanner is blind in {root}");
        found.extend(file_graph::circles(&graph.arrows()).into_iter().map(|files| files.join(" ")));
    }
    let listed = CIRCLES.map(|(files, _)| files.to_owned());
    let added: Vec<_> = found.iter().filter(|circle| !listed.contains(circle)).collect();
    let gone: Vec<_> = listed.iter().filter(|circle| !found.contains(circle)).collect();
    assert!(added.is_empty(), "files that lead to one another: {added:#?}");
    assert!(gone.is_empty(), "CIRCLES lists what is none any more: {gone:#?}");
}

// The checkers on made-up sources.

fn sources(files: &[(&str, &str)]) -> Vec<Source> {
    files.iter().map(|(path, text)| Source { path: (*path).into(), text: (*text).into() }).collect()
}

fn lines(violations: &[Violation]) -> Vec<(&str, usize)> {
    violations.iter().map(|violation| (violation.path.as_str(), violation.line)).collect()
}

#[test]
fn an_import_that_the_table_forbids_is_named_with_its_file_and_line() {
    let made_up = sources(&[
        ("src/model/mod.rs", "//! Docs.\nuse ulysses_kernels::rope;\nuse crate::comm::ProcessGroup;\n"),
        ("src/data/mod.rs", "fn f() {\n    ulysses_kernels::rope::forward();\n}\n"),
        ("src/mesh/mod.rs", "use crate::{fnv1a, zero::Layout};\nuse ulysses_kernels::memory;"),
        ("src/comm/thread/group.rs", "use super::super::super::model::Layer;"),
    ]);
    let violations = check_imports(&made_up);
    assert_eq!(
        lines(&violations),
        [
            ("src/model/mod.rs", 3),
            ("src/data/mod.rs", 2),
            ("src/mesh/mod.rs", 1),
            ("src/comm/thread/group.rs", 1)
        ]
    );
    assert_eq!(
        violations[0].to_string(),
        "src/model/mod.rs:3: `model` must not import `comm`; it may import [\"kernels\"]"
    );
}

#[test]
fn what_the_table_allows_and_what_is_no_import_passes() {
    let made_up = sources(&[
        (
            "src/zero/mod.rs",
            "use crate::comm::{Pending, mesh};\nuse ulysses_kernels::{gemm, memory};\nfn f() {}",
        ),
        ("src/zero/unit.rs", "use super::{FlatLayout, comm};\n/// [`Model`](crate::model::Model)\nstruct A;"),
        ("src/mesh/mod.rs", "// use crate::zero;\nconst TEXT: &str = \"crate::zero::x\";"),
        ("src/lib.rs", "pub use crate::engine::initialize;"),
    ]);
    assert_none(&check_imports(&made_up));
}

#[test]
fn test_code_may_import_anything() {
    let made_up = sources(&[
        ("src/mesh/mod.rs", "#[cfg(test)]\nmod checks;\n#[cfg(test)]\n#[allow(unused)]\nuse crate::comm::X;"),
        ("src/mesh/checks.rs", "use crate::comm::launch;"),
        ("src/mesh/checks/more.rs", "use crate::comm::launch;"),
        ("src/mesh/draw.rs", "fn f() {}\n#[cfg(test)]\nmod tests {\n    use crate::comm::launch;\n}\n"),
    ]);
    assert_none(&check_imports(&made_up));
    let after = sources(&[("src/mesh/mod.rs", "#[cfg(test)]\nmod tests {}\nuse crate::comm::X;")]);
    assert_eq!(lines(&check_imports(&after)), [("src/mesh/mod.rs", 3)]);
}

#[test]
fn a_module_without_a_row_is_named() {
    let violations = check_imports(&sources(&[("src/extra.rs", "use crate::comm::X;")]));
    assert_eq!(lines(&violations), [("src/extra.rs", 1)]);
    let violations = check_imports(&sources(&[("src/engine/mod.rs", "use crate::extra::X;")]));
    assert_eq!(lines(&violations), [("src/engine/mod.rs", 1)]);
}

#[test]
fn unsafe_is_found_in_code_and_not_in_prose() {
    let made_up = sources(&[
        ("src/engine/step.rs", "// unsafe\n#![deny(unsafe_code)]\nfn f() {\n    unsafe { g() }\n}\n"),
        ("src/zero/unit.rs", "fn f() { vec![unsafe { g() }]; }"),
        ("kernels/src/simd.rs", "unsafe fn f() {}"),
        ("tests/comm/memory.rs", "unsafe impl Send for A {}"),
    ]);
    assert_eq!(lines(&check_unsafe(&made_up)), [("src/engine/step.rs", 4), ("src/zero/unit.rs", 1)]);
}

#[test]
fn a_circle_of_files_is_found_through_imports_paths_and_names_that_are_handed_on() {
    let made_up = sources(&[
        ("src/lib.rs", "mod a;\nmod b;\nmod c;\npub use b::B;"),
        ("src/a/mod.rs", "mod inner;\npub use inner::A;"),
        ("src/a/inner.rs", "use crate::B;\npub struct A;"),
        ("src/b.rs", "pub struct B;\nfn f() { crate::c::g() }"),
        ("src/c.rs", "use super::a::A;\npub fn g() {}\n#[cfg(test)]\nmod tests { use crate::lone::L; }"),
        ("src/lone.rs", "use std::sync::Arc;\nuse crate::{c::g, b};\npub struct L;"),
    ]);
    let graph = file_graph::Crate::read("src/", &made_up);
    assert_eq!(file_graph::circles(&graph.arrows()), [["src/a/inner.rs", "src/b.rs", "src/c.rs"]]);
    let without = sources(&[("src/a.rs", "use crate::b::B;"), ("src/b.rs", "pub struct B;")]);
    assert!(file_graph::circles(&file_graph::Crate::read("src/", &without).arrows()).is_empty());
}

#[test]
fn stubs_and_long_files_are_named() {
    let stubs = format!("fn f() {{ {}!() }}\nfn g() {{ {}!(\"later\") }}", "todo", "unimplemented");
    let long = "\n".repeat(MAX_LINES + 1);
    let made_up = sources(&[
        ("src/data/mod.rs", &stubs),
        ("examples/long.rs", &long),
        ("tests/exact.rs", &long[1..]),
        ("tests/prose.rs", "/// todo! is not allowed\nfn todo() {}"),
    ]);
    assert_eq!(lines(&check_stubs(&made_up)), [("src/data/mod.rs", 1), ("src/data/mod.rs", 2)]);
    assert_eq!(lines(&check_length(&made_up)), [("examples/long.rs", MAX_LINES + 1)]);
}

#[test]
fn a_kernel_without_an_op_and_a_folder_without_a_readme_are_named() {
    let cuda = ["rope.cu", "lamb.cu", "gemm.cu", "orphan.cu", "README.md"]
        .map(|name| format!("kernels/cuda/{name}"));
    let ops = ["rope/mod.rs", "optimizer/lamb/mod.rs", "gemm.rs"].map(|name| format!("kernels/src/{name}"));
    let readmes = ["checkpoint", "comm", "data", "zero"].map(|name| format!("src/{name}/README.md"));
    let files = [&cuda[..], &ops, &readmes].concat();
    assert_eq!(lines(&check_kernels(&files)), [("kernels/cuda/orphan.cu", 1)]);
    let missing = [("kernels/src/attention/README.md", 1), ("src/sequence_parallel/README.md", 1)];
    assert_eq!(lines(&check_readmes(&files)), missing);
}

#[test]
fn a_table_that_says_something_else_is_named() {
    let text = std::fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    let changed = text.replace("| comm, config, kernels |", "| comm, config, kernels, model |");
    let violations = check_contributing(&changed);
    assert_eq!(violations.len(), 1);
    assert!(
        violations[0].rule.starts_with("`zero` may import comm, config, kernels, but"),
        "{}",
        violations[0]
    );
    assert_eq!(check_contributing("").len(), MAY_IMPORT.len());
}
