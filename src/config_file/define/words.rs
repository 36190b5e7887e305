//! Builders of key definitions: `count().integer(10).or_null()`.
//!
//! A definition follows a field of a section ([`keys!`](super)). The field gives the name and the documentation of the
//! key, the definition its type, range, default and the value of `"auto"`.

use crate::config_file::vocabulary::{Array, DefaultValue, Key, Literal, Max, Range, Value};

/// From 0 to 1, excluding 1.
const BELOW_1: Range = Range { min: 0.0, max: Max::Below(1.0) };

/// A supported key without default. The methods change it; the field gives its name and documentation.
pub(crate) const fn key(value: Value) -> Key {
    Key::new(value)
}

/// A section or an array; the type of the field determines its contents.
pub(crate) const fn section() -> Key {
    key(Value::Section(&[]))
}

/// One of several names, which the type of the field determines.
pub(crate) const fn choice() -> Key {
    key(Value::Choice(&[]))
}

/// A flag that is off by default.
pub(crate) const fn flag() -> Key {
    key(Value::Boolean).boolean(false)
}

/// An integer from 1 on.
pub(crate) const fn count() -> Key {
    key(Value::COUNT)
}

/// An array of integers from 1 on.
pub(crate) const fn counts() -> Key {
    key(Value::Array(Array { min_len: 1, ..Array::new(&Value::COUNT, "integers ≥ 1") }))
}

/// An integer from 0 on.
pub(crate) const fn index() -> Key {
    integer(0, u64::MAX)
}

pub(crate) const fn integer(min: u64, max: u64) -> Key {
    key(Value::Integer { min, max })
}

/// A number from 0 on.
pub(crate) const fn number() -> Key {
    at_least(0.0)
}

/// A number that is safe to divide by.
pub(crate) const fn positive() -> Key {
    at_least(1e-30)
}

pub(crate) const fn at_least(min: f64) -> Key {
    key(Value::Number(Range { min, max: Max::Unbounded }))
}

/// A number from 0 to 1.
pub(crate) const fn fraction() -> Key {
    key(Value::Number(Range { min: 0.0, max: Max::AtMost(1.0) }))
}

/// A number between 0 and 1, excluding both.
pub(crate) const fn inside_0_1() -> Key {
    key(Value::Number(Range { min: 1e-9, max: Max::Below(1.0) }))
}

pub(crate) const fn below_1() -> Key {
    key(Value::Number(BELOW_1))
}

pub(crate) const fn two_below_1() -> Key {
    key(Value::Array(Array::pair(&Value::Number(BELOW_1), "two numbers")))
}

/// A non-empty string.
pub(crate) const fn text() -> Key {
    key(Value::Text)
}

impl Key {
    /// Sets the name and the documentation, from the field.
    pub(crate) const fn of_field(self, field: &'static str, docs: &'static str) -> Self {
        let name = if self.name.is_empty() { field } else { self.name };
        Self { name, about: docs.trim_ascii(), ..self }
    }

    /// Sets a name that differs from the field's.
    pub(crate) const fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    const fn default(self, default: Literal) -> Self {
        Self { default: DefaultValue::Is(default), ..self }
    }

    pub(crate) const fn boolean(self, default: bool) -> Self {
        self.default(Literal::Boolean(default))
    }

    pub(crate) const fn integer(self, default: i64) -> Self {
        self.default(Literal::Integer(default))
    }

    pub(crate) const fn number(self, default: f64) -> Self {
        self.default(Literal::Number(default))
    }

    pub(crate) const fn text(self, default: &'static str) -> Self {
        self.default(Literal::Text(default))
    }

    pub(crate) const fn two_numbers(self, default: [f64; 2]) -> Self {
        self.default(Literal::TwoNumbers(default))
    }

    /// Sets a default that follows from `what`.
    pub(crate) const fn derived(self, what: &'static str) -> Self {
        Self { default: DefaultValue::Derived(what), ..self }
    }

    pub(crate) const fn required(self) -> Self {
        Self { default: DefaultValue::Required, ..self }
    }

    /// Sets the value of `"auto"`.
    pub(crate) const fn auto(self, becomes: Literal) -> Self {
        Self { auto: Some(DefaultValue::Is(becomes)), ..self }
    }

    pub(crate) const fn auto_derived(self, from: &'static str) -> Self {
        Self { auto: Some(DefaultValue::Derived(from)), ..self }
    }

    /// Accepts `null` for an absent key.
    pub(crate) const fn or_null(self) -> Self {
        Self { or_null: true, ..self }
    }

    /// Accepts true or false instead of a section.
    pub(crate) const fn or_switch(self) -> Self {
        Self { value: Value::SwitchOrSection(&[]), ..self }
    }

    /// Sets another default for the key `name` of a section.
    pub(crate) const fn with_default(self, name: &'static str, default: &'static str) -> Self {
        Self { changed_default: Some((name, default)), ..self }
    }
}
