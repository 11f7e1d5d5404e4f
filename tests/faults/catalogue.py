"""The catalogue of faults: what is broken, what is promised, and which tests prove it.

A test is named as `file::function` below `tests/`. A fault without tests says why. Numbers are fixed:
reports name them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Fault:
    """One fault. `missing`: why nothing proves it here, or what of it is not proven."""

    number: int
    name: str
    injection: str
    promise: str
    tests: tuple[str, ...] = ()
    missing: str = ""


CATALOGUE: Final = (
    Fault(1, "one of three refuses connections", "its port is closed", "clients notice nothing; out within 6 s", (
        "faults/test_unreachable::test_one_of_three_that_refuses_costs_nobody_anything_and_is_out_within_seconds",
        "stories/test_failures::test_a_refused_connection_is_tried_elsewhere_and_the_client_sees_nothing_of_it",
    )),
    Fault(2, "connections are not answered", "full backlog, nobody accepts", "another backend after `timeouts.connect`", (
        "faults/test_unreachable::test_one_that_does_not_answer_connections_delays_by_the_connect_timeout_only",
        "stories/test_sockets::test_a_backlog_that_stays_full_is_no_connection",
    )),
    Fault(3, "reset before the head", "reset on a fresh connection", "told (502), not repeated, held against the backend", (
        "faults/test_unreachable::test_a_reset_before_the_head_on_a_fresh_connection_is_told_and_not_repeated",
    )),
    Fault(4, "an idle connection is closed as it is used again", "2,000 requests around the backend's idle limit",
        "no request fails, none is executed twice", (
        "faults/test_unreachable::test_connections_that_are_closed_just_as_they_are_used_again_cost_no_request",
        "stories/test_failures::test_an_idle_connection_that_the_backend_closes_costs_no_request",
    )),
    Fault(5, "a head and nothing more", "status 200, then silence", "given up after the limit, not asked twice", (
        "faults/test_streams_cut::test_a_backend_that_sends_its_head_and_nothing_more_is_given_up_and_not_asked_twice",
        "stories/test_failures::test_a_stalled_stream_is_ended_and_told",
        "stories/test_forgotten::test_it_is_written_by_another_one_if_all_others_got_many_more_tokens_meanwhile",
    )),
    Fault(6, "a stream is reset", "after 1, 10, 1,000 tokens", "goes on elsewhere token for token, else an error in the stream", (
        "faults/test_streams_cut::test_a_lone_backend_that_breaks_off_is_told_in_the_stream",
        "stories/test_resume::test_a_stream_that_is_cut_goes_on_elsewhere_as_if_nothing_had_happened",
    )),
    Fault(7, "a stream ends without its last event", "orderly end after k tokens", "as 6: never taken for complete", (
        "faults/test_streams_cut::test_a_lone_backend_that_breaks_off_is_told_in_the_stream",
        "faults/test_streams_cut::test_what_comes_in_one_read_with_its_end_goes_on_elsewhere_too",
    )),
    Fault(8, "a stream stops within a chunk", "the line ends at any byte", "as 6", (
        "faults/test_streams_cut::test_a_stream_cut_at_any_byte_goes_on_elsewhere_or_tells",
    )),
    Fault(9, "nothing but comments", "keep-alive comments for ever", "no progress: given up after the limit", (
        "faults/test_streams_cut::test_comments_are_no_progress",
    )),
    Fault(10, "a process stands still", "SIGSTOP under streams, then SIGCONT",
        "nothing new goes there, its streams go on elsewhere, it serves again", (
        "faults/test_sick_backends::test_a_process_that_is_stopped_gets_nothing_new_and_serves_again_when_it_goes_on",
        "stories/test_progress::test_a_frozen_server_gets_no_new_requests_within_seconds_and_its_own_go_on_if_it_does",
    )),
    Fault(11, "an engine stands still and its health is good", "frozen engine", "suspected, tried by one token, taken out", (
        "stories/test_control::test_a_frozen_engine_is_down_though_health_is_200_and_ready_when_it_moves",
        "stories/test_supervision::test_a_frozen_idle_engine_is_found_by_a_canary",
    )),
    Fault(12, "the health page fails and replies are good", "status 500 of /health", "out while others serve, back when it is well", (
        "faults/test_sick_backends::test_a_health_page_that_fails_takes_a_backend_out_while_others_serve",
        "stories/test_control::test_an_unhealthy_backend_is_down_with_its_status",
    )),
    Fault(13, "odd metrics", "silence, errors, 20 MiB, garbage, NaN, other names", "serves by what is in flight; bounded reading", (
        "faults/test_sick_backends::test_a_backend_with_odd_metrics_serves_all_the_same",
        "stories/test_control::test_garbage_metrics_leave_the_load_unknown_and_the_backend_in_service",
        "stories/test_fetch::test_an_unusable_page_is_a_short_word",
    )),
    Fault(14, "one KV cache is full", "usage 1.0 in its metrics", "no new work there; no flapping", (
        "faults/test_sick_backends::test_a_backend_whose_kv_cache_is_full_gets_no_new_work",
        "unit/test_table::test_the_kv_cache_closes_at_the_high_mark_and_opens_below_the_low_one",
    )),
    Fault(15, "all KV caches are full", "more prompts than fit", "they wait or are refused with a time, nothing is preempted", (
        "stories/test_admission::test_a_crowd_that_does_not_fit_the_kv_cache_waits_and_nothing_is_preempted",
        "stories/test_routing::test_a_pool_whose_caches_are_full_sheds_with_retry_after_where_nothing_may_wait",
    )),
    Fault(16, "an engine's queue is full", "503 from one, then from all", "another answers; else 503 with a time; none is sick", (
        "stories/test_admission::test_an_engine_that_is_full_is_not_sick_and_another_answers",
        "stories/test_admission::test_when_every_engine_is_full_the_client_is_told_after_each_was_asked_once",
    )),
    Fault(17, "an engine scales", "503 `currently scaling`", "another answers; not sick", (
        "faults/test_sick_backends::test_an_engine_that_scales_is_not_sick_and_another_answers",
    )),
    Fault(18, "a backend answers 429", "429 to everything", "told with a time; not held against it", (
        "faults/test_sick_backends::test_a_429_of_a_backend_is_told_and_not_held_against_it",
    )),
    Fault(19, "a prompt that kills its engine", "the engine dies as it reads it", "two die at most, then it is refused", (
        "stories/test_quarantine::test_a_request_that_kills_its_server_kills_two_of_four_and_is_refused_then",
        "stories/test_quarantine::test_a_stream_that_goes_on_elsewhere_does_not_take_the_whole_pool_with_it",
    )),
    Fault(20, "half of the requests fail", "500 to every other", "out within 30 s", (
        "stories/test_ejection::test_a_backend_that_fails_half_of_its_requests_is_out_within_half_a_minute",
    )),
    Fault(21, "a reply that is none", "HTML, gzip, no UTF-8, BOM, odd statuses", "an error in OpenAI's form, bounded, never a bug", (
        "faults/test_wrong_replies::test_a_body_that_cannot_be_read_is_never_a_bug_of_the_gateway",
        "faults/test_wrong_replies::test_a_frame_that_cannot_be_read_is_never_a_bug_of_the_gateway",
        "abuse/test_backends::test_what_is_no_reply_of_a_model_is_a_502_that_tells_nothing_of_the_inside",
    )),
    Fault(22, "a reply without end", "a line of 64 MiB, 100,000 tiny events, endless heads", "memory stays bounded", (
        "faults/test_wrong_replies::test_a_line_of_64_mib_is_passed_on_and_never_held",
        "faults/test_wrong_replies::test_a_hundred_thousand_tiny_events_are_passed_on_in_bounded_memory",
        "abuse/test_backends::test_what_never_ends_is_given_up_before_it_fills_the_memory",
    )),
    Fault(23, "a stream in tiny pieces", "split at every byte, every spelling of events", "the same stream to the client", (
        "faults/test_streams_cut::test_a_stream_in_tiny_pieces_is_whole",
        "faults/test_streams_cut::test_every_spelling_of_an_event_is_understood_however_it_is_split",
        "stories/test_relay::test_reads_that_end_anywhere_in_a_chunk_make_no_difference",
    )),
    Fault(24, "an error in the stream", "vLLM's error frame, then [DONE]", "told once, counted as a failure", (
        "stories/test_failures::test_an_error_frame_after_some_tokens_is_relayed_once_with_a_string_code",
    )),
    Fault(25, "doubtful framing of a reply", "two lengths, length and chunks, bad sizes", "502; the connection is never used again", (
        "stories/test_connection::test_what_is_not_one_clean_reply_is_refused_and_the_connection_never_reused",
    )),
    Fault(26, "bytes behind a reply", "a second reply that nobody asked for", "no client ever gets it", (
        "abuse/test_backends::test_a_second_reply_in_flight_never_reaches_another_client",
        "abuse/test_backends::test_a_reply_that_names_another_request_is_given_to_nobody",
    )),
    Fault(27, "interim replies without end", "10,000 replies 100, 102, 103", "passed over or given up in bounded memory", (
        "faults/test_wrong_replies::test_interim_replies_without_end_are_given_up",
        "stories/test_connection::test_interim_replies_are_passed_over",
    )),
    Fault(28, "headers that are the hop's or the inside's", "Set-Cookie, Server, Connection, control characters",
        "not passed on", (
        "faults/test_wrong_replies::test_what_belongs_to_the_hop_or_tells_of_the_inside_is_not_passed_on",
        "faults/test_wrong_replies::test_a_head_with_control_characters_is_refused_or_says_one_thing_only",
    )),
    Fault(29, "a redirect", "301 to 308 to an internal address", "never followed, never told", (
        "faults/test_wrong_replies::test_a_redirect_is_never_followed_nor_told",
    )),
    Fault(30, "a start that takes long", "minutes until it is healthy", "waited for, not restarted; begins slowly", (
        "stories/test_supervision::test_how_long_starts_take_is_known_to_the_next_gateway_for_the_same_command_line",
        "unit/test_limit::test_a_restarted_backend_is_given_a_tenth_and_then_evenly_more",
    )),
    Fault(31, "a crash loop", "its process ends again and again", "pauses that double, then suspended", (
        "stories/test_supervision::test_a_crash_loop_is_suspended_until_an_operator_clears_it",
        "unit/test_policy::test_pauses_double_from_the_second_restart_in_a_row_up_to_the_longest",
    )),
    Fault(32, "the whole pool dies", "all refuse at once", "503 at once with a time; served within 5 s of the first's return", (
        "faults/test_unreachable::test_a_pool_that_dies_as_a_whole_says_so_at_once_and_serves_seconds_after_its_return",
    )),
    Fault(33, "what a backend serves changes", "the window shrinks, an adapter goes", "known within seconds, refused here", (
        "faults/test_sick_backends::test_a_window_that_shrinks_under_way_is_followed",
        "stories/test_control::test_a_lost_adapter_is_not_routed_any_more_and_the_backend_stays",
    )),
    Fault(34, "a backend's clock is wrong", "one hour early or late", "changes nothing", (
        "faults/test_sick_backends::test_a_backends_wrong_clock_changes_nothing",
    )),
    Fault(35, "a slow line to one backend", "200 to 400 ms more for each piece", "it loses share, and is not ejected", (
        "faults/test_sick_backends::test_a_backend_behind_a_slow_line_loses_share_and_is_not_ejected",
    )),
    Fault(36, "a narrow line", "1 KiB/s", "no silence while data flows", (
        "faults/test_streams_cut::test_a_slow_line_is_no_silence",
    )),
    Fault(37, "a backend closes by half, or slowly", "one direction ends, or 500 ms late", "told; no descriptor stays", (
        "faults/test_streams_cut::test_a_backend_that_closes_slowly_or_by_half_holds_no_descriptor",
    )),
    Fault(38, "a wrong byte", "all bits of one byte, anywhere", "an error or passed on; never a bug, never a hang", (
        "faults/test_streams_cut::test_a_wrong_byte_anywhere_is_an_error_or_passes_and_breaks_nothing",
        "faults/test_streams_cut::test_a_stream_with_a_wrong_byte_that_then_breaks_off_is_told_or_goes_on",
    )),
    Fault(39, "a client leaves while it waits", "disconnect in the queue", "forgotten at once, never reaches a backend", (
        "stories/test_admission::test_a_client_that_leaves_while_it_waits_is_forgotten_and_never_reaches_a_backend",
    )),
    Fault(40, "a client leaves at any step", "10,000 requests end at any turn or await", "nothing is held, each is settled once", (
        "faults/test_cancellations::test_clients_that_leave_after_any_number_of_turns_of_the_loop_leave_nothing",
        "faults/test_cancellations::test_requests_that_are_cancelled_at_any_await_leave_nothing",
    )),
    Fault(41, "a client ends, resets, or closes by half", "FIN, RST, shutdown of one direction", "its engine stops within 250 ms", (
        "faults/test_bad_clients::test_however_a_client_leaves_its_engine_stops",
    )),
    Fault(42, "clients that never read", "100 streams", "256 KiB each, cut after the limit, others are served", (
        "faults/test_bad_clients::test_a_hundred_clients_that_never_read_are_bounded_and_cut_and_others_are_served",
        "stories/test_failures::test_a_client_that_does_not_read_is_bounded_and_cut",
    )),
    Fault(43, "a client that reads 10 bytes/s", "one byte each 100 ms", "cut after the limit", (
        "faults/test_bad_clients::test_a_client_that_reads_ten_bytes_a_second_is_cut",
    )),
    Fault(44, "clients that send slowly", "heads, bodies and trailers that drip", "408 or closed after the limit", (
        "abuse/test_deadlines::test_a_head_that_drips_is_cut_first_or_second",
        "abuse/test_deadlines::test_an_inference_body_that_drips_is_cut",
        "abuse/test_connections::test_two_hundred_descriptors_and_four_hundred_slow_heads",
    )),
    Fault(45, "no descriptor is left", "hundreds of connections, few descriptors", "no spin; health and requests are answered", (
        "abuse/test_connections::test_no_descriptor_left_neither_ends_nor_spins_the_listener",
        "abuse/test_connections::test_a_full_gateway_closes_the_idle_and_never_the_busy",
    )),
    Fault(46, "heads that are too large", "1 MiB target, 64 KiB header, 10,000 headers", "4xx in flat memory", (
        "faults/test_bad_clients::test_a_head_that_is_too_large_is_refused_in_flat_memory",
        "stories/test_refusals::test_a_head_that_is_too_large_is_refused",
    )),
    Fault(47, "bodies that are too large, or not as told", "length, chunks, lies", "413 or 400, before all is read", (
        "stories/test_refusals::test_a_body_that_announces_more_than_the_limit_is_refused_before_it_is_sent",
        "stories/test_refusals::test_a_body_over_the_limit_is_refused_and_the_client_can_read_why",
        "stories/test_refusals::test_a_body_that_never_comes_is_given_up",
    )),
    Fault(48, "JSON bombs", "depth, names, numbers, names twice, NaN, UTF-16", "400; the loop goes on", (
        "faults/test_bad_clients::test_json_bombs_are_refused_or_harmless_and_hold_nobody_up",
        "abuse/test_bodies::test_a_body_of_many_tiny_values_is_refused_and_holds_nobody_up",
    )),
    Fault(49, "a compressed body", "Content-Encoding", "415", (
        "stories/test_refusals::test_a_compressed_or_form_body_is_refused",
    )),
    Fault(50, "smuggled requests", "a grid of more than 100 odd framings", "as many reach the engine as are answered", (
        "abuse/test_framing::test_as_many_requests_reach_the_engine_as_are_answered_200",
    )),
    Fault(51, "odd header names and ids", "underscores, 4 KiB, no ASCII", "dropped; the id is ours", (
        "faults/test_bad_clients::test_header_names_and_ids_are_ours_or_dropped",
    )),
    Fault(52, "tricks with paths", "dots, escapes, case, vLLM's other paths", "404; the backend sees nothing", (
        "faults/test_bad_clients::test_paths_that_are_not_exactly_ours_reach_nothing",
        "stories/test_refusals::test_only_the_allow_list_exists",
    )),
    Fault(53, "doubtful credentials", "two, none, 8 KiB, another scheme", "refused alike", (
        "faults/test_bad_clients::test_credentials_that_are_doubtful_are_refused_alike",
    ), "the time that refusals take is not compared"),
    Fault(54, "requests sent ahead, and an end in the middle", "100 at once", "in order, nothing crosses", (
        "faults/test_bad_clients::test_a_hundred_requests_sent_ahead_and_an_end_in_the_middle_cross_nothing",
        "abuse/test_pipelining::test_requests_sent_ahead_are_answered_in_order_and_a_late_one_gets_its_whole_time",
    )),
    Fault(55, "upgrades and odd methods", "WebSocket, h2c, CONNECT, TRACE", "refused by the table, or passed over", (
        "stories/test_http::test_odd_methods_are_refused_in_the_form_of_every_error",
        "stories/test_http::test_a_websocket_gets_what_a_plain_get_gets",
    )),
    Fault(56, "the store is killed and comes back empty", "SIGKILL of Redis", "minutes begin anew, days and months do not", (
        "e2e/test_usage_redis::test_days_and_months_go_on_where_they_were_after_redis_lost",
        "e2e/test_usage_redis::test_what_an_outage_used_counts_once_though_limiter_and_ledger_tell_it",
        "e2e/test_replicas::test_a_drain_holds_at_all_over_a_redis_that_comes_back_empty",
        "e2e/test_store_redis::test_a_server_that_comes_back_empty_is_used_again",
        "e2e/test_limits_redis::test_no_outcome_changes_with_what_befalls_the_redis",
    )),
    Fault(57, "the store hangs", "SIGSTOP of Redis", "250 ms at most for a command", (
        "e2e/test_store_redis::test_a_server_that_hangs_costs_a_call_its_budget_and_soon_nothing",
        "e2e/test_limits_redis::test_a_redis_that_hangs_leaves_each_replica_its_share",
        "e2e/test_limits_redis::test_of_a_hundred_requests_less_than_one_waits_for_a_redis_that_answers_no_more",
        "e2e/test_replicas::test_no_request_notices_what_befalls_the_redis",
    )),
    Fault(58, "the store refuses", "OOM, READONLY, LOADING, NOAUTH", "degraded, never a 500", (
        "e2e/test_store_redis::test_what_is_wrong_with_a_server_is_told_in_words",
        "e2e/test_store_redis::test_a_server_that_still_loads_its_data_is_told_of_and_used_once_it_has",
        "stories/test_store_lost::test_the_gateway_starts_and_serves_without_it_and_restarts_nothing",
    )),
    Fault(59, "commands are cancelled in flight", "half of 10,000 calls over a line with 50 ms delay", "replies never cross", (
        "e2e/test_store_redis::test_whoever_gives_up_takes_no_other_callers_reply",
    )),
    Fault(60, "the store answers slowly or breaks off", "1 byte/s, reset in a reply", "no task stays", (
        "stories/test_store_slow::test_a_store_that_answers_slowly_or_breaks_off_leaves_nothing_behind",
    )),
    Fault(61, "the store fails over and loses writes", "Sentinel, Cluster", "one restart for an incarnation", (
        "e2e/test_failover_redis::test_limits_keys_and_months_go_on_at_the_replica_that_lacked_the_last_of_them",
        "e2e/test_failover_redis::test_in_a_cluster_each_tenant_has_a_node_and_goes_on_where_its_slots_go",
        "unit/test_leases::test_what_the_store_lost_is_told_anew_and_what_was_lifted_is_not",
    )),
    Fault(62, "one replica loses the store", "partition", "1.2 times the limit at most", (
        "unit/test_limiter::test_a_replica_without_redis_gives_out_its_share_and_says_so",
        "unit/test_limiter::test_the_share_goes_on_from_what_was_used_when_redis_last_answered",
        "e2e/test_limits_redis::test_a_replica_that_loses_redis_gives_out_no_more_than_its_share",
    ), missing="1 + 1 / replicas times the limit: with three 1.33, where all have more to send than it allows"),
    Fault(63, "the store's clock jumps", "one hour", "no negative and no endless credit", (
        "unit/test_limiter::test_a_clock_that_goes_back_empties_nothing",
    ), missing="on Redis: what its clock wrote an hour ahead is tried, by TestRedis of e2e/test_limits_redis and e2e/test_store_redis"),
    Fault(64, "a leader falls silent and goes on", "its lease expires meanwhile", "it does nothing any more", (
        "unit/test_leases::test_one_that_goes_or_falls_silent_is_followed",
        "e2e/test_replicas::test_a_leader_that_stood_still_beyond_its_lease_restarts_nothing_twice",
    )),
    Fault(65, "two leaders", "two gateways, one sick backend", "one restart for an incarnation", (
        "stories/test_supervision_orders::test_two_gateways_restart_an_incarnation_once",
    )),
    Fault(66, "a service manager that hangs, lies or floods", "commands that hang, fail, are missing", "bounded, told, ended", (
        "stories/test_launch_command::test_a_command_that_hangs_is_killed_with_its_children",
        "stories/test_launch_command::test_the_end_of_a_flood_is_kept_and_streams_apart",
        "stories/test_launch_command::test_a_program_that_is_not_there_is_told",
    )),
    Fault(67, "the gateway is stopped under streams", "SIGTERM under 100 streams", "they end well or are told so; exit code 0", (
        "faults/test_this_process::test_a_stop_under_a_hundred_streams_lets_them_end_and_exits_with_0",
        "faults/test_this_process::test_a_stop_whose_grace_period_ends_tells_each_stream_so",
    )),
    Fault(68, "the gateway is killed under streams", "SIGKILL", "none looks complete; the engines stop", (
        "faults/test_this_process::test_streams_of_a_gateway_that_is_killed_never_look_complete",
    )),
    Fault(69, "upgrades under load", "re-exec, inherited listeners", "no connection refused, no stream cut", (
        "stories/test_upgrade::test_upgrades_in_a_row_lose_no_request_on_new_and_on_kept_connections",
        "stories/test_upgrade::test_streams_end_with_the_old_process_while_new_requests_go_to_the_new_one",
    )),
    Fault(70, "a broken configuration", "half a file, none, wrong ones, under streams", "the old one stays; streams go on", (
        "faults/test_this_process::test_a_broken_configuration_changes_nothing_for_streams_under_way",
        "stories/test_lifecycle::test_a_reload_that_removes_a_backend_lets_its_streams_finish",
    )),
    Fault(71, "nobody reads the log", "the pipe is full, or closed", "requests go on, lost lines are counted", (
        "faults/test_this_process::test_a_log_that_nobody_reads_holds_no_request_up",
        "unit/test_outlet::test_a_reader_that_stopped_costs_lines_and_never_a_wait",
    )),
    Fault(72, "the gateway's own process stands still", "SIGSTOP for 5 s, with deadlines of 2 s",
        "no deadline fires for it, nobody is ejected", (
        "faults/test_this_process::test_a_process_that_was_stopped_for_seconds_ends_no_stream_and_ejects_nobody",
        "unit/test_policy::test_after_we_stood_still_nothing_is_believed_for_a_while",
    ), "failing system calls are not injected"),
)  # fmt: skip


def node(test: str) -> str:
    """Return the name that pytest has for a test of the catalogue."""
    file, _, function = test.partition("::")
    return f"tests/{file}.py::{function}"
