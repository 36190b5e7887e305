//! x
/// x
pub struct MeshGroups;
