//! The hosts of a job: `--hosts`, and host files in DeepSpeed's format.

use std::fmt;
use std::path::Path;

/// A machine, and how many ranks it runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::launch) struct Host {
    pub(in crate::launch) name: String,
    pub(in crate::launch) slots: usize,
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.slots)
    }
}

/// Parses the value of `--hosts`, such as `a:8,b:8`; a host without a number runs one rank.
///
/// # Errors
/// A message that names the host.
pub(in crate::launch) fn parse_hosts(list: &str) -> Result<Vec<Host>, String> {
    let mut hosts = Vec::new();
    for word in list.split(',') {
        let (name, slots) = word.trim().rsplit_once(':').unwrap_or((word.trim(), "1"));
        let slots = parse_slots(slots).map_err(|why| format!("--hosts {word}: {why}"))?;
        add(&mut hosts, name, slots).map_err(|why| format!("--hosts {list}: {why}"))?;
    }
    Ok(hosts)
}

/// Reads a host file: lines such as `worker-1 slots=8`; `#` begins a comment.
///
/// # Errors
/// A message that names the file and the line.
pub(in crate::launch) fn read_hostfile(path: &Path) -> Result<Vec<Host>, String> {
    let text = ulysses::regular_file::read_to_string(path)
        .map_err(|error| format!("--hostfile: cannot read {}: {error}", path.display()))?;
    parse_hostfile(&text).map_err(|why| format!("{}{why}", path.display()))
}

/// Parses a host file. An error is a message without the name of the file, which begins with `:LINE` if it has one.
fn parse_hostfile(text: &str) -> Result<Vec<Host>, String> {
    let mut hosts = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        let words: Vec<&str> = line.split_whitespace().collect();
        let added = match words[..] {
            [] => Ok(()),
            [name, slots] if slots.starts_with("slots=") => {
                parse_slots(&slots["slots=".len()..]).and_then(|slots| add(&mut hosts, name, slots))
            }
            _ => Err(format!("`{line}`: expected `HOST slots=N`")),
        };
        added.map_err(|why| format!(":{}: {why}", index + 1))?;
    }
    match hosts.is_empty() {
        true => Err(": no hosts: expected lines such as `worker-1 slots=8`".to_owned()),
        false => Ok(hosts),
    }
}

fn parse_slots(text: &str) -> Result<usize, String> {
    let slots = text.parse().ok().filter(|slots| (1..=1024).contains(slots));
    slots.ok_or_else(|| format!("slots are `{text}`, expected a number from 1 to 1024"))
}

/// Adds a host. Its name becomes an argument of `mpirun` and `ssh`, so it must not look like a flag.
fn add(hosts: &mut Vec<Host>, name: &str, slots: usize) -> Result<(), String> {
    let is_valid = |c: char| c.is_ascii_alphanumeric() || "-._@".contains(c);
    if name.is_empty() || name.starts_with('-') || !name.chars().all(is_valid) {
        return Err(format!("`{name}` is not a host name"));
    }
    if hosts.iter().any(|host| host.name == name) {
        return Err(format!("host {name} is listed twice"));
    }
    hosts.push(Host { name: name.to_owned(), slots });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, slots: usize) -> Host {
        Host { name: name.into(), slots }
    }

    #[test]
    fn both_notations_give_hosts_in_order() {
        let hosts = [host("worker-1", 4), host("10.0.0.2", 8)];
        assert_eq!(parse_hosts("worker-1:4,10.0.0.2:8").unwrap(), hosts);
        let file = "# the cluster\n\nworker-1 slots=4\n  10.0.0.2\tslots=8 # the large one\n";
        assert_eq!(parse_hostfile(file).unwrap(), hosts);
        assert_eq!(parse_hosts("a, b:2").unwrap(), [host("a", 1), host("b", 2)]);
        assert_eq!(host("a", 3).to_string(), "a:3");
    }

    #[test]
    fn malformed_lines_are_named_with_what_is_expected() {
        for (text, line, why) in [
            ("a slots=2\nb", ":2: ", "`b`: expected `HOST slots=N`"),
            ("a slots=2 gpus=1", ":1: ", "expected `HOST slots=N`"),
            ("a slots=two", ":1: ", "slots are `two`, expected a number from 1 to 1024"),
            ("a slots=0", ":1: ", "slots are `0`"),
            ("a slots=1\n\na slots=1", ":3: ", "host a is listed twice"),
            ("-x slots=1", ":1: ", "`-x` is not a host name"),
            ("# nothing", ": ", "no hosts"),
        ] {
            let error = parse_hostfile(text).unwrap_err();
            assert!(error.starts_with(line) && error.contains(why), "{text}: {error}");
        }
        for (list, why) in [("a:x", "--hosts a:x: slots are `x`"), ("a,,b", "`` is not"), ("a,a", "twice")] {
            let error = parse_hosts(list).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        let error = read_hostfile(Path::new("/nowhere/hosts")).unwrap_err();
        assert!(error.starts_with("--hostfile: cannot read /nowhere/hosts"), "{error}");
    }
}
