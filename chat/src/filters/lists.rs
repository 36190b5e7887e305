//! Filters for lists, dicts and generators.

use super::{count, is_true, one};
use crate::arguments::Arguments;
use crate::python::{
    Lazy, Numbers, Py, compare, elements, equal, failed, get_item, int, numbers, pairs, py, to_str,
};
use minijinja::value::Tuple;
use minijinja::{Error, State, Value};

/// Returns `value`, or the item at a path such as `function.name` or `0`, if one is given.
fn attribute(value: Value, path: Option<&Value>) -> Result<Value, Error> {
    let Some(path) = path.filter(|path| !path.is_none()) else { return Ok(value) };
    let Py::Str(path) = py(path) else { return get_item(&value, path) };
    let part = |part: &str| part.parse::<u32>().map_or_else(|_| Value::from(part), Value::from);
    path.split('.').try_fold(value, |value, name| get_item(&value, &part(name)))
}

/// Returns the sort key of a string, optionally case-insensitive.
fn folded(value: Value, case_sensitive: bool) -> Value {
    match value.as_str() {
        Some(text) if !case_sensitive => Value::from(text.to_lowercase()),
        _ => value,
    }
}

pub(super) fn batch(arguments: Arguments) -> Result<Value, Error> {
    let [value, size, fill] = arguments.bind(["value", "linecount", "fill_with"])?;
    let (values, size) = (elements(&value.unwrap_or_default())?, count(size, 0, "batch")?);
    let mut lines: Vec<Vec<Value>> = match size {
        0 => return Err(failed("`batch` takes an int above 0")),
        size => values.chunks(size).map(<[Value]>::to_vec).collect(),
    };
    if let (Some(fill), Some(last)) = (fill.filter(|fill| !fill.is_none()), lines.last_mut()) {
        last.resize(size, fill);
    }
    Ok(Lazy::generator(lines.into_iter().map(Value::from).collect()))
}

pub(super) fn slices(arguments: Arguments) -> Result<Value, Error> {
    let [value, num_slices, fill] = arguments.bind(["value", "slices", "fill_with"])?;
    let (values, num_slices) = (elements(&value.unwrap_or_default())?, count(num_slices, 0, "slice")?);
    if num_slices == 0 {
        return Err(failed("`slice` takes an int above 0"));
    }
    let fill = fill.filter(|fill| !fill.is_none());
    let (size, longer) = (values.len() / num_slices, values.len() % num_slices);
    let mut rest = values.into_iter();
    let slice = |index: usize| {
        let mut slice: Vec<Value> = rest.by_ref().take(size + usize::from(index < longer)).collect();
        slice.extend(fill.clone().filter(|_| index >= longer));
        Value::from(slice)
    };
    Ok(Lazy::generator((0..num_slices).map(slice).collect()))
}

pub(super) fn length(arguments: Arguments) -> Result<Value, Error> {
    let value = one(arguments)?;
    let len = match py(&value) {
        Py::Undefined => 0,
        Py::Str(text) => text.chars().count(),
        Py::Lazy(lazy) => lazy.len()?,
        Py::List | Py::Tuple | Py::Dict => value.len().unwrap_or(0),
        other => return Err(failed(format!("{} has no length", other.name()))),
    };
    Ok(Value::from(len))
}

pub(super) fn dict_sort(arguments: Arguments) -> Result<Value, Error> {
    let [value, case_sensitive, by, reverse] =
        arguments.bind(["value", "case_sensitive", "by", "reverse"])?;
    let by_value = match by.as_ref().map(py) {
        None | Some(Py::Str("key")) => false,
        Some(Py::Str("value")) => true,
        _ => return Err(failed("`dictsort` is by 'key' or 'value'")),
    };
    let case_sensitive = is_true(case_sensitive);
    let pairs = pairs(&value.unwrap_or_default())?.into_iter();
    let keyed = pairs.map(|(key, value)| {
        (
            folded(if by_value { value.clone() } else { key.clone() }, case_sensitive),
            Tuple::from([key, value]).into(),
        )
    });
    sorted(keyed.collect(), is_true(reverse))
}

pub(super) fn sort(arguments: Arguments) -> Result<Value, Error> {
    let [value, reverse, case_sensitive, path] =
        arguments.bind(["value", "reverse", "case_sensitive", "attribute"])?;
    let case_sensitive = is_true(case_sensitive);
    let mut keyed = Vec::new();
    for value in elements(&value.unwrap_or_default())? {
        keyed.push((folded(attribute(value.clone(), path.as_ref())?, case_sensitive), value));
    }
    sorted(keyed, is_true(reverse))
}

/// Sorts values by their keys; stable in both directions.
fn sorted(mut keyed: Vec<(Value, Value)>, reverse: bool) -> Result<Value, Error> {
    let mut problem = None;
    keyed.sort_by(|(left, _), (right, _)| {
        let ordering = compare(left, right, 0).unwrap_or_else(|error| {
            problem.get_or_insert(error);
            None
        });
        let ordering = ordering.unwrap_or(std::cmp::Ordering::Equal);
        if reverse { ordering.reverse() } else { ordering }
    });
    match problem {
        Some(error) => Err(error),
        None => Ok(keyed.into_iter().map(|(_, value)| value).collect()),
    }
}

pub(super) fn unique(arguments: Arguments) -> Result<Value, Error> {
    let [value, case_sensitive, path] = arguments.bind(["value", "case_sensitive", "attribute"])?;
    let case_sensitive = is_true(case_sensitive);
    let (mut seen, mut found): (Vec<Value>, Vec<Value>) = Default::default();
    for value in elements(&value.unwrap_or_default())? {
        let key = folded(attribute(value.clone(), path.as_ref())?, case_sensitive);
        let mut is_new = true;
        for other in &seen {
            is_new &= !equal(other, &key, 0)?;
        }
        if is_new {
            seen.push(key);
            found.push(value);
        }
    }
    Ok(Lazy::generator(found))
}

pub(super) fn first(arguments: Arguments) -> Result<Value, Error> {
    let value = one(arguments)?;
    match py(&value) {
        Py::Lazy(lazy) => Ok(lazy.take_first().unwrap_or_default()),
        _ => Ok(elements(&value)?.into_iter().next().unwrap_or_default()),
    }
}

pub(super) fn last(arguments: Arguments) -> Result<Value, Error> {
    let value = one(arguments)?;
    if let Py::Lazy(lazy) = py(&value) {
        lazy.len()?;
    }
    Ok(elements(&value)?.pop().unwrap_or_default())
}

pub(super) fn items(arguments: Arguments) -> Result<Value, Error> {
    let value = one(arguments)?;
    let pairs = if value.is_undefined() { Vec::new() } else { pairs(&value)? };
    Ok(Lazy::generator(pairs.into_iter().map(|(key, value)| Tuple::from([key, value]).into()).collect()))
}

pub(super) fn joined(arguments: Arguments) -> Result<Value, Error> {
    let [value, between, path] = arguments.bind(["value", "d", "attribute"])?;
    let mut parts = Vec::new();
    for value in elements(&value.unwrap_or_default())? {
        parts.push(to_str(&attribute(value, path.as_ref())?)?);
    }
    let between = between.map_or_else(|| Ok(String::new()), |between| to_str(&between))?;
    Ok(parts.join(&between).into())
}

/// Returns the elements for `map` and `select`, to which a false value such as none is empty.
fn elements_if_true(value: &Value) -> Result<Vec<Value>, Error> {
    match py(value) {
        Py::Lazy(_) => elements(value),
        _ if value.is_true() => elements(value),
        _ => Ok(Vec::new()),
    }
}

pub(super) fn map(state: &mut State<'_, '_>, mut arguments: Arguments) -> Result<Value, Error> {
    let values = elements_if_true(&arguments.take_first())?;
    let (positional, named) = arguments.into_parts();
    let mut mapped = Vec::with_capacity(values.len());
    match positional.split_first() {
        Some((name, rest)) if named.is_empty() => {
            let name = name.as_str().ok_or_else(|| failed("`map` takes the name of a filter"))?;
            for value in values {
                let arguments: Vec<Value> = std::iter::once(value).chain(rest.iter().cloned()).collect();
                mapped.push(state.apply_filter(name, &arguments)?);
            }
        }
        None => {
            let named = |name: &str| named.iter().find(|(other, _)| other == name).map(|(_, value)| value);
            let path = named("attribute").ok_or_else(|| failed("`map` takes a filter or an attribute"))?;
            for value in values {
                let found = attribute(value, Some(path))?;
                let found =
                    if found.is_undefined() { named("default").cloned().unwrap_or(found) } else { found };
                mapped.push(found);
            }
        }
        Some(_) => return Err(failed("`map` with a filter and arguments by name is not supported")),
    }
    Ok(Lazy::generator(mapped))
}

/// Returns the values for which a test on them or on an attribute is true, or those for which it is false.
pub(super) fn select(
    state: &mut State<'_, '_>,
    mut arguments: Arguments,
    by_attribute: bool,
    keep: bool,
) -> Result<Value, Error> {
    let values = elements_if_true(&arguments.take_first())?;
    let path = by_attribute.then(|| arguments.take_first());
    let rest = arguments.positional()?;
    let mut selected = Vec::new();
    for value in values {
        let tested = attribute(value.clone(), path.as_ref())?;
        let is_so = match rest.split_first() {
            None => tested.is_true(),
            Some((test, rest)) => {
                let test = test.as_str().ok_or_else(|| failed("a test is given by its name"))?;
                let arguments: Vec<Value> = std::iter::once(tested).chain(rest.iter().cloned()).collect();
                state.perform_test(test, &arguments)?
            }
        };
        if is_so == keep {
            selected.push(value);
        }
    }
    Ok(Lazy::generator(selected))
}

/// Returns the smallest or largest value; the first of equal ones.
pub(super) fn extreme(
    arguments: Arguments,
    is_better: fn(std::cmp::Ordering) -> bool,
) -> Result<Value, Error> {
    let [value, case_sensitive, path] = arguments.bind(["value", "case_sensitive", "attribute"])?;
    let case_sensitive = is_true(case_sensitive);
    let mut best: Option<(Value, Value)> = None;
    for value in elements(&value.unwrap_or_default())? {
        let key = folded(attribute(value.clone(), path.as_ref())?, case_sensitive);
        let is_best = match &best {
            Some((other, _)) => compare(&key, other, 0)?.is_some_and(is_better),
            None => true,
        };
        if is_best {
            best = Some((key, value));
        }
    }
    Ok(best.map_or(Value::UNDEFINED, |(_, value)| value))
}

pub(super) fn sum(arguments: Arguments) -> Result<Value, Error> {
    let [value, path, start] = arguments.bind(["iterable", "attribute", "start"])?;
    let mut sum = start.unwrap_or_else(|| Value::from(0));
    for value in elements(&value.unwrap_or_default())? {
        let value = attribute(value, path.as_ref())?;
        sum = match numbers(py(&sum), py(&value)) {
            Some(Numbers::Ints(left, right)) => {
                left.checked_add(right).map(int).ok_or_else(|| failed("`sum` is larger than 127 bits"))?
            }
            Some(Numbers::Floats(..)) => return Err(failed("`sum` of floats is not supported")),
            None => return Err(failed(format!("`sum` takes ints, not {}", py(&value).name()))),
        };
    }
    Ok(sum)
}

pub(super) fn reverse(arguments: Arguments) -> Result<Value, Error> {
    let value = one(arguments)?;
    if let Py::Str(text) = py(&value) {
        return Ok(Value::from(text.chars().rev().collect::<String>()));
    }
    let mut values = elements(&value)?;
    values.reverse();
    Ok(Lazy::generator(values))
}
