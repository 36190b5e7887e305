//! Meshes chosen by the machine that a run finds itself on.

use regex::Regex;

/// Which mesh to use where: patterns of machines with a mesh each, tried in order, as in axlearn.
#[derive(Debug, Clone, Default)]
pub struct MeshRules {
    rules: Vec<(Regex, Option<String>)>,
}

/// What the rules say of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuledMesh<'a> {
    /// No rule matches.
    Unruled,
    /// The mesh of the first rule that matches, as text.
    Mesh(&'a str),
    /// That rule has none: whatever else names a mesh does not count here.
    Cleared,
}

impl MeshRules {
    /// Each pattern is a regular expression that the whole selector must match.
    ///
    /// # Errors
    /// The index of a pattern that is none, and why.
    pub fn new(rules: &[(String, Option<String>)]) -> Result<Self, (usize, regex::Error)> {
        let compile = |(index, (pattern, mesh)): (usize, &(String, Option<String>))| {
            // Alone first: `a)(b` must not become a pattern by what is put around it.
            let whole = Regex::new(pattern).and_then(|_| Regex::new(&format!("^(?:{pattern})$")));
            whole.map(|regex| (regex, mesh.clone())).map_err(|error| (index, error))
        };
        Ok(Self { rules: rules.iter().enumerate().map(compile).collect::<Result<_, _>>()? })
    }

    /// What the first rule says that matches the selector, a machine's description.
    pub fn select(&self, selector: &str) -> RuledMesh<'_> {
        match self.rules.iter().find(|(pattern, _)| pattern.is_match(selector)) {
            None => RuledMesh::Unruled,
            Some((_, Some(mesh))) => RuledMesh::Mesh(mesh),
            Some((_, None)) => RuledMesh::Cleared,
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
    fn the_first_rule_that_matches_counts() {
        let rules = rules(&[("node-[0-9]+", Some("2x4")), ("node-7|login", None), (".*", Some("1x1"))]);
        assert_eq!(rules.select("node-7"), RuledMesh::Mesh("2x4"));
        assert_eq!(rules.select("login"), RuledMesh::Cleared);
        assert_eq!(rules.select("elsewhere"), RuledMesh::Mesh("1x1"));
        assert_eq!(MeshRules::default().select("node-7"), RuledMesh::Unruled);
    }

    #[test]
    fn patterns_match_the_whole_description() {
        let rules = rules(&[("gpu|cpu", Some("1x2"))]);
        assert_eq!(rules.select("cpu"), RuledMesh::Mesh("1x2"));
        for longer in ["gpu8", "a gpu", "cpu\n"] {
            assert_eq!(rules.select(longer), RuledMesh::Unruled, "{longer:?}");
        }
    }

    #[test]
    fn the_pattern_that_is_none_is_named_by_its_place() {
        let error =
            |pattern: &str| MeshRules::new(&[(".*".into(), None), (pattern.into(), None)]).unwrap_err().0;
        assert_eq!((error("a("), error("a)(b")), (1, 1));
    }
}
