"""Deliberate breakages of what the project promises, and the tests that must find each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Breakage:
    """In `file`, below the root of the tree, `old` becomes `new`; one of `tests` (pytest node ids) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Breaks the tree at `root` and returns the file's text as it was. ValueError where `old` is not there exactly
        once: the code has moved on, and this breakage must follow it."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has its text {text.count(self.old)} times, not once")
        path.write_text(text.replace(self.old, self.new))
        return text


BREAKAGES = (
    # exactness
    Breakage(
        "a token's experts are summed in falling order",
        "src/tiermoe/engine/expert_sums.py",
        "self.place = index.argsort(dim=1).argsort(dim=1)",
        "self.place = index.argsort(dim=1, descending=True).argsort(dim=1)",
        ("tests/test_parity.py::test_experts_per_token",),
    ),
    Breakage(
        "an expert's bias is dropped",
        "src/tiermoe/kernels/expert.py",
        'return multiply(x, views) + views[bias]["weight"]',
        "return multiply(x, views)",
        ("tests/test_parity.py::test_packed_precisions_equal_the_decoded_weights",),
    ),
    Breakage(
        "gate and up change places",
        "src/tiermoe/kernels/gates.py",
        "gate, up = gate_up.chunk(2, dim=-1)\n    return torch",
        "up, gate = gate_up.chunk(2, dim=-1)\n    return torch",
        ("tests/test_parity.py::test_experts_with_no_one_and_many_tokens",),
    ),
    Breakage(
        "4 bits are decoded with the next group's scale",
        "src/tiermoe/quant/int4.py",
        "torch.addcmul(zero[groups], values, scale[groups], out=part)",
        "torch.addcmul(zero[groups], values, scale.roll(1, 0)[groups], out=part)",
        ("tests/test_quant.py",),
    ),
    Breakage(
        "6 bits are decoded with another block's scales",
        "src/tiermoe/quant/int6.py",
        "weight.mul_(blocks.movedim(1, 0)",
        "weight.mul_(blocks.roll(1, 0).movedim(1, 0)",
        ("tests/test_int6.py",),
    ),
    Breakage(
        "uneven 4 bits are decoded with another block's scales",
        "src/tiermoe/quant/nl4.py",
        "scales.view(torch.bfloat16).permute(1, 0, 2)",
        "scales.view(torch.bfloat16).roll(1, 0).permute(1, 0, 2)",
        ("tests/test_nl4.py",),
    ),
    Breakage(
        "6 bits take the high bits of the other half's row",
        "src/tiermoe/quant/int6_layout.py",
        "((0, 0, 2), (0, 1, 0), (1, 0, 6), (1, 1, 4))",
        "((0, 0, 0), (0, 1, 2), (1, 0, 6), (1, 1, 4))",
        ("tests/test_int6.py",),
    ),
    Breakage(
        "8 bits are decoded without their scale",
        "src/tiermoe/quant/int8.py",
        'return slot["weight"].to(dtype).mul_(slot["scale"][:, None].to(dtype))',
        'return slot["weight"].to(dtype)',
        ("tests/test_quant.py",),
    ),
    Breakage(
        "a cropped sequence keeps its end",
        "src/tiermoe/model/kv_cache.py",
        "        self._lengths[slab] = length\n\n    def fork",
        "\n    def fork",
        ("tests/test_kv_cache.py",),
    ),
    Breakage(
        "a step overwrites the recurrent state that it began with",
        "src/tiermoe/model/recurrent_states.py",
        "after = self._written[slab] = 1 - before",
        "after = self._written[slab] = before",
        ("tests/test_delta.py",),
    ),
    Breakage(
        "a fork leaves the recurrent state behind",
        "src/tiermoe/model/kv_cache.py",
        "self.recurrent.copy(slab, other)",
        "pass",
        ("tests/test_delta.py",),
    ),
    Breakage(
        "a fork leaves an indexer's keys behind",
        "src/tiermoe/model/kv_cache.py",
        '"value_scales": self.value_scales, "index_keys": self.index_keys,',
        '"value_scales": self.value_scales,',
        ("tests/test_sparse_attention.py",),
    ),
    Breakage(
        "an indexer chooses positions behind a token's own",
        "src/tiermoe/model/indexer.py",
        "torch.matmul(queries[token], keys[:positions].T)",
        "torch.matmul(queries[token], keys.T)",
        ("tests/test_sparse_attention.py",),
    ),
    Breakage(
        "a recurrent state is taken for one of any length",
        "src/tiermoe/model/kv_cache.py",
        "not length or length in self.recurrent.ends(slab)",
        "True",
        ("tests/test_delta.py",),
    ),
    Breakage(
        "the first tokens of a chunk of linear attention decay like its last",
        "src/tiermoe/model/delta_rule.py",
        "since = gone.exp()",
        "since = gone[:, -1:].exp()",
        ("tests/test_delta.py",),
    ),
    Breakage(
        "a short convolution keeps the inputs before its last ones",
        "src/tiermoe/model/short_convolution.py",
        "inputs[new] = whole[end - self._kept : end]",
        "inputs[new] = whole[end - self._kept - 1 : end - 1]",
        ("tests/test_short_convolution.py",),
    ),
    Breakage(
        "routers of Gemma 4 take what its experts take",
        "src/tiermoe/model/feed_forward.py",
        "experts.route(self.moe.router, residual)",
        "experts.route(self.moe.router, self.norm_before_experts(residual))",
        ("tests/test_parity.py",),
    ),
    Breakage(
        "what a head attends to passes its gate whole",
        "src/tiermoe/model/attention.py",
        "attended if gates is None else attended * torch.sigmoid(gates)",
        "attended",
        ("tests/test_parity.py",),
    ),
    Breakage(
        "codes of keys and values are read without their scales",
        "src/tiermoe/model/kv_codes.py",
        "(codes.float() * scales.float()).to(dtype)",
        "codes.float().to(dtype)",
        ("tests/test_kv_bits.py",),
    ),
    Breakage(
        "each chunk of a prompt begins at position 0",
        "src/tiermoe/generation/sequence.py",
        "ids[begin : begin + chunk], begin)",
        "ids[begin : begin + chunk], 0)",
        ("tests/test_long_prompts.py",),
    ),
    Breakage(
        "a sequence's padding counts as its first tokens",
        "src/tiermoe/model/face.py",
        "max(past - padding, 0), tuple(tokens[skipped:])",
        "max(past - padding, 0), tuple(tokens)",
        ("tests/test_parity.py",),
    ),
    Breakage(
        "rotary positions have sine and cosine changed",
        "src/tiermoe/model/rotary.py",
        "result = part * cos + swapped * sin",
        "result = part * sin + swapped * cos",
        ("tests/test_parity.py",),
    ),
    # kernels for GPUs
    Breakage(
        "experts of one launch all read the first one's slot",
        "src/tiermoe/kernels/gpu/triton_grouped.py",
        "slot = tl.load(slots + expert)",
        "slot = tl.load(slots)",
        ("tests/test_triton.py",),
    ),
    Breakage(
        "blocks of tokens all take the first block's",
        "src/tiermoe/kernels/gpu/triton_linear.py",
        "tokens = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)",
        "tokens = tl.arange(0, BM).to(tl.int64)",
        ("tests/test_triton.py",),
    ),
    # slots, pins, protection
    Breakage(
        "a slot that is pinned is given away",
        "src/tiermoe/decide/cache.py",
        "return key in self._resident and key not in self._pins",
        "return key in self._resident",
        ("tests/test_pools.py", "tests/test_controller.py"),
    ),
    Breakage(
        "slots are numbered from one",
        "src/tiermoe/decide/cache.py",
        "list(range(first + slots - 1, first - 1, -1))",
        "list(range(first + slots, first, -1))",
        ("tests/test_pools.py",),
    ),
    Breakage(
        "a slot that moves to another layer stays in its own",
        "src/tiermoe/decide/cache.py",
        """        self.slots -= 1
        return self._free.pop()""",
        """        self.slots -= 1
        return self._free[-1]""",
        ("tests/test_shares.py",),
    ),
    Breakage(
        "the least used experts of all layers decide their shares",
        "src/tiermoe/decide/shares.py",
        "ranked = sorted((count for row in others for count in row), reverse=True)",
        "ranked = sorted((count for row in others for count in row))",
        ("tests/test_shares.py",),
    ),
    Breakage(
        "a prediction evicts what another prediction protects",
        "src/tiermoe/decide/cache.py",
        "victim = self._victim(key, protected)\n            if victim is None:\n                return None\n",
        "victim = self._victim(key, ())\n            if victim is None:\n                return None\n",
        ("tests/test_pools.py",),
    ),
    Breakage(
        "a copy in fewer bits satisfies a demand for more",
        "src/tiermoe/decide/pools.py",
        "{bits: [each for each in self._precisions if each >= bits] for bits in precisions}",
        "{bits: list(self._precisions) for bits in precisions}",
        ("tests/test_pools.py",),
    ),
    Breakage(
        "an interrupted layer keeps its pins",
        "src/tiermoe/decide/controller.py",
        "        finally:\n            run.release()",
        "        finally:\n            pass",
        ("tests/test_controller.py",),
    ),
    Breakage(
        "a prefetch that is taken back has made somebody leave",
        "src/tiermoe/decide/loads.py",
        "            self.cache.give_back(load.key)\n",
        "            self.cache.take(load.key)\n            self.cache.abandon(load.key)\n",
        ("tests/test_controller.py",),
    ),
    Breakage(
        "an expert that is still on its way counts as a hit",
        "src/tiermoe/decide/layer_run.py",
        "elif self._cache.slot(key) is None:",
        "elif self._cache.slot(key) is None and not self._cache.in_flight(key):",
        ("tests/test_controller.py", "tests/test_simulate.py"),
    ),
    Breakage(
        "the most recently used expert leaves first",
        "src/tiermoe/decide/eviction/lru.py",
        "next((key for key in self._order if evictable(key)), None)",
        "next((key for key in reversed(self._order) if evictable(key)), None)",
        ("tests/test_eviction.py", "tests/test_simulate.py"),
    ),
    # faults
    Breakage(
        "a read's checksum is not compared",
        "src/tiermoe/tiers/reader.py",
        "if digest.hexdigest() != extent.checksum:",
        "if not extent.checksum:",
        ("tests/test_disk.py",),
    ),
    Breakage(
        "the bytes of an expert on its first page are another's",
        "src/tiermoe/tiers/reader.py",
        "view[:head] = edges[before:PAGE]",
        "view[:head] = edges[:head]",
        ("tests/test_disk.py",),
    ),
    Breakage(
        "a load that failed is reported as arrived",
        "src/tiermoe/tiers/disk.py",
        "            error = failure\n",
        "            del failure\n",
        ("tests/test_disk.py",),
    ),
    Breakage(
        "a failed load's expert is taken for resident",
        "src/tiermoe/decide/loads.py",
        "        if finished.error is not None:\n            self._abandon(load.key)\n",
        "        if finished.error is not None:\n            self.cache.arrived(load.key)\n",
        ("tests/test_controller.py",),
    ),
    Breakage(
        "speculative reads go before urgent ones",
        "src/tiermoe/tiers/lanes.py",
        "return self._urgent.popleft() if self._urgent else self._speculative.popleft()",
        "return self._speculative.popleft() if self._speculative else self._urgent.popleft()",
        ("tests/test_disk.py",),
    ),
    # the store
    Breakage(
        "experts are written a page further than the table says",
        "src/tiermoe/store/pack.py",
        "segment = Segment(str(path), offset, len(content), 0)",
        "segment = Segment(str(path), offset + 4096, len(content), 0)",
        ("tests/test_store.py",),
    ),
    Breakage(
        "a torn store is taken for whole",
        "src/tiermoe/store/store.py",
        "        if size < nbytes:\n",
        "        if size < 0:\n",
        ("tests/test_store.py",),
    ),
    Breakage(
        "the journal of another checkpoint is believed",
        "src/tiermoe/store/journal.py",
        "if {name: document[name] for name in self._stamp} != self._stamp:",
        "if not document:",
        ("tests/test_pack.py",),
    ),
    Breakage(
        "what an interrupted packing wrote stays under the final name",
        "src/tiermoe/store/files.py",
        "temporary = path.with_suffix(PARTIAL)",
        "temporary = path",
        ("tests/test_pack.py",),
    ),
    # the plan and the traces
    Breakage(
        "the plan leaves the key/value cache out of the budget",
        "src/tiermoe/memory/plan.py",
        "room = min(base.budget - base.fixed, wanted)",
        "room = min(base.budget - base.fixed + base.kv_cache, wanted)",
        ("tests/test_plan.py",),
    ),
    Breakage(
        "a trace is off by one layer",
        "src/tiermoe/measure/recorder.py",
        "traced = self._layers[routed.layer]\n",
        "traced = self._layers[routed.layer - 1]\n",
        ("tests/test_record.py",),
    ),
    Breakage(
        "a trace that was cut short is read",
        "src/tiermoe/trace/file.py",
        'if footer.get("passes") != len(lines) - 2:',
        'if footer.get("passes") is None and len(lines) < 2:',
        ("tests/test_trace.py",),
    ),
    # routing that looks at the cache, and what other sizes of it would hit
    Breakage(
        "a token's first experts stand back for others too",
        "src/tiermoe/decide/routing.py",
        "range(len(taken) - 1, self.always - 1, -1)",
        "range(len(taken) - 1, -1, -1)",
        ("tests/test_cached_routing.py::test_by_hand",),
    ),
    Breakage(
        "an expert that stands in has the weight of the one it displaces",
        "src/tiermoe/engine/cached_routing.py",
        "router.weights_of(shares[rows], index[rows])",
        "weights[rows]",
        ("tests/test_cached_routing.py::test_a_choice_that_is_moved_is_weighed_by_the_routers_own_scores",),
    ),
    Breakage(
        "experts that are not here stand in for others",
        "src/tiermoe/decide/routing.py",
        "expert not in own and here(expert)",
        "expert not in own",
        ("tests/test_cached_routing.py::test_by_hand",),
    ),
    Breakage(
        "a token's own experts count among those used since",
        "src/tiermoe/decide/reuse.py",
        "for demand in demands:  # before any of them moves: a token's experts are asked for at once\n"
        "                self._count(recent, demand.expert)",
        "for demand in demands:\n"
        "                self._count(recent, demand.expert)\n"
        "                recent.insert(0, demand.expert)",
        ("tests/test_reuse.py",),
    ),
    # GGUF files
    Breakage(
        "the halves of a head of a GGUF file's queries stay in turns",
        "src/tiermoe/model/gguf/orders.py",
        "torch.arange(rows).view(heads, -1, 2).swapaxes(1, 2).flatten()",
        "torch.arange(rows).view(heads, -1, 2).flatten()",
        ("tests/test_gguf_files.py",),
    ),
    Breakage(
        "heads of values in a GGUF file of Qwen3.5 stay in its order",
        "src/tiermoe/model/gguf/orders.py",
        "view(shared, key_heads, rows).swapaxes(0, 1).flatten()",
        "view(shared, key_heads, rows).flatten()",
        ("tests/test_gguf_models.py",),
    ),
    Breakage(
        "a matrix takes its inputs where its columns lie, not the other way round",
        "src/tiermoe/model/linear.py",
        "columns.argsort()",
        "columns",
        ("tests/test_gguf_models.py", "tests/test_gguf_linear.py"),
    ),
    Breakage(
        "norms of a GGUF file of Qwen3.5 stay one too large",
        "src/tiermoe/model/gguf/parameters.py",
        "return stored - 1",
        "return stored",
        ("tests/test_gguf_models.py",),
    ),
    Breakage(
        "an expert in a GGUF file is the one before",
        "src/tiermoe/store/gguf/checkpoint.py",
        "tensor.offset + expert * nbytes",
        "tensor.offset + max(expert - 1, 0) * nbytes",
        ("tests/test_gguf_models.py",),
    ),
    Breakage(
        "biases of a GGUF file stay in float32 in the slot",
        "src/tiermoe/tiers/disk.py",
        "            form.settle(slot)\n",
        "",
        ("tests/test_gguf_runs.py::test_biases_in_float32_are_rounded_in_the_slot",),
    ),
    # checkpoints that come quantised
    Breakage(
        "an expert that is used as published is the one before",
        "src/tiermoe/store/checkpoint.py",
        "row = None if EACH in source else expert",
        "row = None if EACH in source else max(expert - 1, 0)",
        ("tests/test_published.py::test_logits_and_tokens",),
    ),
    Breakage(
        "rows share the scales of the first ones",
        "src/tiermoe/kernels/native/matrix.py",
        "(_KINDS[encoding.scale], rows,",
        "(_KINDS[encoding.scale], 1 << 20,",
        ("tests/test_native_published.py",),
    ),
    Breakage(
        "codes without scales are passed over",
        "src/tiermoe/store/schemes.py",
        "        if found is None:\n            raise ModelError(f\"{self.directory} holds {codes} without its scales",
        "        if found is None:\n            return codes\n            raise ModelError(f\"{self.directory} {codes}",
        ("tests/test_published.py::test_scales_that_are_missing",),
    ),
    Breakage(
        "what comes quantised is quantised again",
        "src/tiermoe/engine/load.py",
        "if settings.bits is None and blueprint.comes_quantized:",
        "if settings.bits is None and blueprint.in_gguf:",
        ("tests/test_published.py::test_the_disk_holds_no_second_copy",),
    ),
    Breakage(
        "a GGUF file that was cut short is read",
        "src/tiermoe/store/gguf/header.py",
        "if end > self._size:",
        "if end > 2 * self._size:",
        ("tests/test_gguf_files.py",),
    ),
    # the systems' parts
    Breakage(
        "HOBBIT loads nothing low",
        "src/tiermoe/decide/precision.py",
        "return self.low_bits if score <= self._t2 else 0",
        "return self.context.bits if score <= self._t2 else 0",
        ("tests/test_parts.py",),
    ),
    Breakage(
        "HOBBIT skips nothing",
        "src/tiermoe/decide/precision.py",
        "return self.low_bits if score <= self._t2 else 0",
        "return self.low_bits",
        ("tests/test_parts.py",),
    ),
    Breakage(
        "the walk ends at the first layer",
        "src/tiermoe/decide/prediction/gates.py",
        "            if not all_here:\n                return\n",
        "            return\n",
        ("tests/test_parts.py",),
    ),
    Breakage(
        "nothing predicted is masked",
        "src/tiermoe/decide/scheduler.py",
        "self.controller.prefetch(keys(), self.mask)",
        "self.controller.prefetch(keys(), False)",
        ("tests/test_parts.py",),
    ),
    Breakage(
        "computing begins before all loads are there",
        "src/tiermoe/decide/layer_run.py",
        "while together and self._awaited:",
        "while False and self._awaited:",
        ("tests/test_parts.py",),
    ),
    Breakage(
        "records outlive their sequence",
        "src/tiermoe/decide/eviction/ranking.py",
        "        if self._per_sequence:\n            self.forget()",
        "        if False:\n            self.forget()",
        ("tests/test_eviction.py",),
    ),
    Breakage(
        "distance does not count",
        "src/tiermoe/decide/eviction/weighted.py",
        " + self._w_fld * nearness",
        "",
        ("tests/test_parts.py",),
    ),
    Breakage(
        "recency does not count",
        "src/tiermoe/decide/eviction/weighted.py",
        "return recency + frequency +",
        "return frequency +",
        ("tests/test_parts.py",),
    ),
    Breakage(
        "uses do not count",
        "src/tiermoe/decide/eviction/weighted.py",
        "return recency + frequency +",
        "return recency +",
        ("tests/test_eviction.py",),
    ),
    Breakage(
        "high uses do not count",
        "src/tiermoe/decide/eviction/weighted.py",
        " + self._w_lhu * self._high_uses[key]",
        "",
        ("tests/test_eviction.py",),
    ),
    Breakage(
        "no token falls back",
        "src/tiermoe/decide/routing.py",
        "return probability > gamma",
        "return True",
        ("tests/test_parts.py",),
    ),
    Breakage(
        "the discarded pass is forgotten",
        "src/tiermoe/decide/prediction/recalled.py",
        "forecasts.recalled(target)[:count]",
        "forecasts.recalled(target)[:0]",
        ("tests/test_parts.py",),
    ),
    Breakage(
        "a path names nobody",
        "src/tiermoe/decide/prediction/path.py",
        "            for expert, count in following:\n",
        "            for expert, count in following[:0]:\n",
        ("tests/test_parts.py",),
    ),
    Breakage(
        "unpopular experts stay high",
        "src/tiermoe/decide/precision.py",
        "low = set(ascending[: self._low_count()])",
        "low: set[int] = set()",
        ("tests/test_parts.py",),
    ),
    Breakage(
        "what was not predicted comes high",
        "src/tiermoe/decide/precision.py",
        'self._decode_bits = self.low_bits if self.mispredicted == "low" else self._bits',
        "self._decode_bits = self._bits",
        ("tests/test_parts.py",),
    ),
    Breakage(
        "the percentile names the K",
        "src/tiermoe/decide/prediction/percentile.py",
        "self.most(count_above(self.percentile, self.context.experts[target]))",
        "self.most(self.context.top_k[target])",
        ("tests/test_parts.py",),
    ),
    Breakage(
        "shallow layers come last",
        "src/tiermoe/decide/allotment.py",
        "    for layer in range(boundary):\n        extra = min(max(experts[layer]",
        "    for layer in range(0):\n        extra = min(max(experts[layer]",
        ("tests/test_parts.py",),
    ),
    Breakage(
        "a loaded expert comes with all its neurons",
        "src/tiermoe/decide/neurons.py",
        "return whole(neurons) if missing.bit_count() > limit * neurons else missing",
        "return whole(neurons)",
        ("tests/test_parts.py",),
    ),
    Breakage(
        "CORM waits for experts that were not predicted",
        "src/tiermoe/decide/scheduler.py",
        'if self.proceed and routed.phase == "decode":',
        'if self.proceed and routed.phase == "prefill":',
        ("tests/test_scheduler.py",),
    ),
    Breakage(
        "a prefetched hit is not counted",
        "src/tiermoe/decide/loads.py",
        "        prefetched = key in self._unused_prefetches\n",
        "        prefetched = False\n",
        ("tests/test_parts.py",),
    ),
    Breakage(
        "bitwidths are accepted without their error",
        "src/tiermoe/systems/edgemoe.py",
        "return self.value + self.error <= tolerated",
        "return self.value <= tolerated",
        ("tests/test_bitwidth_search.py",),
    ),
    Breakage(
        "bitwidths are judged on the text of their search",
        "src/tiermoe/measure/tasks.py",
        "Perplexity(self.ids[::2]), Perplexity(self.ids[1::2])",
        "Perplexity(self.ids[::2]), Perplexity(self.ids[::2])",
        ("tests/test_bitwidths.py",),
    ),
    Breakage(
        "gamma is taken where the loss is beyond",
        "src/tiermoe/measure/gammas.py",
        "        if judged(found) or gamma == order[-1]:",
        "        if True:",
        ("tests/test_gammas.py",),
    ),
    Breakage(
        "a replay takes named neurons for those that are active",
        "src/tiermoe/simulate/neuron_loads.py",
        "if named is None else named",
        "if named is None else wanted",
        ("tests/test_record_neurons.py",),
    ),
    # conversations on disk
    Breakage(
        "a conversation on disk is used whatever its checksum",
        "src/tiermoe/serve/prefix_files.py",
        "if file.read(1) or checksum.digest() != head[len(_MAGIC) :]:",
        "if file.read(1):",
        ("tests/test_prefix_disk.py",),
    ),
    Breakage(
        "a conversation on disk is written from a slab that has been taken",
        "src/tiermoe/serve/prefix_disk.py",
        "return end <= job.limit",
        "return True",
        ("tests/test_prefix_disk.py",),
    ),
    Breakage(
        "a conversation on disk is found whatever computed it",
        "src/tiermoe/serve/prefix_files.py",
        "blake2b(_MAGIC + facts, digest_size=20)",
        "blake2b(_MAGIC, digest_size=20)",
        ("tests/test_prefix_disk.py",),
    ),
    Breakage(
        "the conversation on disk that was used last goes first",
        "src/tiermoe/serve/prefix_files.py",
        "deque(sorted(found))",
        "deque(sorted(found, reverse=True))",
        ("tests/test_prefix_disk.py",),
    ),
    Breakage(
        "a conversation on disk goes on from a window that has moved on",
        "src/tiermoe/serve/prefix_disk.py",
        "return job.goes_on and self._cache.can_crop(job.slab, end, ahead=1)",
        "return job.goes_on",
        ("tests/test_prefix_disk.py",),
    ),
    Breakage(
        "a conversation on disk is read into the wrong positions",
        "src/tiermoe/serve/prefix_disk.py",
        "first = stored.at * BLOCK",
        "first = (stored.at + 1) * BLOCK",
        ("tests/test_prefix_disk.py",),
    ),
    Breakage(
        "a request whose client left is not counted",
        "src/tiermoe/serve/batcher.py",
        "self.counts.aborted += self._drop(number)",
        "self._drop(number)",
        ("tests/test_batcher.py",),
    ),
    Breakage(
        "a request begins without the memory for its tokens",
        "src/tiermoe/serve/prefixes.py",
        "        if not self._fits(needed, self._running):\n            return None\n        known",
        "        known",
        ("tests/test_prefixes.py",),
    ),
    Breakage(
        "a sequence that is closed keeps its memory",
        "src/tiermoe/model/kv_cache.py",
        "            kv_pages.release(tensor, slab)\n",
        "            pass\n",
        ("tests/test_kv_pages.py",),
    ),
    Breakage(
        "prompts that are computed apart share their products",
        "src/tiermoe/model/decoder.py",
        "batch.parts(FEW_TOKENS if batch.apart and self.verifies else 0)",
        "batch.parts(10**9)",
        ("tests/test_steps.py",),
    ),
)  # fmt: skip
