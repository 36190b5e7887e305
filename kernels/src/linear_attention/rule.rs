//! How a token changes the state.

/// How a token changes the state. `S`: the factors of the skip connection, where there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule<S = ()> {
    /// The delta rule: the value stored under the key moves towards the token's value.
    Delta,
    /// The delta rule with a decay for each key channel of a token, as in Kimi Linear.
    ChannelDelta,
    /// The state is a decaying sum of keys and values, as in Mamba 2.
    Sum {
        /// The factor of the skip connection of each value head.
        skip: S,
    },
}

impl<S> Rule<S> {
    /// Whether the value that the state has for the key is subtracted from a token's value.
    pub fn is_delta(&self) -> bool {
        match self {
            Self::Delta | Self::ChannelDelta => true,
            Self::Sum { .. } => false,
        }
    }

    /// Whether each channel of a token's key has its decay.
    pub fn has_channel_decays(&self) -> bool {
        matches!(self, Self::ChannelDelta)
    }

    /// The factors of the skip connection.
    pub fn skip(self) -> Option<S> {
        match self {
            Self::Delta | Self::ChannelDelta => None,
            Self::Sum { skip } => Some(skip),
        }
    }

    /// Borrows the factors of the skip connection.
    pub fn as_ref(&self) -> Rule<&S> {
        match self {
            Self::Delta => Rule::Delta,
            Self::ChannelDelta => Rule::ChannelDelta,
            Self::Sum { skip } => Rule::Sum { skip },
        }
    }

    /// Replaces the factors of the skip connection by what `map` makes of them.
    ///
    /// # Errors
    /// That of `map`.
    pub fn try_map_skip<T, E>(self, map: impl FnOnce(S) -> Result<T, E>) -> Result<Rule<T>, E> {
        Ok(match self {
            Self::Delta => Rule::Delta,
            Self::ChannelDelta => Rule::ChannelDelta,
            Self::Sum { skip } => Rule::Sum { skip: map(skip)? },
        })
    }

    /// The rule without the factors of its skip connection.
    pub fn without_skip(&self) -> Rule {
        match self {
            Self::Delta => Rule::Delta,
            Self::ChannelDelta => Rule::ChannelDelta,
            Self::Sum { .. } => Rule::Sum { skip: () },
        }
    }
}
