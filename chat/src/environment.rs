//! The environment of a template: Jinja's filters and tests, and the functions that `transformers` adds.

use super::arguments::Arguments;
use super::date::strftime;
use super::filters::FILTERS;
use super::limits;
use super::predicates::{PREDICATES, test};
use super::python::{
    Lazy, METHODS, Method, OPERATORS, Py, check_nested, failed, get_item, method, pairs, py, to_str,
    write_str,
};
use super::{ChatDate, STRFTIME_NOW};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, State, Value};

/// The white space control of `transformers`.
pub(super) fn syntax() -> Result<SyntaxConfig, Error> {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()
}

/// `strftime_now` gives a fixed date, because data must not depend on the day.
pub(super) fn environment(date: ChatDate) -> Environment<'static> {
    let mut environment = Environment::empty();
    environment.set_fuel(Some(limits::MAX_INSTRUCTIONS));
    environment.set_recursion_limit(limits::MAX_RECURSION);
    environment.set_formatter(|out, _, value| {
        let mut text = String::new();
        write_str(value, &mut text)?;
        out.write_str(&text).map_err(Error::from)
    });
    for (name, filter) in FILTERS {
        let filter = move |state: &mut State<'_, '_>, values: Rest<ValueOrKwargs>| {
            filter(state, arguments(name, values)?)
        };
        environment.add_filter(name, filter);
    }
    for (name, predicate) in PREDICATES {
        let predicate =
            move |values: Rest<ValueOrKwargs>| test(predicate, arguments(name, values)?).map(Value::from);
        environment.add_test(name, predicate);
    }
    add_operators(&mut environment);
    add_functions(&mut environment);
    environment.add_function(STRFTIME_NOW, move |format: Value| strftime(date, &to_str(&format)?));
    environment
}

/// Registers the functions that a program calls instead of instructions.
fn add_operators(environment: &mut Environment<'static>) {
    for (name, operator) in OPERATORS {
        let plain = move |values: Rest<ValueOrKwargs>| operator(&arguments(name, values)?.positional()?);
        environment.add_filter(name, plain);
        // A chained comparison has both values as one, and continues with the second one.
        let chained = move |pair: Value| operator(&[pair.get_item_by_index(0)?, pair.get_item_by_index(1)?]);
        environment.add_filter(format!("chained-{name}"), chained);
    }
    environment.add_filter("chained-second", |pair: Value| pair.get_item_by_index(1));
    for names in METHODS {
        let name = names.name;
        let call = move |values: Rest<ValueOrKwargs>| method(name, arguments(name, values)?);
        environment.add_filter(names.call, call);
        let attribute = move |value: Value| match py(&value) {
            // A namespace and `loop` have the attributes that a template or the engine sets.
            Py::Other | Py::Undefined => get_item(&value, &Value::from(name)),
            _ => Ok(Method::of(&value, name).map_or_else(|| get_item(&value, &Value::from(name)), Ok)?),
        };
        environment.add_filter(names.attribute, attribute);
    }
}

fn add_functions(environment: &mut Environment<'static>) {
    environment.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        let mut text = String::new();
        write_str(&message, &mut text)?;
        Err(failed(text))
    });
    environment.add_function("range", |bounds: Rest<Value>| Lazy::range(&bounds));
    environment.add_function("namespace", |values: Rest<ValueOrKwargs>| {
        let values = [keywords("namespace", values)?];
        minijinja::functions::namespace(from_args::<(Option<ValueOrKwargs>,)>(&values)?.0)
    });
    environment.add_function("dict", |values: Rest<ValueOrKwargs>| keywords("dict", values));
}

/// Creates a dict of a dict and keyword arguments, for `dict` and `namespace`.
fn keywords(callee: &'static str, values: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let (positional, named) = arguments(callee, values)?.into_parts();
    let mut found = match positional.as_slice() {
        [] => Vec::new(),
        [map] => pairs(map)?,
        _ => return Err(failed(format!("`{callee}` takes one dict and arguments by name"))),
    };
    found.extend(named.into_iter().map(|(name, value)| (Value::from(name), value)));
    found.iter().try_for_each(|(_, value)| check_nested(value, 0))?;
    Ok(Value::from_pairs(found))
}

fn arguments(callee: &'static str, values: Rest<ValueOrKwargs>) -> Result<Arguments, Error> {
    let values = values.into_values();
    Arguments::new(callee, values)
}
