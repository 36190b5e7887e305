//! Scaled frequencies, compared with values computed in f64 outside of this crate. These agree with
//! transformers' within its f32 precision.

use super::*;

#[track_caller]
fn assert_frequencies(scaling: Scaling, theta: f64, document_len: u32, expected: &[f64]) {
    let rope = Rope { scaling, ..theta.into() };
    assert_eq!(rope.refused(2 * expected.len()), None);
    let frequencies = rope.frequencies(2 * expected.len(), document_len);
    assert_eq!(frequencies.len(), expected.len());
    for (pair, (got, expected)) in frequencies.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() <= 1e-14 * expected, "pair {pair}: {got}, expected {expected}");
    }
}

const DYNAMIC: Scaling = Scaling::Dynamic { factor: 2.0, original_len: 16 };

const YARN: Scaling = Scaling::Yarn {
    factor: 4.0,
    beta_fast: 32.0,
    beta_slow: 1.0,
    truncate: true,
    attention_factor: 1.138_629_436_111_989,
    original_len: 2048,
};

#[test]
fn linear_scaling_divides_every_frequency() {
    assert_frequencies(Scaling::Linear { factor: 4.0 }, THETA, 100, &[0.25, 0.025, 0.0025, 0.00025]);
}

#[test]
fn proportional_scaling_rotates_the_first_pairs_as_those_of_whole_heads() {
    assert_frequencies(
        Scaling::Proportional { part: 0.5, factor: 4.0 },
        THETA,
        100,
        &[0.25, 0.025, 0.0, 0.0],
    );
    assert_frequencies(Scaling::Proportional { part: 0.3, factor: 1.0 }, THETA, 100, &[1.0, 0.0, 0.0, 0.0]);
}

#[test]
fn dynamic_scaling_grows_with_documents_beyond_the_original_length() {
    let long = [1.0, 0.052_275_795_857_471_025, 0.002_732_758_832_531_984_4, 0.000_142_857_142_857_142_87];
    assert_frequencies(DYNAMIC, THETA, 64, &long);
    for len in [0, 5, 16] {
        assert_frequencies(DYNAMIC, THETA, len, &[1.0, 0.1, 0.01, 0.001]);
    }
}

#[test]
fn llama3_scaling_keeps_high_frequencies_and_divides_low_ones() {
    let scaling =
        Scaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_len: 8192 };
    let expected = [
        1.0,
        0.193_922_744_748_685_76,
        0.037_606_030_930_863_93,
        0.007_292_664_737_217_109,
        0.000_524_846_160_992_954_7, // between: 4443 positions a turn
        3.428_102_195_952_591e-5,
        6.647_869_871_181_235e-6,
        1.289_173_172_151_557_4e-6,
    ];
    assert_frequencies(scaling, 500_000.0, 1, &expected);
}

#[test]
fn yarn_ramps_from_kept_to_divided_frequencies() {
    let whole_pairs = [
        1.0,
        0.316_227_766_016_837_94,
        0.1,
        0.025_693_505_988_868_08,
        6.25e-3,
        0.001_383_496_476_323_666,
        2.5e-4,
        7.905_694_150_420_948e-5,
    ];
    assert_frequencies(YARN, THETA, 1, &whole_pairs);
    let Scaling::Yarn { factor, beta_fast, beta_slow, attention_factor, original_len, .. } = YARN else {
        unreachable!("a constant")
    };
    let exact =
        Scaling::Yarn { truncate: false, factor, beta_fast, beta_slow, attention_factor, original_len };
    let mut expected = whole_pairs;
    expected[3..6].copy_from_slice(&[
        0.023_870_192_321_736_323,
        0.005_056_971_521_129_435,
        0.000_811_290_381_701_431,
    ]);
    assert_frequencies(exact, THETA, 1, &expected);
}

#[test]
fn longrope_divides_every_frequency_by_a_factor_of_the_documents_length() {
    let scaling = Scaling::LongRope {
        short_factor: kept_list(&[1.0, 2.0, 4.0]),
        long_factor: kept_list(&[2.0, 5.0, 8.0]),
        attention_factor: 1.19,
        original_len: 16,
    };
    // 8 elements, of which 6 rotate.
    let rope = Rope { scaling, partial_rotary_factor: 0.75, ..1000.0.into() };
    assert_eq!((rope.refused(8), rope.amplitude(17)), (None, 1.19));
    for (len, expected) in [(16, [1.0, 0.05, 0.0025]), (17, [0.5, 0.02, 0.00125])] {
        for (got, expected) in rope.frequencies(8, len).iter().zip(expected) {
            assert!((got - expected).abs() < 1e-15, "{len}: {got}, expected {expected}");
        }
    }
    let mixed = Table::scaled(&[5, 5], &[16, 17], 8, &rope).unwrap();
    for (token, len) in [16, 17].into_iter().enumerate() {
        let alone = Table::scaled(&[5], &[len], 8, &rope).unwrap();
        assert_eq!(mixed.cos()[3 * token..3 * token + 3], *alone.cos());
    }
    assert_eq!(rope.refused(16).unwrap().0, "short_factor");
    assert_eq!(kept_list(&[1.0, 2.0, 4.0]).as_ptr(), kept_list(&[1.0, 2.0, 4.0]).as_ptr());
}

#[test]
fn tables_turn_every_token_by_its_own_documents_frequencies() {
    let (positions, lens) = ([0, 1, 2, 60, 15], [64, 64, 3, 64, 16]);
    let rope = Rope { scaling: DYNAMIC, ..THETA.into() };
    let table = Table::scaled(&positions, &lens, 8, &rope).unwrap();
    for (token, (position, len)) in positions.iter().zip(lens).enumerate() {
        let alone = Table::scaled(&[*position], &[len], 8, &rope).unwrap();
        assert_eq!(table.cos()[4 * token..4 * token + 4], *alone.cos(), "token {token}");
        assert_eq!(table.sin()[4 * token..4 * token + 4], *alone.sin(), "token {token}");
    }
    let angle = 60.0 * 0.052_275_795_857_471_025_f64;
    assert_close("cos", &table.cos()[13..14], &[angle.cos()], 1e-7);
    assert_ne!(table.cos()[4..8], *Table::new(&[1], 8, THETA).unwrap().cos());
    assert_eq!(table.cos()[8..12], *Table::new(&[2], 8, THETA).unwrap().cos());
}

#[test]
fn yarn_multiplies_the_rotation_and_its_gradient() {
    on_every_target(|target| {
        let rope = Rope { scaling: YARN, ..THETA.into() };
        let (factor, angle) = (rope.amplitude(3), 3.0 * 0.1_f64);
        let table = Table::scaled(&[3], &[], 16, &rope).unwrap();
        for (direction, sign) in [(Direction::Forward, 1.0), (Direction::Backward, -1.0)] {
            let mut data = [0.0; 16];
            data[2] = 1.0;
            let x = tensor(&data, &[1, 1, 16]);
            apply(&x, &table, direction).unwrap();
            let mut expected = [0.0; 16];
            (expected[2], expected[10]) = (factor * angle.cos(), factor * sign * angle.sin());
            assert_close(&format!("{target} {direction:?}"), &read(&x), &expected, 1e-7);
        }
    });
}

#[test]
fn queries_grow_by_a_step_per_original_length_and_keys_do_not() {
    let rope = Rope { scaling: YARN, query_growth: 0.1, ..THETA.into() };
    let positions = [0, 2047, 2048, 6143, 6144];
    let (queries, keys) = (Table::scaled(&positions, &[], 16, &rope).unwrap(), rope.of_keys());
    let keys = Table::scaled(&positions, &[], 16, &keys).unwrap();
    for (token, len) in [1.0, 1.0, 2.0, 3.0, 4.0_f64].into_iter().enumerate() {
        let growth = 1.0 + 0.1 * len.ln();
        for (queries, keys) in [(queries.cos(), keys.cos()), (queries.sin(), keys.sin())] {
            let expected: Vec<_> =
                keys[8 * token..8 * token + 8].iter().map(|k| f64::from(*k) * growth).collect();
            assert_close(&format!("token {token}"), &queries[8 * token..8 * token + 8], &expected, 2e-7);
        }
    }
    for refused in [
        Rope { scaling: Scaling::None, ..rope },
        Rope { partial_rotary_factor: 0.5, ..rope },
        Rope { query_growth: f64::NAN, ..rope },
    ] {
        assert_eq!(refused.refused(16).unwrap().0, "query_growth");
    }
}

#[test]
fn scalings_without_frequencies_are_named() {
    let refused = |scaling, head_dim| Rope { scaling, ..THETA.into() }.refused(head_dim).unwrap().0;
    assert_eq!(refused(Scaling::Linear { factor: 0.0 }, 8), "factor");
    assert_eq!(refused(Scaling::Linear { factor: f64::NAN }, 8), "factor");
    assert_eq!(refused(Scaling::Dynamic { factor: 0.5, original_len: 16 }, 8), "factor");
    assert_eq!(refused(Scaling::Proportional { part: 1.5, factor: 1.0 }, 8), "partial_rotary_factor");
    assert_eq!(refused(DYNAMIC, 2), "head_dim");
    let no_len = Scaling::Dynamic { factor: 2.0, original_len: 0 };
    assert_eq!(refused(no_len, 8), "original_max_position_embeddings");
    let llama3 =
        Scaling::Llama3 { factor: 8.0, low_freq_factor: 4.0, high_freq_factor: 4.0, original_len: 8192 };
    assert_eq!(refused(llama3, 8), "high_freq_factor");
    assert_eq!(Rope { scaling: YARN, ..1.0.into() }.refused(8).unwrap().0, "theta");
    let error = Table::scaled(&[0, 1], &[2], 8, &Rope { scaling: DYNAMIC, ..THETA.into() }).unwrap_err();
    assert!(matches!(error, OpError::TokenCount { argument: "document_lens", .. }), "{error}");
}
