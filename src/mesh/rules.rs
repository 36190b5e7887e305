//! Mesh selection by machine.

use regex::Regex;

/// An ordered list of machine patterns, as in axlearn. The first match applies.
#[derive(Debug, Clone, Default)]
pub struct MeshRules {
    patterns: Vec<Regex>,
}

/// A pattern that is no regular expression.
#[derive(Debug)]
pub struct InvalidPattern {
    /// Its index.
    pub index: usize,
    /// The mistake in it.
    pub error: regex::Error,
}

impl MeshRules {
    /// Compiles the patterns. Each is a regular expression that must match the whole selector.
    ///
    /// # Errors
    /// The first invalid pattern.
    pub fn new<S: AsRef<str>>(patterns: &[S]) -> Result<Self, InvalidPattern> {
        let compile = |(index, pattern): (usize, &S)| {
            let pattern = pattern.as_ref();
            // Compiled alone first: wrapping would make `a)(b` a valid pattern.
            let anchored = Regex::new(pattern).and_then(|_| Regex::new(&format!("^(?:{pattern})$")));
            anchored.map_err(|error| InvalidPattern { index, error })
        };
        Ok(Self { patterns: patterns.iter().enumerate().map(compile).collect::<Result<_, _>>()? })
    }

    /// Returns the index of the first pattern that matches the selector, a description of the machine.
    pub fn select(&self, selector: &str) -> Option<usize> {
        self.patterns.iter().position(|pattern| pattern.is_match(selector))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_matching_rule_applies() {
        let rules = MeshRules::new(&["node-[0-9]+", "node-7|login", ".*"]).unwrap();
        assert_eq!(
            ["node-7", "login", "elsewhere"].map(|machine| rules.select(machine)),
            [Some(0), Some(1), Some(2)]
        );
        assert_eq!(MeshRules::default().select("node-7"), None);
    }

    #[test]
    fn patterns_match_the_whole_selector() {
        let rules = MeshRules::new(&["gpu|cpu"]).unwrap();
        assert_eq!(rules.select("cpu"), Some(0));
        for longer in ["gpu8", "a gpu", "cpu\n"] {
            assert_eq!(rules.select(longer), None, "{longer:?}");
        }
    }

    #[test]
    fn an_invalid_pattern_is_an_error_with_its_index() {
        let error = |pattern: &str| MeshRules::new(&[".*", pattern]).unwrap_err().index;
        assert_eq!((error("a("), error("a)(b")), (1, 1));
    }
}
