//! Reads text into the values of a section, and collects every error of a file.

mod check;
mod diagnostic;
mod document;
mod note;
mod report;
mod section;

pub(crate) use check::check;
pub use diagnostic::{Diagnostic, Excerpt, Place, Position, Problem};
pub(crate) use document::{abbreviated, parse, parse_file, read, without_comments};
pub use note::{Note, Severity};
pub(crate) use report::{Auto, FlagOrigin, Remarks, Report};
pub(crate) use section::Section;
