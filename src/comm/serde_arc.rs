//! Serde for an `Arc`, serialized like the value inside.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::sync::Arc;

pub(super) fn serialize<T, S>(value: &Arc<T>, to: S) -> Result<S::Ok, S::Error>
where
    T: Serialize + ?Sized,
    S: Serializer,
{
    value.as_ref().serialize(to)
}

pub(super) fn deserialize<'de, T, D>(from: D) -> Result<Arc<T>, D::Error>
where
    T: ?Sized,
    Box<T>: Deserialize<'de>,
    D: Deserializer<'de>,
{
    Box::<T>::deserialize(from).map(Arc::from)
}
