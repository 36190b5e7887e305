//! The list of conformance cases, which every backend must pass.

/// Passes all cases, grouped by file, to a macro: `every_case!(cases! backend)` becomes
/// `cases! { backend; reduce: …; gather: …; }`.
#[allow(unused_macros, reason = "every test binary compiles all of `support`")]
macro_rules! every_case {
    ($with:ident! $($backend:expr)?) => {
        $with! {
            $($backend)?;
            reduce:
                all_reduce_sums_every_dtype_at_every_size,
                all_reduce_finds_max_and_min,
                sums_run_in_rank_order_bit_for_bit_on_all_ranks_and_in_all_runs,
                sixteen_bit_sums_are_rounded_once,
                reduce_scatter_gives_the_chunks_of_all_reduce_bit_for_bit,
                sixteen_bit_elements_are_summed_into_f32_in_rank_order,
                averages_and_products_are_those_of_all_ranks,
                reduce_leaves_the_result_on_the_root_only,
                the_result_of_reduce_is_bit_equal_to_that_of_all_reduce,
                reduce_scatter_may_write_over_its_own_input;
            gather:
                all_gather_concatenates_in_rank_order,
                all_gather_of_a_part_of_its_own_output_works_in_place,
                broadcast_reaches_all_ranks_from_every_root,
                gather_collects_at_any_root_and_scatter_distributes,
                gather_and_scatter_may_use_a_part_of_the_roots_tensor,
                values_are_reduced_and_gathered,
                varied_lengths_are_gathered_including_none,
                the_first_different_rank_is_found_with_its_value;
            exchange:
                all_to_all_moves_uneven_counts_and_none,
                strided_exchange_turns_sequence_shards_into_head_shards_and_back,
                strided_exchange_accumulates_in_rank_order,
                strided_exchange_may_write_into_the_storage_it_reads,
                plans_that_exceed_their_tensors_are_errors;
            point_to_point:
                a_ring_passes_tensors_on,
                messages_between_a_pair_keep_their_order,
                messages_started_together_keep_their_order,
                a_message_goes_out_before_a_later_collective,
                a_batch_of_messages_goes_around_rings_in_both_directions,
                a_batch_with_a_wrong_message_starts_none_and_leaves_the_group_usable,
                pairs_do_not_wait_for_each_other;
            groups:
                split_orders_members_by_key_then_rank,
                ranks_without_a_color_join_no_group,
                groups_can_be_split_again_and_work_side_by_side,
                a_group_of_one_moves_and_counts_nothing;
            pending:
                operations_can_be_waited_for_in_any_order,
                polls_complete_operations,
                an_operation_is_not_complete_before_all_ranks_have_joined,
                a_dropped_operation_still_completes,
                operations_of_two_groups_can_be_waited_for_in_opposite_orders,
                an_operation_goes_on_while_its_rank_waits_in_another_group,
                inputs_may_be_overwritten_once_waited_for,
                operations_may_read_and_write_the_same_two_storages_crosswise;
            counters:
                collectives_count_the_bytes_that_crossed_ranks,
                all_reduce_counts_its_real_traffic_small_and_large,
                operations_with_a_root_count_its_traffic,
                all_to_all_counts_uneven_traffic_without_a_ranks_own_part,
                messages_are_counted_on_both_sides,
                strided_exchange_counts_what_it_moves;
            failures:
                a_panic_reaches_the_others_at_once,
                a_panic_with_an_operation_under_way_reaches_the_others_at_once,
                an_error_reaches_all_ranks_at_once_and_is_the_error_of_the_launch,
                an_invalid_argument_on_one_rank_reaches_the_others,
                a_different_collective_is_an_error_with_both_calls,
                a_different_count_dtype_operator_or_root_is_an_error,
                a_count_mismatch_is_an_error_before_data_moves,
                mismatched_strided_plans_are_errors,
                a_missing_rank_is_an_error_after_the_timeout,
                the_error_names_the_root_blocker_and_not_a_waiting_rank,
                a_rank_that_exits_early_is_an_error_at_once,
                a_failure_in_a_small_group_fails_the_whole_world,
                operations_of_two_groups_end_when_a_rank_fails,
                ranks_of_a_sub_group_are_named_by_their_global_rank,
                a_message_of_another_kind_fails_both_sides,
                a_message_to_or_from_a_rank_that_left_fails_at_once,
                polling_ends_when_a_peer_has_left,
                calls_after_a_failure_return_the_same_error,
                wrong_arguments_are_typed_errors_and_leave_the_group_usable;
        }
    };
}
pub(crate) use every_case;
