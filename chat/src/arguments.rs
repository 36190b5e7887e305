//! Positional and keyword arguments of a filter, test, function or method.

use super::python::failed;
use minijinja::value::Kwargs;
use minijinja::{Error, Value};

/// The arguments of one call.
#[derive(Debug)]
pub(super) struct Arguments {
    callee: &'static str,
    positional: Vec<Value>,
    named: Vec<(String, Value)>,
}

impl Arguments {
    pub(super) fn new(callee: &'static str, mut values: Vec<Value>) -> Result<Self, Error> {
        let named = match values.pop_if(|last| last.is_kwargs()) {
            Some(last) => {
                let named = Kwargs::try_from(last)?;
                named
                    .args()
                    .map(|name| Ok((name.to_owned(), named.get(name)?)))
                    .collect::<Result<_, Error>>()?
            }
            None => Vec::new(),
        };
        // `~` joins plain strings, and `+` escapes.
        if !["~", "+"].contains(&callee) && values.iter().any(Value::is_safe) {
            return Err(failed(format!(
                "`{callee}` of what `safe` gives: Python would escape what is added to it; remove `safe`"
            )));
        }
        Ok(Self { callee, positional: values, named })
    }

    /// Binds the arguments to parameters, in their order.
    pub(super) fn bind<const N: usize>(self, parameters: [&str; N]) -> Result<[Option<Value>; N], Error> {
        let Self { callee, positional, named } = self;
        if positional.len() > N {
            return Err(failed(format!("`{callee}` takes at most {N} arguments, not {}", positional.len())));
        }
        let mut bound = [const { None }; N];
        for (slot, value) in bound.iter_mut().zip(positional) {
            *slot = Some(value);
        }
        for (name, value) in named {
            match parameters.iter().position(|parameter| *parameter == name) {
                Some(index) if bound[index].is_none() => bound[index] = Some(value),
                _ => return Err(failed(format!("`{callee}` does not take an argument `{name}`"))),
            }
        }
        Ok(bound)
    }

    /// Returns the positional arguments of a call without keyword arguments.
    pub(super) fn positional(self) -> Result<Vec<Value>, Error> {
        match self.named.first() {
            None => Ok(self.positional),
            Some((name, _)) => Err(failed(format!("`{}` does not take an argument `{name}`", self.callee))),
        }
    }

    /// Returns the positional and the keyword arguments.
    pub(super) fn into_parts(self) -> (Vec<Value>, Vec<(String, Value)>) {
        (self.positional, self.named)
    }

    /// Takes the first positional argument.
    pub(super) fn take_first(&mut self) -> Value {
        match self.positional.is_empty() {
            true => Value::UNDEFINED,
            false => self.positional.remove(0),
        }
    }
}
