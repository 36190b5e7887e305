//! Hostile input: refused quickly, never a panic.

use super::*;
use std::fs;

#[test]
fn deep_nesting_is_refused() {
    let deep = format!("{{\"seed\": {}{}}}", "[".repeat(64), "]".repeat(64));
    assert_eq!(message(&deep), "c.json:1:73: nested too deeply: at most 64 levels are allowed");
    let allowed = format!("{{\"seed\": {}{}}}", "[".repeat(63), "]".repeat(63));
    assert!(message(&allowed).contains("`seed`: expected an integer"));
    let bottomless = "{\"a\":".repeat(1 << 20);
    assert!(message(&bottomless).contains("nested too deeply"));
    let in_a_string =
        format!("{{\"ulysses\": {{\"data\": \"\\\"{}\"}}, \"train_batch_size\": 1}}", "[".repeat(100));
    assert!(Config::from_json_str(&in_a_string, "c.json").is_ok());
}

#[test]
fn huge_files_are_refused() {
    let limit = 16 << 20;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("huge.json");
    let mut text = " ".repeat(limit - 2) + "{}";
    fs::write(&path, &text).unwrap();
    let just_fits = Config::from_file(&path).unwrap_err();
    assert!(matches!(just_fits, ConfigError::Batch { .. }), "{just_fits}");
    text.push('\n');
    fs::write(&path, &text).unwrap();
    for error in
        [Config::from_file(&path).unwrap_err(), Config::from_json_str(&text, "huge.json").unwrap_err()]
    {
        assert!(
            matches!(error, ConfigError::File(ConfigFileError::TooLarge { limit_bytes, .. }) if limit_bytes == limit),
            "{error}"
        );
    }
}

#[test]
fn a_file_of_100_mb_is_refused_after_its_first_16() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("sparse.json");
    fs::File::create(&path).unwrap().set_len(100_000_000).unwrap();
    let error = Config::from_file(&path).unwrap_err().to_string();
    assert!(error.contains("sparse.json: larger than 16777216 bytes"), "{error}");
}

#[test]
fn errors_at_the_end_of_a_long_line_are_shown_with_its_end() {
    let faults = "\"k\":0,".repeat(99);
    let text = format!("{{{}{faults}\"seed\":-1}}", " ".repeat(15 << 20));
    let Err(ConfigError::File(ConfigFileError::Invalid { diagnostics, omitted: 0, .. })) =
        RawConfig::from_json_str(&text, "c.json")
    else {
        panic!("accepted")
    };
    assert_eq!(diagnostics.len(), 100);
    let last = diagnostics[99].excerpt.to_string();
    assert!(last.contains("\"k\":0,\"seed\":-1}") && last.len() < 300, "{last}");
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("none.json");
    let error = Config::from_file(&missing).unwrap_err();
    assert!(error.to_string().contains("none.json"), "{error}");
    assert!(matches!(
        Config::from_file(directory.path()),
        Err(ConfigError::File(ConfigFileError::Read { .. }))
    ));
    let not_utf8 = directory.path().join("latin1.json");
    fs::write(&not_utf8, b"{\"ulysses\": {\"data\": \"gr\xf6\xdfe\"}}").unwrap();
    assert!(matches!(Config::from_file(&not_utf8), Err(ConfigError::File(ConfigFileError::Read { .. }))));
}

#[test]
fn a_million_errors_are_counted_but_not_listed() {
    let unknown: String = (0..1_000_000).map(|index| format!("\"k{index}\":0,")).collect();
    let duplicate = "\"seed\":1,".repeat(1_000_000);
    for (members, faults) in [(unknown, 1_000_000), (duplicate, 1_000_000)] {
        let error = RawConfig::from_json_str(&format!("{{{members}\"seed\":1}}"), "c.json");
        let Err(ConfigError::File(ConfigFileError::Invalid { diagnostics, omitted, .. })) = error else {
            panic!("accepted")
        };
        assert_eq!((diagnostics.len(), omitted), (100, faults - 100));
    }
}

#[test]
fn every_truncation_is_refused_without_panic() {
    for end in (0..FULL.len()).filter(|&end| FULL.is_char_boundary(end)) {
        assert!(Config::from_json_str(&FULL[..end], "cut.json").is_err(), "accepted {end} bytes");
    }
}

#[test]
fn no_mutation_panics() {
    let mut num_accepted = 0;
    for index in 0..FULL.len() {
        for replacement in [b'"', b'\\', b'{', b']', b'-', b'9', b'e', b'\0', 0x80] {
            let mut bytes = FULL.as_bytes().to_vec();
            bytes[index] = replacement;
            let text = String::from_utf8_lossy(&bytes);
            match Config::from_json_str(&text, "mutated.json") {
                Ok(_) => num_accepted += 1,
                Err(error) => assert!(error.to_string().starts_with("mutated.json"), "{error}"),
            }
        }
        let mut bytes = FULL.as_bytes().to_vec();
        bytes[index] ^= 1 << (index % 8);
        let _ = Config::from_json_str(&String::from_utf8_lossy(&bytes), "flipped.json");
    }
    assert!(num_accepted > 100, "digits and strings may change: {num_accepted}");
}
