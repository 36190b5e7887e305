//! The words in which the table is written.

use super::key::{Auto, Default, Effect, Harmless, Key, Literal, Max, Range, Refused, Value, Variant};

/// From 0 on.
pub(super) const NOT_NEGATIVE: Value = at_least(0.0);

/// From 0 to 1, and not 1.
pub(super) const BELOW_1: Range = Range { min: 0.0, max: Max::Below(1.0) };

/// From 0 to 1.
pub(super) const FRACTION: Value = Value::Number(Range { min: 0.0, max: Max::AtMost(1.0) });

/// Numbers that can be divided by.
pub(super) const POSITIVE: Value = at_least(1e-30);

/// Shares that leave something on both sides.
pub(super) const INSIDE_0_1: Value = Value::Number(Range { min: 1e-9, max: Max::Below(1.0) });

/// An integer from 1 on.
pub(super) const COUNT: Value = Value::Integer { min: 1, max: u64::MAX };

/// An integer from 0 on.
pub(super) const INDEX: Value = Value::Integer { min: 0, max: u64::MAX };

pub(super) const fn at_least(min: f64) -> Value {
    Value::Number(Range { min, max: Max::Unbounded })
}

/// An honoured key without a default of its own; the methods change what differs.
pub(super) const fn key(name: &'static str, value: Value, about: &'static str) -> Key {
    let default = Default::Derived("not set");
    Key {
        name,
        value,
        about,
        default,
        auto: Auto::AsDefault,
        effect: Effect::Honoured,
        or_null: false,
        is_missed: false,
    }
}

/// A flag of DeepSpeed that is off unless given.
pub(super) const fn flag(name: &'static str, about: &'static str) -> Key {
    key(name, Value::Boolean, about).boolean(false)
}

/// A section.
pub(super) const fn section(name: &'static str, keys: &'static [Key], about: &'static str) -> Key {
    key(name, Value::Section(keys), about)
}

/// A key of a feature that is refused when it is switched on.
pub(super) const fn idle(name: &'static str, value: Value) -> Key {
    Key { effect: Effect::Idle, ..key(name, value, "") }
}

/// The switch of a feature that is refused when it is on.
pub(super) const fn switch(reason: &'static str) -> Key {
    flag("enabled", "Switches the feature on.").only_off(reason)
}

/// Another name of `to`.
pub(super) const fn renamed(name: &'static str, to: &'static str, value: Value) -> Key {
    Key { effect: Effect::Renamed(to), ..key(name, value, "") }
}

pub(super) const fn variant(name: &'static str, params: &'static [Key]) -> Variant {
    Variant { name, params }
}

pub(super) const fn refused(name: &'static str, reason: &'static str) -> Refused {
    Refused { name, reason }
}

impl Key {
    pub(super) const fn default(self, default: Literal) -> Self {
        Self { default: Default::Is(default), ..self }
    }

    pub(super) const fn boolean(self, default: bool) -> Self {
        self.default(Literal::Boolean(default))
    }

    pub(super) const fn integer(self, default: i64) -> Self {
        self.default(Literal::Integer(default))
    }

    pub(super) const fn number(self, default: f64) -> Self {
        self.default(Literal::Number(default))
    }

    pub(super) const fn text(self, default: &'static str) -> Self {
        self.default(Literal::Text(default))
    }

    /// No fixed default: it follows from `what`.
    pub(super) const fn derived(self, what: &'static str) -> Self {
        Self { default: Default::Derived(what), ..self }
    }

    pub(super) const fn required(self) -> Self {
        Self { default: Default::Required, ..self }
    }

    pub(super) const fn auto(self, becomes: Literal) -> Self {
        Self { auto: Auto::Is(becomes), ..self }
    }

    pub(super) const fn auto_derived(self, from: &'static str) -> Self {
        Self { auto: Auto::Derived(from), ..self }
    }

    pub(super) const fn or_null(self) -> Self {
        Self { or_null: true, ..self }
    }

    pub(super) const fn no_effect(self, why: &'static str) -> Self {
        Self { effect: Effect::Moot(why), ..self }
    }

    /// The same of a key whose effect a user would miss: values other than the default leave a warning.
    pub(super) const fn missed(self, why: &'static str) -> Self {
        Self { is_missed: true, ..self.no_effect(why) }
    }

    /// Refused, whatever its value.
    pub(super) const fn refused(self, reason: &'static str) -> Self {
        self.only(&[], reason)
    }

    /// Refused, unless it is false.
    pub(super) const fn only_off(self, reason: &'static str) -> Self {
        self.only(&[Literal::Boolean(false)], reason)
    }

    /// Refused, unless it is one of the `harmless` values.
    pub(super) const fn only(self, harmless: &'static [Literal], reason: &'static str) -> Self {
        Self { effect: Effect::Refused { harmless: Harmless::Values(harmless), reason }, ..self }
    }

    /// Refused, if it says `"enabled": true` anywhere.
    pub(super) const fn only_disabled(self, reason: &'static str) -> Self {
        Self { effect: Effect::Refused { harmless: Harmless::NothingEnabled, reason }, ..self }
    }
}
