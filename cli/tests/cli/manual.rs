//! `ulysses completions` and `ulysses man`.

use crate::support::cli::Workplace;

#[test]
fn completions_contain_commands_and_flags() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let outcome = Workplace::new().run(&["completions", shell]);
        for expected in ["ulysses", "doctor", "threads-per-rank"] {
            assert!(outcome.assert_done().stdout.contains(expected), "{shell}: no {expected}");
        }
    }
    Workplace::new().run(&["completions", "dos"]).assert_refused(2, &["bash"]);
}

#[test]
fn every_command_has_a_man_page() {
    let place = Workplace::new();
    place.run(&["man", "share/man1"]).assert_done();
    for (page, expected) in [
        ("ulysses.1", "ulysses\\-train(1)"),
        ("ulysses-train.1", "\\-\\-mesh"),
        ("ulysses-bench-collectives.1", "\\-\\-ranks"),
    ] {
        let text = place.read(&format!("share/man1/{page}"));
        assert!(text.starts_with(".ie") && text.contains(expected), "{page}: {text}");
    }
    place.write("file", "");
    place
        .run(&["man", "file"])
        .assert_refused(1, &["cannot write man pages to file: expected a directory, found a file"]);
}
