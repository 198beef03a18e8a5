"""The mutants: each a fault that real backends had, or that hardware would forgive for a while."""

from tests.mutations.mutant import Mutant

BUFFERS = "backends/cpu/native/numbered_buffers.cpp"
RING = "backends/cpu/native/pair_ring.cpp"
POOL = "backends/paged_pool.py"
POOL_TESTS = "tests/backends/test_memory_pool.py"
PAGED_TESTS = "tests/backends/test_paged_pool.py"
COLLECTIVES = "tests/backends/test_communicator.py"
SHARED = "tests/backends/test_shared_memory.py"
SUM_GROUPS = "tests/backends/test_shared_memory_groups.py"
FUSION = "tests/backends/test_fusion.py"
KERNELS = "tests/backends/test_kernels.py"
ATTENTION = "tests/backends/test_attention.py"
SIM = "tests/backends/test_sim.py"
CHIP_MEMORY = "tests/chip_worker/test_chip_memory.py"
PAIR = "tests/chip_worker/test_simulated_group.py::test_two_chips_draw_what_one_does"
UNDER_LOAD = f"{POOL_TESTS}::test_moving_and_compacting_under_load_changes_no_output"

MEMORY = (
    Mutant(
        "bind takes logical ids for physical ones",
        POOL,
        "return self._physical[logical]",
        "return logical",
        UNDER_LOAD,
    ),
    Mutant(
        "a move forgets the way back",
        POOL,
        "self._logical[places[1]], self._logical[places[0]] = first, second",
        "self._logical[places[0]], self._logical[places[1]] = first, second",
        UNDER_LOAD,
    ),
    Mutant(
        "a block is copied the wrong way round",
        POOL,
        "self._device.copy(arena[int(places[0])], arena[int(places[1])])",
        "self._device.copy(arena[int(places[1])], arena[int(places[0])])",
        f"{POOL_TESTS}::test_copy_and_zero_follow_the_mapping",
    ),
    Mutant(
        "two blocks change places without the third copy",
        POOL,
        "self._device.copy(self._spare, arena[origin])",
        "pass",
        f"{POOL_TESTS}::test_a_moved_block_is_the_same_block_for_those_above",
    ),
    Mutant(
        "blocks are not padded to the alignment",
        POOL,
        "return KVLayout(PAGED_ORDER, block_bytes * alignment_bytes, alignment_bytes)",
        "return KVLayout(PAGED_ORDER, 2 * _used_elements(spec), alignment_bytes)",
        f"{POOL_TESTS}::test_blocks_are_padded_as_the_layout_says",
    ),
    Mutant(
        "a block that moves into a given back segment does not take its memory",
        POOL,
        "self._restore(self._arena.segment_of(target))",
        "pass",
        f"{PAGED_TESTS}::test_a_block_moves_into_a_segment_that_was_given_back",
    ),
    Mutant(
        "blocks of the worker's own work are never idle again",
        "backends/block_references.py",
        "            if block in self._allocated:",
        "            if False:",
        f"{POOL_TESTS}::test_blocks_for_the_workers_own_use_are_idle_ones_and_come_back",
    ),
    Mutant(
        "the quota is not asked",
        "backends/block_references.py",
        "if self._referenced_count + len(fresh) > self.quota:",
        "if len(fresh) > self.quota:",
        f"{POOL_TESTS}::test_beyond_the_quota_nothing_is_given_and_nothing_changes",
    ),
    Mutant(
        "scratch of a step is not given out again",
        "backends/scratch.py",
        "            slab.used_bytes = 0",
        "            pass",
        "tests/backends/test_scratch.py::test_a_steady_step_takes_nothing_new_from_the_chip",
    ),
    Mutant(
        "a request's scratch is forgotten at its end",
        "backends/scratch.py",
        "self._idle[buffer.memory.numel()].append(buffer.memory)",
        "pass",
        "tests/backends/test_scratch.py::test_a_requests_memory_serves_the_next_request",
    ),
    Mutant(
        "the end of a step reclaims nothing",
        "chip_worker/step_memory.py",
        "self.device.scratch.reclaim(Lifetime.STEP)",
        "pass",
        f"{CHIP_MEMORY}::test_a_step_leaves_no_scratch_and_the_epoch_its_tables_and_programs_only",
    ),
    Mutant(
        "hidden workspaces are never released",
        "backends/sim/device.py",
        "self.simulated.release_workspaces(operation)",
        "pass",
        "tests/chip_worker/test_flat_memory.py::test_memory_stays_flat_over_many_lengths",
    ),
)

ORDER = (
    Mutant(
        "a copy to the host is read before it is done",
        "backends/device.py",
        "        self.synchronize()\n        return target",
        "        return target",
        "tests/backends/test_device.py::test_copies_to_the_chip_and_back",
        backend="sim",
    ),
    Mutant(
        "the copy engine is not fenced",
        "backends/sim/device.py",
        "                self.simulated.fence()",
        "                pass",
        f"{KERNELS}::test_linear",
        backend="sim:adversarial",
    ),
    Mutant(
        "a host tensor is read after its owner has changed it",
        "backends/sim/device.py",
        "staged = source.detach().to(target.dtype, copy=True)",
        "staged = source.detach()",
        "tests/backends/test_device.py::test_copies_to_the_chip_and_back",
        backend="sim",
    ),
    Mutant(
        "logits are put together before they have come",
        "chip_worker/models/vocabulary.py",
        "            work.wait_stream()",
        "            pass",
        PAIR,
    ),
    Mutant(
        "the sum of the ranks is not waited for",
        "chip_worker/models/summed_projection.py",
        "lambda part: communicator.all_reduce(part).wait_stream(),",
        "lambda part: communicator.all_reduce(part),",
        PAIR,
    ),
    Mutant(
        "the sums of chunks are not waited for",
        "chip_worker/models/summed_projection.py",
        "            work.wait_stream()",
        "            pass",
        PAIR,
    ),
)

KERNEL_RULES = (
    Mutant(
        "views are handed to kernels that misread them",
        "backends/sim/device.py",
        "return self.without_gaps(tensor) if self._profile.contiguous_only.value else tensor",
        "return tensor",
        f"{KERNELS}::test_norms_of_views",
        backend="sim:adversarial",
    ),
    Mutant(
        "kernels get wide indices",
        "backends/sim/device.py",
        "if tensor.dtype == torch.int32 or not self._profile.int32_indices_only.value:",
        "if True:",
        f"{KERNELS}::test_rotary",
        backend="sim:adversarial",
    ),
    Mutant(
        "more rows than the decode kernel takes",
        "backends/sim/attention.py",
        "for piece in pieces(count, device.driver.decode_rows_max if decodes else None):",
        "for piece in pieces(count, None):",
        f"{ATTENTION}::test_attention_over_written_keys",
        backend="sim:adversarial",
    ),
    Mutant(
        "more rows than the fused kernel gets right",
        "backends/sim/kernels.py",
        "for piece in pieces(rows, device.driver.exact_rows_max):",
        "for piece in pieces(rows, None):",
        f"{KERNELS}::test_silu_mul",
        backend="sim:adversarial",
    ),
    Mutant(
        "attention scales twice",
        "backends/sim/attention.py",
        "alpha = rule.scale * math.sqrt(query.shape[-1])",
        "alpha = rule.scale",
        f"{ATTENTION}::test_attention_over_written_keys",
        backend="sim",
    ),
    Mutant(
        "query heads are taken for uniform ones",
        "backends/sim/attention.py",
        "if heads.is_identity:",
        "if True:",
        f"{ATTENTION}::test_attention_with_any_map_of_heads",
        backend="sim",
    ),
    Mutant(
        "an implementation is bound beyond its rows",
        "backends/kernel_table.py",
        "if support.rows_max is not None and requirement.rows > support.rows_max:",
        "if support.rows_max is not None and requirement.rows > 2 * support.rows_max:",
        "tests/backends/test_kernel_table.py",
    ),
    Mutant(
        "an implementation is bound without a feature",
        "backends/kernel_table.py",
        "missing = [each for each in requirement.features if each not in support.features]",
        "missing = []",
        "tests/backends/test_kernel_table.py",
    ),
    Mutant(
        "a formula is computed when it is asked for",
        "backends/sim/fallback.py",
        'run = partial(self._fill, output, "soft_cap", logits, cap)',
        'run = partial(output.copy_, self._reference("soft_cap", logits, cap))',
        f"{KERNELS}::test_soft_cap",
        backend="sim",
    ),
    Mutant(
        "a wrong write is right",
        "backends/sim/driver.py",
        "wrong=lambda: write(spoiled(k), spoiled(v)),",
        "wrong=lambda: write(k, v),",
        f"{SIM}::test_a_wrong_write_spoils_what_it_writes_and_nothing_else",
        backend="sim",
    ),
)

WINDOWS = (
    Mutant(
        "a window is one token short",
        "backends/cpu/attention_plan.py",
        "hidden |= gathered <= own - window",
        "hidden |= gathered <= own - window + 1",
        f"{ATTENTION}::test_attention_within_a_window",
        options=("kernels=torch",),
    ),
    Mutant(
        "a token behind the window is read",
        "backends/cpu/attention_plan.py",
        "seen_from = np.maximum(contexts - window + 1, 0) if window else np.zeros_like(contexts)",
        "seen_from = np.maximum(contexts - window, 0) if window else np.zeros_like(contexts)",
        f"{ATTENTION}::test_attention_within_a_window",
        options=("kernels=torch",),
    ),
    Mutant(
        "a table without its front is taken for a whole one",
        "backends/cpu/attention_plan.py",
        "table_starts = np.array(cache.table_starts, dtype=np.int64)",
        "table_starts = np.zeros_like(contexts)",
        f"{ATTENTION}::test_attention_within_a_window",
        options=("kernels=torch",),
    ),
    Mutant(
        "keys are written as if the table were whole",
        POOL,
        "first_places = context_starts - table_starts - query_starts[:-1]",
        "first_places = context_starts - query_starts[:-1]",
        f"{ATTENTION}::test_attention_within_a_window",
    ),
    Mutant(
        "what lies in front of a window is multiplied by zero and not left out",
        "backends/cpu/attention_plan.py",
        "unseen |= places < spans.seen_from[:, None]",
        "pass",
        f"{ATTENTION}::test_attention_within_a_window",
        options=("kernels=torch",),
    ),
    Mutant(
        "scores are bounded before they are scaled",
        "backends/cpu/attention.py",
        "mul_(scale / soft_cap)",
        "mul_(1.0 / soft_cap)",
        f"{ATTENTION}::test_attention_with_bounded_scores",
        options=("kernels=torch",),
    ),
    Mutant(
        "an embedding's scale is rounded before its rows are",
        "backends/cpu/kernels.py",
        "found.float().mul_(scale).to(found.dtype)",
        "found.mul(torch.tensor(scale, dtype=found.dtype))",
        f"{KERNELS}::test_embedding_gives_zeros_for_rows_of_other_chips",
        options=("kernels=torch",),
    ),
    Mutant(
        "gelu is the exact one",
        "backends/cpu/kernels.py",
        'functional.gelu(gate, approximate="tanh")',
        "functional.gelu(gate)",
        f"{KERNELS}::test_gelu_mul",
        options=("kernels=torch",),
    ),
    Mutant(
        "the prefill kernel's window does not count the token itself",
        "backends/sim/attention.py",
        "swa_left=rule.window - 1,",
        "swa_left=rule.window if rule.window else -1,",
        f"{ATTENTION}::test_attention_within_a_window",
        backend="sim:p800_shim",
    ),
    Mutant(
        "the chip counts positions from the front that was given back",
        "backends/sim/attention.py",
        "contexts = tuple(map(operator.sub, cache.context_starts, cache.table_starts))",
        "contexts = cache.context_starts",
        f"{ATTENTION}::test_attention_within_a_window",
        backend="sim",
    ),
)

NATIVE = (
    Mutant(
        "ranks sum in an order of their own",
        BUFFERS,
        "inputs[rank] = segment_.buffer(rank, piece.number) + offset;",
        "inputs[(rank + rank_) % segment_.world_size()] = "
        "segment_.buffer(rank, piece.number) + offset;",
        f"{COLLECTIVES}::test_all_reduce_sums_alike_to_the_bit",
    ),
    Mutant(
        "a buffer is used again one operation early",
        BUFFERS,
        "return {Step::kComplete, number - kDepth, -1};",
        "return {Step::kComplete, number > kDepth ? number - kDepth - 1 : 0, -1};",
        f"{SHARED}::test_random_operations_are_exact_on_every_rank",
    ),
    Mutant(
        "a rank reads what the others have not brought yet",
        BUFFERS,
        "return {Step::kPublish, piece.number, root};",
        "return {Step::kPublish, piece.number, rank_};",
        f"{COLLECTIVES}::test_all_reduce_sums_alike_to_the_bit",
    ),
    Mutant(
        "slices are read before they are summed",
        BUFFERS,
        "if (in_two_steps(piece)) return {Step::kReduce, piece.number, -1};",
        "if (in_two_steps(piece)) return {Step::kPublish, piece.number, -1};",
        f"{SHARED}::test_random_operations_are_exact_on_every_rank",
    ),
    Mutant(
        "what the ranks called is not compared",
        BUFFERS,
        "if (std::memcmp(&mine, &theirs, sizeof(Signature)) == 0) return;",
        "return;",
        f"{SHARED}::test_ranks_that_call_different_operations_all_hear_of_it",
    ),
    Mutant(
        "sums that travel as one are all taken from the first",
        BUFFERS,
        "    offset += packed_bytes(part);",
        "",
        f"{SUM_GROUPS}::test_random_groups_give_what_their_sums_give_apart",
    ),
    Mutant(
        "a message is divided as each rank likes",
        BUFFERS,
        "operation.parts.empty() ? 0 : hash_of(operation.parts)",
        "0",
        f"{SUM_GROUPS}::test_ranks_that_divide_one_message_otherwise_are_told_so",
    ),
    Mutant(
        "a collective overtakes the sums recorded before it",
        "backends/cpu/shared_memory_communicator.py",
        "if self._sums.depth and kind not in _MESSAGES:",
        "if False:",
        f"{SUM_GROUPS}::test_other_collectives_and_waits_inside_come_after_the_sums_before_them",
    ),
    Mutant(
        "a message between two ranks divides the sums of these two",
        "backends/cpu/shared_memory_communicator.py",
        "if self._sums.depth and kind not in _MESSAGES:",
        "if self._sums.depth:",
        f"{SUM_GROUPS}::test_messages_between_two_ranks_divide_no_sums",
    ),
    Mutant(
        "a ring is written over what was not read",
        RING,
        "const std::uint64_t part = std::min({bytes, size_ - held, size_ - place});",
        "const std::uint64_t part = std::min({bytes, size_, size_ - place});",
        f"{SHARED}::test_small_messages_need_no_receiver_and_large_ones_block_in_the_wait_only",
    ),
    Mutant(
        "bfloat16 sums are cut off and not rounded",
        "backends/cpu/native/sums.cpp",
        "(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;",
        "bits >> 16;",
        f"{SHARED}::test_every_dtype_is_summed_in_the_order_of_the_ranks",
    ),
    Mutant(
        "a rank that stands still is not missed",
        "backends/cpu/native/liveness.cpp",
        "if (beats_without >= still_beats_) return Life::kStandsStill;",
        "",
        f"{SHARED}::test_a_stopped_rank_is_lost_when_it_has_not_beaten_for_two_seconds",
    ),
)

FUSED = (
    Mutant(
        "large messages are submitted by size and not in order",
        "backends/fusion_plan.py",
        "            runs.append(run)",
        "            runs.insert(0, run)",
        f"{FUSION}::test_only_neighbours_of_one_kind_are_fused_in_the_order_of_the_program",
    ),
    Mutant(
        "messages of two dtypes travel as one",
        "backends/fusion_plan.py",
        "fits = run is not None and run.dtype == shape.dtype",
        "fits = run is not None",
        f"{FUSION}::test_a_random_program_has_the_results_of_its_calls_apart",
    ),
    Mutant(
        "a message goes into a buffer that is full",
        "backends/fusion_plan.py",
        "        run.room_bytes -= shape.packed_bytes",
        "        pass",
        f"{FUSION}::test_messages_beyond_the_buffer_begin_another",
    ),
    Mutant(
        "a wait inside a group does not submit",
        "backends/fused_run.py",
        "            self._flush()",
        "            pass",
        f"{FUSION}::test_waiting_inside_a_group_submits_what_is_recorded",
    ),
    Mutant(
        "a tensor used again in a group is taken for another",
        "backends/fusion.py",
        "            if _overlap(used, addresses):",
        "            if False:",
        f"{FUSION}::test_a_tensor_used_again_in_a_group_sees_the_first_result",
    ),
    Mutant(
        "fused results stay in the buffer",
        "backends/fused_run.py",
        "            self._buffers.device.copy_each(layout.targets, outputs)",
        "            pass",
        f"{FUSION}::test_a_random_program_has_the_results_of_its_calls_apart",
    ),
)

MUTANTS = (*MEMORY, *ORDER, *KERNEL_RULES, *WINDOWS, *NATIVE, *FUSED)
