//! The end of a run: record, summary and exit code.

use super::record::{self, Record};
use crate::failure::{Failure, OrFail};
use crate::output::print;
use anyhow::anyhow;
use std::path::Path;
use ulysses::checkpoint::{BEST, EvaluationResult, EvaluationSummary, step_name};
use ulysses::comm::CollectiveOp;
use ulysses::monitor::{CommsTable, RankComms};
use ulysses::trainer::job::PreparedJob;
use ulysses::trainer::{JobReport, TrainReport};

/// Completes `run.json` in the first process and prints the summary; `is_verbose` adds tables of all ranks. A run that
/// was stopped or that trained nothing is a failure.
pub(super) fn report(
    job: &PreparedJob,
    report: &JobReport,
    record: &Record,
    is_first: bool,
    is_verbose: bool,
) -> Result<(), Failure> {
    let JobReport { summary, train, was_complete, .. } = report;
    let TrainReport { steps: step, last_step, stopped, evaluations, checkpoint, stopped_early } = train;
    if *was_complete {
        let reason = stopped_early
            .as_ref()
            .map_or_else(String::new, |reason| format!("; the run stopped early: {reason}"));
        return print(format_args!(
            "nothing to do: {step} steps are complete, {last_step} are requested{reason}\n"
        ));
    }
    if is_first {
        record.finish(job, report).or_run()?;
    }
    if is_verbose {
        print(summary.verbose())?
    } else {
        print(summary)?
    }
    print_comms(job, &report.comms)?;
    if is_verbose || job.config.monitoring.comms_logger.enabled {
        print("\n")?;
    }
    print_evaluations(record.output(), *evaluations)?;
    print_paths(record.output(), checkpoint.as_deref())?;
    if let Some(reason) = stopped_early {
        print(format_args!("\nstopped early after step {step}: {reason}\n"))?;
    }
    if *stopped {
        return Err(Failure::Stopped { step: *step, is_saved: job.config.checkpoint.is_some() });
    }
    if summary.totals.last_loss.is_none() {
        let steps = summary.totals.steps;
        let message = format!("nothing was trained: all {steps} steps were skipped (reasons above)");
        return Err(Failure::Run(anyhow!(message)));
    }
    Ok(())
}

/// Prints the paths of the results.
fn print_paths(output: &Path, checkpoint: Option<&Path>) -> Result<(), Failure> {
    if let Some(checkpoint) = checkpoint {
        print(format_args!("checkpoint  {}\n", checkpoint.display()))?;
    }
    let output = output.display();
    print(format_args!(
        "output      {output} (metrics in {output}/metrics.jsonl; HTML report: `ulysses report {output}`)\n"
    ))
}

/// Prints the best step by evaluation loss, if any, and its checkpoint.
fn print_evaluations(output: &Path, evaluations: EvaluationSummary) -> Result<(), Failure> {
    let Some(EvaluationResult { step, loss }) = evaluations.best else { return Ok(()) };
    let checkpoint = evaluations.best_checkpoint.map_or_else(String::new, |best| {
        let (path, output) = (output.join(step_name(best.step)), output.display());
        format!("; best checkpoint {} (named by {output}/{BEST})", path.display())
    });
    print(format_args!("evaluation  best loss {loss:.4} at step {step}{checkpoint}\n"))
}

/// Prints the table of `comms_logger`.
fn print_comms(job: &PreparedJob, ranks: &[RankComms]) -> Result<(), Failure> {
    let logger = &job.config.monitoring.comms_logger;
    if !logger.enabled {
        return Ok(());
    }
    let shows = |op: CollectiveOp| logger.logs(&op.to_string());
    print(format_args!("\n{}", CommsTable { ranks, groups: &record::groups(job), shows: &shows }))
}
