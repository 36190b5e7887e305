//! The end of a run: record, summary and exit code.

use super::rank_outcome::{RankOutcome, Reported};
use super::record;
use super::run::Run;
use crate::failure::{Failure, OrFail};
use crate::output::print;
use anyhow::{Context, anyhow};
use std::path::Path;
use ulysses::checkpoint::{BEST, EvaluationResult, EvaluationSummary, step_name};
use ulysses::comm::CollectiveOp;
use ulysses::monitor::{CommsTable, RankComms, RunSummary};
use ulysses::trainer::TrainReport;

/// Completes `run.json` in the first process and prints the summary; `is_verbose` adds tables of all ranks. A run that
/// was stopped or that trained nothing is a failure.
pub(super) fn report(
    run: &Run,
    ranks: Vec<RankOutcome>,
    is_first: bool,
    is_verbose: bool,
) -> Result<(), Failure> {
    let first = ranks.first().context("a mesh has a rank").or_run()?;
    let TrainReport { steps: step, last_step, stopped, evaluations, checkpoint, stopped_early } =
        &first.train;
    let Some(Reported { totals, mut record }) = first.reported.clone() else {
        let reason = stopped_early
            .as_ref()
            .map_or_else(String::new, |reason| format!("; the run stopped early: {reason}"));
        return print(format_args!(
            "nothing to do: {step} steps are complete, {last_step} are requested{reason}\n"
        ));
    };
    if is_first {
        record::finish(&run.job, &mut record, &ranks);
        record::write(&run.output, &record).or_run()?;
    }
    let (steps, nothing_trained) = (totals.steps, totals.last_loss.is_none());
    let summary = RunSummary { totals, ranks: ranks.iter().map(|rank| rank.summary.clone()).collect() };
    if is_verbose {
        print(summary.verbose())?
    } else {
        print(&summary)?
    }
    print_comms(run, &ranks)?;
    if is_verbose || run.job.config.monitoring.comms_logger.enabled {
        print("\n")?;
    }
    print_evaluations(run, *evaluations)?;
    print_paths(run, checkpoint.as_deref())?;
    if let Some(reason) = stopped_early {
        print(format_args!("\nstopped early after step {step}: {reason}\n"))?;
    }
    if *stopped {
        return Err(Failure::Stopped { step: *step, is_saved: run.job.config.checkpoint.is_some() });
    }
    if nothing_trained {
        let message = format!("nothing was trained: all {steps} steps were skipped (reasons above)");
        return Err(Failure::Run(anyhow!(message)));
    }
    Ok(())
}

/// Prints the paths of the results.
fn print_paths(run: &Run, checkpoint: Option<&Path>) -> Result<(), Failure> {
    if let Some(checkpoint) = checkpoint {
        print(format_args!("checkpoint  {}\n", checkpoint.display()))?;
    }
    let output = run.output.display();
    print(format_args!(
        "output      {output} (metrics in {output}/metrics.jsonl; HTML report: `ulysses report {output}`)\n"
    ))
}

/// Prints the best step by evaluation loss, if any, and its checkpoint.
fn print_evaluations(run: &Run, evaluations: EvaluationSummary) -> Result<(), Failure> {
    let Some(EvaluationResult { step, loss }) = evaluations.best else { return Ok(()) };
    let checkpoint = evaluations.best_checkpoint.map_or_else(String::new, |best| {
        let (path, output) = (run.output.join(step_name(best.step)), run.output.display());
        format!("; best checkpoint {} (named by {output}/{BEST})", path.display())
    });
    print(format_args!("evaluation  best loss {loss:.4} at step {step}{checkpoint}\n"))
}

/// Prints the table of `comms_logger`.
fn print_comms(run: &Run, ranks: &[RankOutcome]) -> Result<(), Failure> {
    let logger = &run.job.config.monitoring.comms_logger;
    if !logger.enabled {
        return Ok(());
    }
    let ranks: Vec<RankComms> = ranks.iter().map(|rank| rank.comms.clone()).collect();
    let shows = |op: CollectiveOp| logger.logs(&op.to_string());
    print(format_args!(
        "\n{}",
        CommsTable { ranks: &ranks, groups: &record::groups(&run.job), shows: &shows }
    ))
}
