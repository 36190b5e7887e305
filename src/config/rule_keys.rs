//! The keys of a rule of `ulysses.mesh_rules` in the tree of the file.
//!
//! They replace the file's before it is checked, so the same checks apply, and errors show their position.

use jsonc_parser::ast::{Object, ObjectProp, Value};

/// Moves the keys of a rule of `from` to the same places in `into`. `from` is another tree of the same text.
pub(super) fn apply<'a>(index: usize, mut from: Object<'a>, into: &mut Object<'a>) {
    if let Some(keys) = take_keys(index, &mut from) {
        merge(into, keys);
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

/// Merges objects key by key. One with a `type`, such as `optimizer`, is replaced: its other keys belong to the type.
fn merge<'a>(into: &mut Object<'a>, from: Object<'a>) {
    for ObjectProp { name, value, range } in from.properties {
        let existing = into.properties.iter_mut().find(|property| property.name.as_str() == name.as_str());
        match (existing, value) {
            (None, value) => into.properties.push(ObjectProp { name, value, range }),
            (Some(ObjectProp { value: Value::Object(into), .. }), Value::Object(from))
                if from.get("type").is_none() =>
            {
                merge(into, from);
            }
            (Some(existing), value) => existing.value = value,
        }
    }
}
