//! The mesh never changes the math: training against PyTorch, an independent f64 decoder, and itself.

mod custom_block;
mod documents;
mod fault_injection;
mod flexible_sp;
mod golden;
mod head_bias;
mod hybrid_meshes;
mod latent_attention;
mod linear_attention;
mod loss_normalization;
mod lr_schedules;
mod mamba2;
mod mesh_invariance;
mod optimizers;
mod parallel_plan;
mod parameter_groups;
mod pipeline;
mod precision;
mod reference;
mod ring;
mod sample;
mod short_conv;
mod single_branch;
mod sinks;
mod state_passing;
mod tensor_parallel;
