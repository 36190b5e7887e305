//! `ulysses doctor`: checks of this machine.

mod collectives;
mod gpus;
mod machine;

use crate::failure::{Failure, OrFail};
use crate::output::print;
use serde::Serialize;
use serde_json::json;
use std::fmt::{self, Display, Formatter};
use std::path::PathBuf;
use ulysses::trainer::job::{DevicePlacement, launch_options};

/// Maximum number of ranks in one process; more is a typing error.
const MAX_RANKS: i64 = 64;

#[derive(clap::Args)]
pub(super) struct DoctorArgs {
    /// Directory whose disk to measure, such as the checkpoint directory. Test files are removed.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Number of ranks (threads) that test the collectives.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(2..=MAX_RANKS))]
    ranks: u16,
    /// Size of collectives and of disk writes in MiB.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=4096))]
    mib: u16,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// Works.
    Ok,
    /// Absent and not required.
    Absent,
    /// Training will be slow or short of memory.
    Warning,
    /// Training will fail.
    Failed,
}

/// The result of one check. Section and name are the same in text and JSON.
#[derive(Clone, Debug, Serialize)]
struct Finding {
    section: &'static str,
    name: String,
    state: State,
    /// The value with its unit, as text.
    text: String,
    /// The value in GB/s, GFLOP/s or bytes, if it is a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<f64>,
}

impl Finding {
    fn new(section: &'static str, name: impl Into<String>, state: State, text: impl Into<String>) -> Self {
        Self { section, name: name.into(), state, text: text.into(), value: None }
    }

    fn ok(section: &'static str, name: impl Into<String>, text: impl Into<String>) -> Self {
        Self::new(section, name, State::Ok, text)
    }

    /// The finding of a check that could not be made.
    fn failed(section: &'static str, name: impl Into<String>, error: impl Into<anyhow::Error>) -> Self {
        Self::new(section, name, State::Failed, format!("{:#}", error.into()))
    }

    fn with_value(self, value: f64) -> Self {
        Self { value: Some(value), ..self }
    }
}

/// All findings; the worst one determines the verdict.
struct Examination(Vec<Finding>);

impl Examination {
    fn of(&self, state: State) -> impl Iterator<Item = &Finding> {
        self.0.iter().filter(move |finding| finding.state == state)
    }

    fn verdict(&self) -> String {
        let name = |finding: &Finding| format!("{} {}", finding.section, &finding.name);
        let list = |state| self.of(state).map(name).collect::<Vec<_>>().join(", ");
        match (self.of(State::Failed).count(), self.of(State::Warning).count()) {
            (0, 0) => "this machine can train".to_owned(),
            (0, _) => format!("this machine can train, with warnings: {}", list(State::Warning)),
            _ => format!("this machine cannot train, failed checks: {}", list(State::Failed)),
        }
    }
}

impl Display for Examination {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut section = "";
        for finding in &self.0 {
            if finding.section != section {
                section = finding.section;
                writeln!(f, "{}", section)?;
            }
            let mark = match finding.state {
                State::Ok => ' ',
                State::Absent => '-',
                State::Warning => '!',
                State::Failed => '✗',
            };
            writeln!(f, "{mark} {:<20} {}", &finding.name, finding.text)?;
        }
        writeln!(f, "\n{}", self.verdict())
    }
}

pub(super) fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let ranks = usize::from(args.ranks);
    let options = launch_options(None, ranks)?;
    let mut findings = machine::cpu();
    findings.extend(machine::memory());
    findings.extend(machine::mpi());
    findings.extend(gpus::check(args));
    findings.extend(machine::rates(args.mib)?);
    findings.push(machine::disk(&args.dir, args.mib));
    findings.extend(collectives::check("collectives", DevicePlacement::cpu(), ranks, &options, args.mib));
    let examination = Examination(findings);
    let can_train = examination.of(State::Failed).next().is_none();
    if args.json {
        let warnings = examination.of(State::Warning).count();
        let json = json!({
            "can_train": can_train, "warnings": warnings, "verdict": examination.verdict(),
            "version": env!("CARGO_PKG_VERSION"), "findings": serde_json::to_value(&examination.0).or_run()?,
        });
        print(format_args!("{json:#}\n"))?;
    } else {
        print(&examination)?;
    }
    if can_train { Ok(()) } else { Err(Failure::Run(anyhow::anyhow!(examination.verdict()))) }
}
