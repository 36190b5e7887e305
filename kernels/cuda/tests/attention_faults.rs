/// Faults of the fused attention kernels that tests must find: a name, the file, and a text in it (or in
/// `attention_fused.cuh` or `attention_softmax.cuh`) with what replaces it. The build script compiles the faulty kernels
/// for bf16 and a head dimension of 64.
const ATTENTION_FAULTS: &[[&str; 4]] = &[
    [
        "forward_forgotten_wait",
        "attention_fused_forward",
        "wait_for_copies();\n        if (key + kKeys",
        "__syncthreads();\n        if (key + kKeys",
    ],
    [
        "forward_wrong_fragment",
        "attention_fused_forward",
        "round_pair<T>(c[m][n][2], c[m][n][3])",
        "round_pair<T>(c[m][n][3], c[m][n][2])",
    ],
    [
        "forward_mask_at_the_edge_of_a_tile",
        "attention_fused_forward",
        "column >= end",
        "column >= end + (n == kN - 1)",
    ],
    [
        "forward_missing_rescale",
        "attention_fused_forward",
        "scale_rows(output, factor);\n        u32 p",
        "u32 p",
    ],
    [
        "forward_third_tile",
        "attention_fused_forward",
        "multiply(output, p, value_tile);",
        "if (key != 2 * kKeys) multiply(output, p, value_tile);",
    ],
    [
        "wgmma_forgotten_wait",
        "attention_fused_forward_wgmma",
        "wgmma_wait<1>(scores[0]);\n            become_p(key);",
        "become_p(key);",
    ],
    [
        "wgmma_forgotten_barrier",
        "attention_fused_forward_wgmma",
        "wgmma_wait<0>(output[0], p[0]);\n        wait_for_operands();",
        "wgmma_wait<0>(output[0], p[0]);\n        cp_async_wait<0>();",
    ],
    [
        "wgmma_stage_in_use",
        "attention_fused_forward_wgmma",
        "copy_stage(stage ^ 1, key + kKeys);\n            wgmma_wait",
        "copy_stage(stage, key + kKeys);\n            wgmma_wait",
    ],
    [
        "wgmma_wrong_fragment",
        "attention_fused_forward_wgmma",
        "p[0][step], values.of_rows(step)",
        "p[0][step ^ 1], values.of_rows(step)",
    ],
    [
        "wgmma_mask_at_the_edge_of_a_tile",
        "attention_fused_forward_wgmma",
        "column >= end",
        "column >= end + (n == kN - 1)",
    ],
    [
        "wgmma_missing_rescale",
        "attention_fused_forward_wgmma",
        "scale_rows(output, factor);\n            wgmma_fence",
        "wgmma_fence",
    ],
    [
        "wgmma_third_tile",
        "attention_fused_forward_wgmma",
        "multiply_values(output, p, tiles.values(stage));\n            copy",
        "if (key != 3 * kKeys) multiply_values(output, p, tiles.values(stage));\n            copy",
    ],
    [
        "backward_forgotten_wait",
        "attention_fused_backward",
        "wait_for_copies();\n        if (row + kRows < past_row)",
        "__syncthreads();\n        if (row + kRows < past_row)",
    ],
    [
        "backward_wrong_fragment",
        "attention_fused_backward",
        "threadIdx.x % 4 * 2 + i % 2];",
        "threadIdx.x % 4 * 2 + i / 2];",
    ],
    [
        "backward_mask_at_the_edge_of_a_tile",
        "attention_fused_backward",
        "begin <= key && key < end;",
        "begin <= key && key < end + (key % 64 == 63);",
    ],
    [
        "backward_missing_scale",
        "attention_fused_backward",
        "row.lse * kLog2E",
        "row.lse",
    ],
];
