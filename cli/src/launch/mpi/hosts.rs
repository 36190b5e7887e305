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

/// Returns hosts for the first `num_ranks` ranks: each runs as many as it has slots, the last ones perhaps none.
pub(super) fn first_slots(hosts: &[Host], num_ranks: usize) -> Vec<Host> {
    let mut left = num_ranks;
    let take = |host: &Host| {
        let slots = left.min(host.slots);
        left -= slots;
        (slots > 0).then(|| Host { slots, ..host.clone() })
    };
    hosts.iter().filter_map(take).collect()
}

/// Parses the value of `--hosts`, such as `a:8,b:8`; a host without a number runs one rank.
///
/// # Errors
/// A message that names the host.
pub(in crate::launch) fn parse_hosts(list: &str) -> Result<Vec<Host>, String> {
    let mut hosts = Vec::new();
    for word in list.split(',') {
        let (name, slots) = match word.trim().rsplit_once(':') {
            Some((name, slots)) => {
                (name, parse_slots(slots).map_err(|why| format!("--hosts {word}: {why}"))?)
            }
            None => (word.trim(), 1),
        };
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
    parse_hostfile(&text).map_err(|(line, why)| match line {
        Some(line) => format!("{}:{line}: {why}", path.display()),
        None => format!("{}: {why}", path.display()),
    })
}

fn parse_hostfile(text: &str) -> Result<Vec<Host>, (Option<usize>, String)> {
    let mut hosts = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let at = |why: String| (Some(index + 1), why);
        let line = line.split('#').next().unwrap_or_default();
        let words: Vec<&str> = line.split_whitespace().collect();
        let (name, slots) = match words[..] {
            [] => continue,
            [name, slots] => (name, slots.strip_prefix("slots=")),
            _ => ("", None),
        };
        let slots = slots.ok_or_else(|| at(format!("`{}`: expected `HOST slots=N`", line.trim())))?;
        let slots = parse_slots(slots).map_err(at)?;
        add(&mut hosts, name, slots).map_err(at)?;
    }
    match hosts.is_empty() {
        true => Err((None, "no hosts: expected lines such as `worker-1 slots=8`".to_owned())),
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
    fn fewer_ranks_take_the_first_slots() {
        let hosts = [host("a", 2), host("b", 2), host("c", 2)];
        assert_eq!(first_slots(&hosts, 3), [host("a", 2), host("b", 1)]);
        assert_eq!(first_slots(&hosts, 6), hosts);
    }

    #[test]
    fn malformed_lines_are_named_with_what_is_expected() {
        for (text, line, why) in [
            ("a slots=2\nb", Some(2), "`b`: expected `HOST slots=N`"),
            ("a slots=2 gpus=1", Some(1), "expected `HOST slots=N`"),
            ("a slots=two", Some(1), "slots are `two`, expected a number from 1 to 1024"),
            ("a slots=0", Some(1), "slots are `0`"),
            ("a slots=1\n\na slots=1", Some(3), "host a is listed twice"),
            ("-x slots=1", Some(1), "`-x` is not a host name"),
            ("# nothing", None, "no hosts"),
        ] {
            let (at, error) = parse_hostfile(text).unwrap_err();
            assert!(at == line && error.contains(why), "{text}: {at:?} {error}");
        }
        for (list, why) in [("a:x", "--hosts a:x: slots are `x`"), ("a,,b", "`` is not"), ("a,a", "twice")] {
            let error = parse_hosts(list).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        let error = read_hostfile(Path::new("/nowhere/hosts")).unwrap_err();
        assert!(error.starts_with("--hostfile: cannot read /nowhere/hosts"), "{error}");
    }
}
