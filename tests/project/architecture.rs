//! Rules of the source tree: allowed imports, opened files, maximum file length, required READMEs and op folders. Lints have those on
//! `unsafe` and stubs.
//!
//! Every checker takes paths and texts. The second half of this file runs them on fake sources that violate the rules.

use crate::file_graph;
use crate::source_tree::{
    Source, Violation, imports, read_rust_files, repository_files, tokens, without_test_code,
};
use std::collections::HashSet;
use std::path::Path;

/// Allowed imports of each module of `src/`, besides itself and the leaves. `kernels` is the crate `ulysses-kernels`, `chat` `ulysses-chat`.
/// Cargo itself prevents imports of `src/` in `kernels/`, and of `cli/` in `src/`. `CONTRIBUTING.md` has the same
/// table with descriptions.
const MAY_IMPORT: [(&str, &str); 20] = [
    ("mesh", ""),
    ("comm", "mesh, kernels"),
    ("placement", "mesh, comm, kernels"),
    ("config_file", ""),
    ("optim", "config_file, kernels"),
    ("config", "mesh, config_file, optim, chat"),
    ("sequence_parallel", "mesh, comm, kernels, nn"),
    ("nn", "mesh, kernels"),
    ("tensor_parallel", "mesh, comm, placement, kernels, nn"),
    ("objective", "kernels, nn"),
    ("families", "mesh, kernels, nn"),
    ("model", "mesh, kernels, nn, families, objective"),
    ("pipeline", "mesh, comm, kernels, nn, objective, model"),
    ("zero", "mesh, comm, placement, config, kernels, optim"),
    ("data", "mesh, config, chat"),
    ("checkpoint", "mesh, comm, placement, nn, model, zero"),
    ("monitor", "comm"),
    (
        "engine",
        "mesh, comm, placement, config, kernels, sequence_parallel, tensor_parallel, pipeline, nn, objective, model, zero, data, checkpoint, monitor",
    ),
    (
        "estimate",
        "mesh, comm, placement, config, kernels, sequence_parallel, pipeline, nn, model, zero, data, engine",
    ),
    (
        "trainer",
        "mesh, comm, config, kernels, sequence_parallel, model, data, checkpoint, monitor, engine, estimate",
    ),
];

/// Modules that import no others and that all may import, and the basic tensor modules of the kernels.
const LEAVES: [&str; 7] = [
    "fnv1a",
    "regular_file",
    "safetensors_file",
    "kernels::device",
    "kernels::memory",
    "kernels::offload",
    "kernels::tensor",
];

/// The places besides `src/regular_file.rs` that open a file by its path, and why that is no path of the user's. What is in
/// `/proc` may be opened anywhere.
const MAY_OPEN_FILES: [(&str, &str); 9] = [
    ("cli/src/bench/", "files that the benchmark has made, in a directory that it has made"),
    ("cli/src/documented.rs", "the documents, in tests"),
    ("cli/src/launch/processes.rs", "/proc"),
    ("src/trainer/job/available.rs", "/proc and /sys/fs/cgroup"),
    ("cli/src/train/record.rs", "/proc and /etc/os-release"),
    ("src/checkpoint/", "files that are new by `create_new`; copies of regular files into a new directory"),
    ("src/config_file/reader/document.rs", "/dev/stdin, with a limit"),
    ("src/data/prepare/unfinished.rs", "files in its own directory, which it has opened before"),
    ("src/monitor/event_files.rs", "files that are new by `create_new`"),
];

/// Allowed dependency cycles between files, and their reasons.
const CIRCLES: [(&str, &str); 6] = [
    (
        "kernels/src/device/dry.rs kernels/src/memory.rs kernels/src/tensor.rs",
        "a dry tensor is counted where it is made, and the counters ask whether their thread is dry",
    ),
    (
        "src/comm/thread/communicator.rs src/comm/thread/mailbox.rs",
        "a communicator has a mailbox, whose messages wait in the communicator's world",
    ),
    (
        "src/data/storage/layout.rs src/data/storage/llm_c.rs src/data/storage/megatron.rs src/data/storage/own.rs \
         src/data/storage/token_file.rs",
        "formats of token files, which are detected in one place and each read in their own",
    ),
    ("src/data/source/document.rs src/data/source/lines.rs", "a line of a file becomes a document"),
    ("src/engine/engine.rs src/engine/step.rs", "the engine, and the parts of its step as `impl` blocks"),
    (
        "src/zero/flat_unit.rs src/zero/update/param_group_ranges.rs",
        "a flat unit's parameters in the ranges of their groups",
    ),
];

/// Folders that need a README.
const NEEDS_README: [&str; 6] =
    ["kernels/src/attention", "src/checkpoint", "src/comm", "src/data", "src/sequence_parallel", "src/zero"];

const MAX_LINES: usize = 500;
const RUST_FOLDERS: [&str; 7] = ["kernels", "chat", "src", "cli", "tests", "examples", "benches"];

fn may_import(module: &str) -> Option<Vec<&'static str>> {
    let row = MAY_IMPORT.iter().find(|(name, _)| *name == module);
    row.map(|(_, imports)| imports.split(", ").collect()).or_else(|| LEAVES.contains(&module).then(Vec::new))
}

/// Checks that modules import only what the table allows. `lib.rs` may import all.
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

fn check_opened_files(sources: &[Source]) -> Vec<Violation> {
    const CALLS: [(&str, &[&str]); 3] = [
        ("File", &["open", "create", "create_new", "options"]),
        ("fs", &["read", "read_to_string", "write", "copy"]),
        ("OpenOptions", &["new"]),
    ];
    let is_checked = |source: &&Source| {
        let is_program =
            ["src/", "cli/src/", "chat/src/"].iter().any(|folder| source.path.starts_with(folder));
        let is_test = source.path.contains("/tests/") || source.path.ends_with("tests.rs");
        let may = |(place, _): &(&str, &str)| source.path.starts_with(place);
        is_program && !is_test && source.path != "src/regular_file.rs" && !MAY_OPEN_FILES.iter().any(may)
    };
    let mut violations = Vec::new();
    for source in sources.iter().filter(is_checked) {
        let program: HashSet<usize> =
            without_test_code(tokens(source)).0.iter().map(|token| token.line).collect();
        let is_program = |(line, text): &(usize, &str)| {
            let is_exempt = text.trim_start().starts_with("//") || text.contains("\"/proc/");
            program.contains(&(line + 1)) && !is_exempt
        };
        for (line, text) in source.text.lines().enumerate().filter(is_program) {
            let mut calls =
                CALLS.iter().flat_map(|(of, names)| names.iter().map(move |name| format!("{of}::{name}(")));
            let is_call = |call: &String| {
                let before = text.find(call.as_str()).map(|at| text[..at].chars().next_back());
                before.is_some_and(|char| char.is_none_or(|char| !char.is_alphanumeric()))
            };
            let rule = |call| format!("{call}…) opens pipes, devices and links: use `regular_file`");
            let found = calls.find(is_call);
            violations.extend(found.map(|call| Violation::new(source, line + 1, rule(call))));
        }
    }
    violations
}

fn check_length(sources: &[Source]) -> Vec<Violation> {
    let long = |source: &&Source| source.text.lines().count() > MAX_LINES;
    let violation = |source: &Source| {
        let rule = format!("file has {} lines; the maximum is {MAX_LINES}", source.text.lines().count());
        Violation::new(source, MAX_LINES + 1, rule)
    };
    sources.iter().filter(long).map(violation).collect()
}

/// Checks that every CUDA kernel has an op of the same name: `kernels/cuda/rope.cu` has `kernels/src/rope`,
/// `kernels/cuda/lamb.cu` has `kernels/src/optimizer/lamb`, and `kernels/cuda/attention_fused_forward.cu` has
/// `kernels/src/attention/fused/forward.rs`.
fn check_kernels(files: &[String]) -> Vec<Violation> {
    let has_op = |stem: &str| {
        let of_op = files.iter().filter_map(|path| path.strip_prefix("kernels/src/"));
        of_op
            .map(|path| path.strip_suffix(".rs").unwrap_or(path))
            .any(|path| path.split('/').any(|part| part == stem) || path.replace('/', "_") == stem)
    };
    let kernels = files.iter().filter_map(|path| Some((path, path.strip_prefix("kernels/cuda/")?)));
    // Kernels of tests, in a folder, have no op.
    let kernels = kernels.filter(|(_, name)| !name.contains('/'));
    let stems = kernels.filter_map(|(path, name)| Some((path, name.strip_suffix(".cu")?)));
    stems
        .filter(|(_, stem)| !has_op(stem))
        .map(|(path, stem)| Violation {
            path: path.clone(),
            line: 1,
            rule: format!("no op {stem} in kernels/src; a kernel needs an op of the same name"),
        })
        .collect()
}

fn check_readmes(files: &[String]) -> Vec<Violation> {
    let readmes = NEEDS_README.iter().map(|folder| format!("{folder}/README.md"));
    let missing = readmes.filter(|readme| !files.contains(readme));
    let rule = "folder has no README.md, which must explain its algorithms".to_owned();
    missing.map(|path| Violation { path, line: 1, rule: rule.clone() }).collect()
}

/// Returns the rows of `CONTRIBUTING.md`'s table that are missing or different.
fn check_contributing(text: &str) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (module, allowed) in MAY_IMPORT {
        let expected = if allowed.is_empty() { "–" } else { allowed };
        let start = format!("| `{module}` |");
        let found = text.lines().enumerate().find(|(_, line)| line.starts_with(&start));
        let (index, line) = found.unwrap_or((0, "no row"));
        if !line.ends_with(&format!("| {expected} |")) {
            let rule = format!("`{module}` may import {expected}, but the table has: {line}");
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
        assert!(found, "no import found in `{module}`: outdated table, or a bug in the scanner?");
    }
}

#[test]
fn contributing_has_the_same_table() {
    assert_none(&check_contributing(&std::fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap()));
}

#[test]
fn unsafe_code_stays_in_kernels_backends_and_two_files_of_the_command() {
    let allowed = [
        "cli/src/allocator.rs",
        "cli/src/settings.rs",
        "kernels/src/lib.rs",
        "src/comm/mpi/mod.rs",
        "src/comm/nccl/mod.rs",
    ];
    let sources = read_rust_files(root(), &["kernels/src", "chat/src", "src", "cli/src", "examples"]);
    let lints = |source: &&Source| {
        tokens(source).windows(3).any(|three| three[0].text == "allow" && three[2].text == "unsafe_code")
    };
    let mut found: Vec<_> = sources.iter().filter(lints).map(|source| source.path.as_str()).collect();
    found.sort_unstable();
    assert_eq!(found, allowed);
}

#[test]
fn files_are_opened_by_one_module() {
    let sources = read_rust_files(root(), &RUST_FOLDERS);
    assert_none(&check_opened_files(&sources));
    for (place, _) in MAY_OPEN_FILES {
        assert!(sources.iter().any(|source| source.path.starts_with(place)), "{place}: outdated");
    }
}

#[test]
fn there_are_no_long_files() {
    let sources = read_rust_files(root(), &RUST_FOLDERS);
    assert!(RUST_FOLDERS.iter().all(|folder| sources.iter().any(|source| source.path.starts_with(folder))));
    assert_none(&check_length(&sources));
}

#[test]
fn required_readmes_exist_and_kernels_have_ops() {
    let files = repository_files(root());
    assert!(files.contains(&"src/lib.rs".to_owned()));
    assert_none(&check_readmes(&files));
    assert_none(&check_kernels(&files));
}

#[test]
fn files_have_no_unlisted_dependency_cycles() {
    let sources = read_rust_files(root(), &["kernels/src", "chat/src", "src", "cli/src"]);
    let mut found = Vec::new();
    for (root, least) in [("kernels/src/", 100), ("chat/src/", 30), ("src/", 100), ("cli/src/", 100)] {
        let graph = file_graph::Crate::read(root, &sources);
        assert!(graph.arrows().len() > least, "the scanner finds too few dependencies in {root}");
        found.extend(file_graph::circles(&graph.arrows()).into_iter().map(|files| files.join(" ")));
    }
    let listed = CIRCLES.map(|(files, _)| files.to_owned());
    let added: Vec<_> = found.iter().filter(|circle| !listed.contains(circle)).collect();
    let gone: Vec<_> = listed.iter().filter(|circle| !found.contains(circle)).collect();
    assert!(added.is_empty(), "new dependency cycles of files: {added:#?}");
    assert!(gone.is_empty(), "CIRCLES lists cycles that no longer exist: {gone:#?}");
}

// Tests of the checkers on fake sources.

fn sources(files: &[(&str, &str)]) -> Vec<Source> {
    files.iter().map(|(path, text)| Source { path: (*path).into(), text: (*text).into() }).collect()
}

fn lines(violations: &[Violation]) -> Vec<(&str, usize)> {
    violations.iter().map(|violation| (violation.path.as_str(), violation.line)).collect()
}

#[test]
fn a_forbidden_import_is_reported_with_file_and_line() {
    let fake = sources(&[
        ("src/model/mod.rs", "//! Docs.\nuse ulysses_kernels::rope;\nuse crate::comm::ProcessGroup;\n"),
        ("src/data/mod.rs", "fn f() {\n    ulysses_kernels::rope::forward();\n}\n"),
        ("src/mesh/mod.rs", "use crate::{fnv1a, zero::Layout};\nuse ulysses_kernels::memory;"),
        ("src/comm/thread/group.rs", "use super::super::super::nn::Layer;"),
    ]);
    let violations = check_imports(&fake);
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
        "src/model/mod.rs:3: `model` must not import `comm`; it may import [\"mesh\", \"kernels\", \"nn\", \"families\", \"objective\"]"
    );
}

#[test]
fn allowed_imports_and_mentions_in_text_pass() {
    let fake = sources(&[
        (
            "src/zero/mod.rs",
            "use crate::comm::{Pending, mesh};\nuse ulysses_kernels::{gemm, memory};\nfn f() {}",
        ),
        ("src/zero/unit.rs", "use super::{FlatLayout, comm};\n/// [`Model`](crate::model::Model)\nstruct A;"),
        ("src/mesh/mod.rs", "// use crate::zero;\nconst TEXT: &str = \"crate::zero::x\";"),
        ("src/lib.rs", "pub use crate::engine::initialize;"),
    ]);
    assert_none(&check_imports(&fake));
}

#[test]
fn test_code_may_import_anything() {
    let fake = sources(&[
        ("src/mesh/mod.rs", "#[cfg(test)]\nmod checks;\n#[cfg(test)]\n#[allow(unused)]\nuse crate::comm::X;"),
        ("src/mesh/checks.rs", "use crate::comm::launch;"),
        ("src/mesh/checks/more.rs", "use crate::comm::launch;"),
        ("src/mesh/draw.rs", "fn f() {}\n#[cfg(test)]\nmod tests {\n    use crate::comm::launch;\n}\n"),
    ]);
    assert_none(&check_imports(&fake));
    let after = sources(&[("src/mesh/mod.rs", "#[cfg(test)]\nmod tests {}\nuse crate::comm::X;")]);
    assert_eq!(lines(&check_imports(&after)), [("src/mesh/mod.rs", 3)]);
}

#[test]
fn a_module_without_a_row_is_reported() {
    let violations = check_imports(&sources(&[("src/extra.rs", "use crate::comm::X;")]));
    assert_eq!(lines(&violations), [("src/extra.rs", 1)]);
    let violations = check_imports(&sources(&[("src/engine/mod.rs", "use crate::extra::X;")]));
    assert_eq!(lines(&violations), [("src/engine/mod.rs", 1)]);
}

#[test]
fn cycles_are_found_through_imports_paths_and_reexports() {
    let fake = sources(&[
        ("src/lib.rs", "mod a;\nmod b;\nmod c;\npub use b::B;"),
        ("src/a/mod.rs", "mod inner;\npub use inner::A;"),
        ("src/a/inner.rs", "use crate::B;\npub struct A;"),
        ("src/b.rs", "pub struct B;\nfn f() { crate::c::g() }"),
        ("src/c.rs", "use super::a::A;\npub fn g() {}\n#[cfg(test)]\nmod tests { use crate::lone::L; }"),
        ("src/lone.rs", "use std::sync::Arc;\nuse crate::{c::g, b};\npub struct L;"),
    ]);
    let graph = file_graph::Crate::read("src/", &fake);
    assert_eq!(file_graph::circles(&graph.arrows()), [["src/a/inner.rs", "src/b.rs", "src/c.rs"]]);
    let without = sources(&[("src/a.rs", "use crate::b::B;"), ("src/b.rs", "pub struct B;")]);
    assert!(file_graph::circles(&file_graph::Crate::read("src/", &without).arrows()).is_empty());
}

#[test]
fn an_opened_file_is_reported() {
    let fake = sources(&[
        (
            "src/data/x.rs",
            "fn f() {\n    std::fs::read(path)?;\n    DataFile::open(path)?;\n}\n#[cfg(test)]\nmod tests {\n File::open(p) }",
        ),
        (
            "cli/src/x.rs",
            "let text = fs::read_to_string(\"/proc/self/status\");\nlet file = File::create(path);",
        ),
        ("src/regular_file.rs", "OpenOptions::new()"),
    ]);
    assert_eq!(lines(&check_opened_files(&fake)), [("src/data/x.rs", 2), ("cli/src/x.rs", 2)]);
}

#[test]
fn long_files_are_reported() {
    let long = "\n".repeat(MAX_LINES + 1);
    let fake = sources(&[("examples/long.rs", &long), ("tests/exact.rs", &long[1..])]);
    assert_eq!(lines(&check_length(&fake)), [("examples/long.rs", MAX_LINES + 1)]);
}

#[test]
fn a_kernel_without_an_op_and_a_missing_readme_are_reported() {
    let cuda = ["rope.cu", "lamb.cu", "gemm.cu", "rope_backward.cu", "orphan.cu", "README.md"]
        .map(|name| format!("kernels/cuda/{name}"));
    let ops = ["rope/mod.rs", "rope/backward.rs", "optimizer/lamb/mod.rs", "gemm.rs"]
        .map(|name| format!("kernels/src/{name}"));
    let readmes = ["checkpoint", "comm", "data", "zero"].map(|name| format!("src/{name}/README.md"));
    let files = [&cuda[..], &ops, &readmes].concat();
    assert_eq!(lines(&check_kernels(&files)), [("kernels/cuda/orphan.cu", 1)]);
    let missing = [("kernels/src/attention/README.md", 1), ("src/sequence_parallel/README.md", 1)];
    assert_eq!(lines(&check_readmes(&files)), missing);
}

#[test]
fn a_different_table_is_reported() {
    let text = std::fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    let changed =
        text.replace("| mesh, comm, placement, config, kernels, optim |", "| comm, config, kernels, model |");
    let violations = check_contributing(&changed);
    assert_eq!(violations.len(), 1);
    assert!(
        violations[0]
            .rule
            .starts_with("`zero` may import mesh, comm, placement, config, kernels, optim, but"),
        "{}",
        violations[0]
    );
    assert_eq!(check_contributing("").len(), MAY_IMPORT.len());
}
