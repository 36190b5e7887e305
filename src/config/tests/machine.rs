//! Machine profiles: what is read is what was written, and what is wrong is named with its place.

use crate::config::{
    ConfigError, ConfigFileError, LinkRates, Links, MachineProfile, Precision, Rates, RatesByFormat,
};
use serde_json::{Value, json};

fn profile() -> MachineProfile {
    let rates = Rates {
        peak_flops_per_second: 2.5e11,
        product_flops_per_second: 1.75e11,
        attention_forward_flops_per_second: 1e11,
        attention_backward_flops_per_second: 0.1,
        elementwise_bytes_per_second: 123_456_789.123,
    };
    let link = LinkRates {
        latency_seconds: 0.0,
        all_to_all_bytes_per_second: 4e9,
        all_reduce_bytes_per_second: 3e9,
        reduce_scatter_bytes_per_second: 2e9,
        all_gather_bytes_per_second: 1e9,
    };
    MachineProfile {
        name: "two sockets".to_owned(),
        origin: "a test".to_owned(),
        ranks_per_node: 4,
        rates: RatesByFormat { f32: Some(rates), bf16: None, fp16: None },
        update_bytes_per_second: 8e9,
        file_bytes_per_second: None,
        host_bytes_per_second: None,
        overlaps_communication: true,
        links: Links { intra_node: Some(link), inter_node: None },
    }
}

fn read(json: &Value) -> Result<MachineProfile, ConfigError> {
    MachineProfile::from_json_str(&json.to_string(), "m.json")
}

/// The one error of a profile after `change`, without its excerpt.
fn error_of(change: impl FnOnce(&mut Value)) -> String {
    let mut json = profile().to_json();
    change(&mut json);
    let message = read(&json).unwrap_err().to_string();
    let lines: Vec<&str> = message.lines().filter(|line| line.starts_with("m.json")).collect();
    assert_eq!(lines.len(), 1, "{message}");
    lines[0].to_owned()
}

#[test]
fn a_written_profile_reads_back() {
    assert_eq!(read(&profile().to_json()).unwrap(), profile());
    let full = MachineProfile {
        rates: RatesByFormat { bf16: profile().rates.f32, fp16: profile().rates.f32, f32: None },
        links: Links { intra_node: None, inter_node: profile().links.intra_node },
        file_bytes_per_second: Some(5e8),
        host_bytes_per_second: Some(5e10),
        ..profile()
    };
    assert_eq!(read(&full.to_json()).unwrap(), full);
    assert_eq!(full.rates_of(Precision::F32), None);
    assert_eq!(full.rates_of(Precision::Bf16 { check_grad_overflow: true }), profile().rates.f32);
}

#[test]
fn errors_name_the_key_and_the_valid_values() {
    let rate = "rates.f32.product_flops_per_second";
    for (found, value) in [("0", json!(0)), ("-1.0", json!(-1.0)), ("an array of 0", json!([]))] {
        let message = error_of(|json| json["rates"]["f32"]["product_flops_per_second"] = value);
        assert!(message.contains(&format!("`{rate}`: expected a number ≥ 1e-30")), "{message}");
        assert!(message.ends_with(&format!("found {found}")), "{message}");
    }
    let message = error_of(|json| json["links"]["intra_node"]["all_gather_bytes_per_second"] = json!("auto"));
    assert!(message.contains("\"auto\" has no value for this key"), "{message}");
    let message = error_of(|json| json["rank_per_node"] = json!(8));
    assert!(message.contains("unknown key `rank_per_node`, did you mean `ranks_per_node`?"), "{message}");
    // A key of the config is none of a profile.
    let message = error_of(|json| json["steps"] = json!(8));
    assert!(message.contains("unknown key `steps`") && !message.contains("ulysses"), "{message}");
    let message =
        error_of(|json| drop(json["rates"]["f32"].as_object_mut().unwrap().remove("peak_flops_per_second")));
    assert!(message.contains("missing key `rates.f32.peak_flops_per_second`"), "{message}");
    let message = error_of(|json| drop(json.as_object_mut().unwrap().remove("links")));
    assert!(message.contains("missing key `links`: expected an object"), "{message}");
    let message = error_of(|json| json["version"] = json!(2));
    assert!(message.contains("`version`: expected an integer from 1 to 1, found 2"), "{message}");
}

#[test]
fn a_file_that_is_not_a_profile_is_an_error() {
    assert!(matches!(
        MachineProfile::from_file("no/such/file.json"),
        Err(ConfigError::File(ConfigFileError::Read { .. }))
    ));
    assert!(matches!(
        MachineProfile::from_json_str("[]", "m.json"),
        Err(ConfigError::File(ConfigFileError::Invalid { .. }))
    ));
}
