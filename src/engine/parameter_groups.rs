//! Checks `ulysses.parameter_groups` against the parameters of a model.

use super::EngineError;
use crate::config::ParameterGroup;
use crate::model::UnitSpec;

/// Refuses parameter groups that are likely mistakes: a pattern that matches nothing, or only parameters
/// of earlier groups; and groups that freeze all parameters. Constants count as none. [`initialize`](super::initialize) also checks
/// this; this function needs no ranks.
///
/// # Errors
/// The first of these mistakes, with the group and its pattern.
pub fn check_parameter_groups(groups: &[ParameterGroup], units: &[UnitSpec]) -> Result<(), EngineError> {
    let trainable = || units.iter().flat_map(|unit| &unit.parameters).filter(|spec| !spec.is_constant);
    let names = || trainable().map(|spec| spec.name.as_str());
    if names().next().is_some() && names().all(|name| ParameterGroup::is_frozen(groups, name)) {
        let frozen = groups.iter().filter(|group| group.frozen);
        let patterns = frozen.map(|group| format!("{:?}", group.pattern.as_str())).collect();
        return Err(EngineError::AllFrozen { patterns });
    }
    for (index, group) in groups.iter().enumerate() {
        let pattern = group.pattern.as_str();
        if !names().any(|name| group.pattern.matches(name)) {
            let similar = similar_names(pattern, names());
            return Err(EngineError::ParameterGroup { index, pattern: pattern.to_owned(), similar });
        }
        let earlier = &groups[..index];
        let is_left = |name: &str| group.pattern.matches(name) && ParameterGroup::of(earlier, name).is_none();
        if !names().any(is_left) {
            return Err(EngineError::ParameterGroupShadowed { index, pattern: pattern.to_owned() });
        }
    }
    Ok(())
}

/// The names that resemble a pattern most.
pub(super) fn similar_names<'a>(pattern: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    const MAX_SIMILAR: usize = 3;
    let mut similar: Vec<_> = names.map(|name| (strsim::jaro_winkler(pattern, name), name)).collect();
    similar.sort_by(|(a, first), (b, second)| b.total_cmp(a).then(first.cmp(second)));
    similar.into_iter().take(MAX_SIMILAR).map(|(_, name)| name.to_owned()).collect()
}
