//! A step whose repeated micro batches are counted takes as long as the one that lists each of them.

use super::*;
use crate::estimate::tests::{cases, workload};
use std::path::Path;

/// A machine on which everything takes time.
fn real_machine(overlaps_communication: bool) -> MachineProfile {
    let profiles = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/machines");
    let mut machine = MachineProfile::from_file(profiles.join("h100_sxm_ib400.json")).unwrap();
    machine.rates.f32 = machine.rates.bf16;
    machine.rates.fp16 = machine.rates.bf16;
    MachineProfile {
        file_bytes_per_second: Some(1e9),
        host_bytes_per_second: Some(1e10),
        overlaps_communication,
        ..machine
    }
}

#[test]
fn a_counted_step_takes_the_time_of_the_listed_one() {
    for machine in [false, true].map(real_machine) {
        for (label, device, config) in cases() {
            let workload = workload(&config, device, 6);
            let rates = machine.rates_of(workload.config.precision).unwrap();
            let mesh = workload.mesh().unwrap();
            let [listed, counted] = [6, 4].map(|most| {
                let mut simulation = Simulation::new(0, &machine, rates, workload.nodes(&mesh, 0).unwrap());
                simulation.run(&workload.warm_step_of(&mesh, 0, most).unwrap()).unwrap();
                [simulation.now, simulation.hidden, simulation.recompute, simulation.model_flops]
            });
            for (counted, listed) in counted.iter().zip(listed) {
                let error = (counted - listed).abs();
                assert!(error <= 1e-9 * listed.abs() + 1e-15, "{label}: {counted} instead of {listed}");
            }
        }
    }
}
