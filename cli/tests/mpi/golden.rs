//! Golden values from PyTorch, on meshes of processes.

use crate::job::Job;
use crate::support::cli::Workplace;
use crate::support::compare::{assert_all_close, assert_close, values};
use crate::support::reference::load_tensors;
use crate::trial;
use libtest_mimic::Trial;
use std::path::{Path, PathBuf};

const TOLERANCE: f64 = 1e-5;

pub(crate) fn trials() -> Vec<Trial> {
    let golden = |fixture: &'static str, processes: usize, mesh: &'static str, stage: &'static str| {
        let name = format!("{fixture}_on_{mesh}_at_stage_{stage}_is_pytorch_s");
        trial(name, move || matches_pytorch(fixture, processes, mesh, stage))
    };
    vec![
        golden("tiny_strong", 4, "2x2", "3"),
        golden("tiny_strong", 3, "1x3", "0"),
        golden("packed_strong", 4, "1x4", "1"),
        golden("packed_strong", 4, "2x2", "2"),
        golden("packed_strong", 4, "ring=2,ulysses=2", "3"),
        golden("tiny_strong", 4, "ring=4,ulysses=1", "0"),
        golden("packed_strong", 4, "dp=2,ring=2,ulysses=1", "2"),
        golden("packed_strong", 4, "1x2x2", "0"),
        golden("tiny_strong", 4, "2x1x2", "3"),
        golden("packed_strong", 4, "pp=2,dp=1,sp=2", "1"),
        trial("a_mesh_of_processes_is_compared_with_a_single_rank", a_mesh_is_compared_with_a_single_rank),
    ]
}

fn file(fixture: &str, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/golden").join(fixture).join(name)
}

fn verify(
    place: &Workplace,
    fixture: &str,
    processes: usize,
    flags: &[&str],
) -> crate::support::cli::Outcome {
    let (model, batch) = (file(fixture, ""), file(fixture, "inputs.safetensors"));
    let paths = [model.to_str().unwrap(), batch.to_str().unwrap()];
    let command = ["verify", "--backend", "mpi", "--model", paths[0], "--batch", paths[1]];
    let arguments = [&command[..], flags].concat();
    Job::new(processes, Path::new(env!("CARGO_BIN_EXE_ulysses")), &arguments).within(&place.path(".")).run()
}

fn matches_pytorch(fixture: &str, processes: usize, mesh: &str, stage: &str) {
    let place = Workplace::new();
    let flags = ["--mesh", mesh, "--zero-stage", stage, "--output", "out.safetensors"];
    let outcome = verify(&place, fixture, processes, &flags);
    assert_eq!(
        outcome.assert_done().stdout.matches("out.safetensors").count(),
        1,
        "one process writes: {outcome:?}"
    );
    let written = load_tensors(&place.path("out.safetensors")).unwrap();
    let expected = load_tensors(&file(fixture, "outputs.safetensors")).unwrap();
    for name in ["loss", "logits"] {
        assert_close(name, &values(&written[name]), &expected[name], TOLERANCE);
    }
    let gradients = written.iter().filter_map(|(name, tensor)| Some((name.strip_prefix("grad.")?, tensor)));
    let gradients = gradients.map(|(name, tensor)| (name.to_owned(), tensor.clone())).collect();
    let expected = load_tensors(&file(fixture, "grads.safetensors")).unwrap();
    assert_all_close("gradient", &gradients, &expected, TOLERANCE);
}

fn a_mesh_is_compared_with_a_single_rank() {
    let place = Workplace::new();
    let outcome = verify(&place, "tiny_strong", 2, &["--mesh", "1x2", "--steps", "2", "--tolerance", "5e-5"]);
    assert_eq!(outcome.assert_done().stdout.matches("within tolerance 5.00e-5").count(), 1, "{outcome:?}");
    let refused = verify(&place, "tiny_strong", 2, &["--mesh", "2x2"]);
    refused.assert_refused(2, &["4 rank(s) requested, but MPI started 2", "mpirun -np 4"]);
}
