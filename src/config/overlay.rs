//! Values that replace those of the file: of flags, and the keys of a rule of `ulysses.mesh_rules`.
//!
//! They are merged into the tree of the file before it is checked, so the same checks apply, and errors show their position.

use jsonc_parser::ast::{Object, ObjectProp, Value};

/// The objects that are merged key by key; others are replaced.
#[derive(Clone, Copy)]
pub(super) enum Merged {
    /// This many levels, from 1 on.
    Levels(usize),
    /// All but those with a `type`, such as `optimizer`, whose other keys belong to the type.
    WithoutType,
}

/// Moves the values of `from` to the same places in `into`.
pub(super) fn merge<'a>(into: &mut Object<'a>, from: Object<'a>, merged: Merged) {
    for ObjectProp { name, value, range } in from.properties {
        let existing = into.properties.iter_mut().find(|property| property.name.as_str() == name.as_str());
        let inner = match (merged, &value) {
            (Merged::Levels(levels @ 2..), _) => Some(Merged::Levels(levels - 1)),
            (Merged::WithoutType, Value::Object(from)) if from.get("type").is_none() => Some(merged),
            _ => None,
        };
        match (existing, value, inner) {
            (None, value, _) => into.properties.push(ObjectProp { name, value, range }),
            (Some(ObjectProp { value: Value::Object(into), .. }), Value::Object(from), Some(inner)) => {
                merge(into, from, inner);
            }
            (Some(existing), value, _) => existing.value = value,
        }
    }
}

/// Merges the keys of a rule of `from` into `into`. `from` is another tree of the same text.
pub(super) fn merge_rule<'a>(index: usize, mut from: Object<'a>, into: &mut Object<'a>) {
    if let Some(keys) = take_keys(index, &mut from) {
        merge(into, keys, Merged::WithoutType);
    }
}

fn take_keys<'a>(index: usize, root: &mut Object<'a>) -> Option<Object<'a>> {
    let Value::Object(mut ulysses) = take(root, "ulysses")? else { return None };
    let Value::Array(mut rules) = take(&mut ulysses, "mesh_rules")? else { return None };
    let Value::Array(rule) = rules.elements.get_mut(index)? else { return None };
    match rule.elements.pop()? {
        Value::Object(keys) => Some(keys),
        _ => None,
    }
}

fn take<'a>(object: &mut Object<'a>, name: &str) -> Option<Value<'a>> {
    let index = object.properties.iter().position(|property| property.name.as_str() == name)?;
    Some(object.properties.swap_remove(index).value)
}
