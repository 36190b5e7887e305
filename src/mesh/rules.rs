//! Mesh selection by machine.

use regex::Regex;

/// An ordered list of machine patterns with a mesh each, as in axlearn. The first match applies.
#[derive(Debug, Clone, Default)]
pub struct MeshRules {
    rules: Vec<(Regex, Option<String>)>,
}

/// The result of matching the rules against a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleMatch<'a> {
    /// No rule matches.
    NoMatch,
    /// The mesh of the first matching rule, as text.
    Mesh(&'a str),
    /// The first matching rule has no mesh, which also discards the mesh of the config.
    Cleared,
}

impl MeshRules {
    /// Compiles the rules. Each pattern is a regular expression that must match the whole selector.
    ///
    /// # Errors
    /// Returns the index of the first invalid pattern, and the reason.
    pub fn new(rules: &[(String, Option<String>)]) -> Result<Self, (usize, regex::Error)> {
        let compile = |(index, (pattern, mesh)): (usize, &(String, Option<String>))| {
            // Compiled alone first: wrapping would make `a)(b` a valid pattern.
            let anchored = Regex::new(pattern).and_then(|_| Regex::new(&format!("^(?:{pattern})$")));
            anchored.map(|regex| (regex, mesh.clone())).map_err(|error| (index, error))
        };
        Ok(Self { rules: rules.iter().enumerate().map(compile).collect::<Result<_, _>>()? })
    }

    /// Returns the result of the first rule that matches the selector, a description of the machine.
    pub fn select(&self, selector: &str) -> RuleMatch<'_> {
        match self.rules.iter().find(|(pattern, _)| pattern.is_match(selector)) {
            None => RuleMatch::NoMatch,
            Some((_, Some(mesh))) => RuleMatch::Mesh(mesh),
            Some((_, None)) => RuleMatch::Cleared,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(rules: &[(&str, Option<&str>)]) -> MeshRules {
        let owned = rules.iter().map(|(pattern, mesh)| ((*pattern).to_owned(), mesh.map(str::to_owned)));
        MeshRules::new(&owned.collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn the_first_matching_rule_applies() {
        let rules = rules(&[("node-[0-9]+", Some("2x4")), ("node-7|login", None), (".*", Some("1x1"))]);
        assert_eq!(rules.select("node-7"), RuleMatch::Mesh("2x4"));
        assert_eq!(rules.select("login"), RuleMatch::Cleared);
        assert_eq!(rules.select("elsewhere"), RuleMatch::Mesh("1x1"));
        assert_eq!(MeshRules::default().select("node-7"), RuleMatch::NoMatch);
    }

    #[test]
    fn patterns_match_the_whole_selector() {
        let rules = rules(&[("gpu|cpu", Some("1x2"))]);
        assert_eq!(rules.select("cpu"), RuleMatch::Mesh("1x2"));
        for longer in ["gpu8", "a gpu", "cpu\n"] {
            assert_eq!(rules.select(longer), RuleMatch::NoMatch, "{longer:?}");
        }
    }

    #[test]
    fn an_invalid_pattern_is_an_error_with_its_index() {
        let error =
            |pattern: &str| MeshRules::new(&[(".*".into(), None), (pattern.into(), None)]).unwrap_err().0;
        assert_eq!((error("a("), error("a)(b")), (1, 1));
    }
}
