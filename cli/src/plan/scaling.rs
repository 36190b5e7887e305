//! `ulysses plan --scaling`: the study as a table, as JSON and as charts.

use super::{pictures, write_file};
use crate::failure::{Failure, OrFail};
use crate::output::print;
use crate::template::chart::{Chart, drawing};
use crate::template::render;
use serde_json::json;
use std::path::Path;
use ulysses::estimate::scaling::study;

pub(super) fn run(tokens_per_rank: usize, svg: Option<&Path>, json: bool) -> Result<(), Failure> {
    let models = study(tokens_per_rank).or_run()?;
    if let Some(path) = svg {
        let charts: Vec<Chart> = models.iter().map(pictures::scaling).collect();
        write_file(path, "--svg", drawing(&charts, 2))?;
    }
    if json {
        return print(format_args!("{}\n", serde_json::to_string_pretty(&models).or_run()?));
    }
    let data = json!({ "models": models, "tokens_per_rank": tokens_per_rank });
    print(render("scaling.txt", data).or_run()?)
}
