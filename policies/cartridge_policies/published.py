"""The formulas that other routers publish, for comparison on equal terms.

Owns one class for each, written from its documentation and source: names, weights and thresholds
are theirs. Refuses to improve them. A prompt is the tokens of its Cartridges and its live ones;
what a router learns from engine events it reads from the map, what it guesses from the history.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from cartridge_policies.cost import CostTable
from cartridge_policies.loads import Floats, Rows
from cartridge_policies.ranking import Key, decide_by
from cartridge_policies.types import ClusterView, Decision, Demand, Refusal
from cartridge_proto.residency import TIERS_FASTEST_FIRST, Tier

BLOCK_TOKENS: Final = 16


def _matched(demand: Demand, view: ClusterView, rows: Rows) -> Floats:
    """Tokens of the prefix that an approximate index believes to be on each replica."""
    names = (view.loads.name(row) for row in rows.tolist())
    return view.history.matched_tokens(demand, names, view.now_s)


def _weighed(demand: Demand, table: CostTable, credits_of: Mapping[Tier, float]) -> Floats:
    """Tokens of the consecutive prefix that each replica holds, by the credit of their tier."""
    credit = np.array([credits_of.get(tier, 0.0) for tier in TIERS_FASTEST_FIRST])[table.tiers]
    sizes = np.array([[artifact.num_tokens] for artifact in demand.artifacts], float)
    held = np.logical_and.accumulate(credit > 0, axis=0)
    tokens: Floats = (credit * sizes * held).sum(axis=0)
    return tokens


def _spread(values: Floats) -> Floats:
    """From 0 for the largest to 1 for the smallest; 1 for all where they are equal."""
    low, high = values.min(), values.max()
    return np.ones_like(values) if high == low else (high - values) / (high - low)


class CacheAware:
    """vLLM router and SGLang router, `cache_aware`.

    Formula: least in flight where the loads are uneven (`max - min > 64` and `max > 1.5 min`);
    else the longest match, if it is over 0.3 of the prompt; else the smallest tree. Source:
    vllm-project/router and sgl-model-gateway, policies/cache_aware, CLI defaults.
    """

    def __init__(
        self, *, cache_threshold: float = 0.3, abs_threshold: int = 64, rel_threshold: float = 1.5
    ) -> None:
        self._cache_threshold = cache_threshold
        self._abs_threshold, self._rel_threshold = abs_threshold, rel_threshold

    def decide(self, demand: Demand, view: ClusterView) -> Decision | Refusal:
        """One of the three, best first."""

        def key(table: CostTable, rows: Rows) -> Floats:
            in_flight = view.loads.column("in_flight", rows)
            low, high = in_flight.min(), in_flight.max()
            if high - low > self._abs_threshold and high > low * self._rel_threshold:
                return in_flight
            matched = _matched(demand, view, rows)
            if matched.max() > self._cache_threshold * max(1, demand.num_context_tokens):
                return -matched
            return view.history.num_tokens(view.loads.name(row) for row in rows.tolist())

        return decide_by(key, demand, view, reason=lambda best: "cache-aware")


class LlmdDefault:
    """llm-d router, default profile: `2 queue + 2 kv-cache-utilization + 3 prefix`, highest wins.

    Queue: requests that wait, scaled between the least and the most. Utilization: context tokens of
    the running ones over the cache. Prefix: share of the prompt in an approximate index by pod.
    Source: llm-d-router, pkg/epp/config/loader/defaults.go.
    """

    def __init__(self, *, kv_tokens: int = 500_000) -> None:
        self._kv_tokens = kv_tokens

    def decide(self, demand: Demand, view: ClusterView) -> Decision | Refusal:
        """By the sum of the weighed scores."""
        return decide_by(self._key(demand, view), demand, view, reason=lambda best: "llm-d")

    def _key(self, demand: Demand, view: ClusterView) -> Key:
        def key(table: CostTable, rows: Rows) -> Floats:
            queue = _spread(view.loads.column("pending", rows))
            used = np.minimum(1.0, view.loads.column("context_tokens", rows) / self._kv_tokens)
            prefix = self._prefix(demand, view, table, rows) / max(1, demand.num_context_tokens)
            values: Floats = -(2 * queue + 2 * (1 - used) + 3 * prefix)
            return values

        return key

    def _prefix(self, demand: Demand, view: ClusterView, table: CostTable, rows: Rows) -> Floats:
        return _matched(demand, view, rows)


class LlmdPrecise(LlmdDefault):
    """llm-d with the precise prefix scorer: the same weights over what engines report.

    Each consecutive block counts by its tier: GPU 1.0, CPU 0.8. Source: llm-d-kv-cache.
    """

    def _prefix(self, demand: Demand, view: ClusterView, table: CostTable, rows: Rows) -> Floats:
        if not demand.artifacts:
            return np.zeros(len(rows))
        return _weighed(demand, table, {Tier.HBM: 1.0, Tier.DRAM: 0.8})


class DynamoKv:
    """Dynamo's KV router: blocks of prefill and decode, lowest wins.

    Formula: `max(active_prefill + incoming - overlap, 0) + active_decode + incoming`, overlap by
    tier: device 1.0, host 0.75, disk 0.25. With a temperature, softmax over the scaled costs by a
    number that the tick gives. Source: ai-dynamo/dynamo, lib/llm/src/kv_router.
    """

    _CREDITS: Final[Mapping[Tier, float]] = {Tier.HBM: 1.0, Tier.DRAM: 0.75, Tier.NVME: 0.25}

    def __init__(self, *, temperature: float = 0.0) -> None:
        self._temperature = temperature

    def decide(self, demand: Demand, view: ClusterView) -> Decision | Refusal:
        """By cost, or at random among the cheap."""

        def key(table: CostTable, rows: Rows) -> Floats:
            incoming = demand.num_context_tokens / BLOCK_TOKENS
            overlap = (
                _weighed(demand, table, self._CREDITS) / BLOCK_TOKENS
                if demand.artifacts
                else np.zeros(len(rows))
            )
            prefill = view.loads.column("pending_tokens", rows) / BLOCK_TOKENS
            decode = view.loads.column("context_tokens", rows) / BLOCK_TOKENS
            cost = np.maximum(prefill + incoming - overlap, 0.0) + decode + incoming
            return cost if self._temperature == 0 else self._drawn(cost, view.tick)

        return decide_by(key, demand, view, reason=lambda best: "kv-cost")

    def _drawn(self, cost: Floats, tick: int) -> Floats:
        """Costs by which sorting is a draw from the softmax (Gumbel's trick)."""
        scale = cost.max() - cost.min()
        logits = (
            -(cost - cost.min()) / (scale * self._temperature) if scale else np.zeros_like(cost)
        )
        drawn: Floats = -(logits + np.random.default_rng(tick).gumbel(size=len(cost)))
        return drawn


class Preble:
    """Preble (E2): exploit a replica that has most of the prompt, else the least total cost.

    Exploit: where the longest match is more than the rest of the prompt, the least loaded of those
    that have it, unless it carries 1.5 times the mean. Explore: prefill of what runs and of what is
    missing, plus decode of what runs. Source: Srivatsa et al., "Preble: Efficient Distributed
    Prompt Scheduling for LLM Serving", 2024.
    """

    def decide(self, demand: Demand, view: ClusterView) -> Decision | Refusal:
        """The one or the other."""

        def key(table: CostTable, rows: Rows) -> Floats:
            matched = _matched(demand, view, rows)
            missing = demand.num_context_tokens - matched
            per_token = view.loads.column("prefill_s_per_token", rows)
            decode_s = view.loads.column("queue_s_per_request", rows)
            decoding = view.loads.column("in_flight", rows) - view.loads.column("pending", rows)
            load = view.loads.column("pending_s", rows) + decoding * decode_s
            is_match = matched > missing
            balanced = load <= 1.5 * load.mean() + 1e-12
            if (is_match & balanced).any():
                return np.where(is_match & balanced, load, load.max() + 1 + load)
            total: Floats = load + missing * per_token
            return total

        return decide_by(key, demand, view, reason=lambda best: "preble")


class MooncakeConductor:
    """Mooncake's Conductor: least of queue, transfer of the best prefix where it is, and prefill.

    A replica whose own prefix is not much shorter than the best one (`balancing`) computes the
    rest; another fetches it. Source: Qin et al., "Mooncake: A KVCache-centric Disaggregated
    Architecture for LLM Serving", 2024, algorithm 1.
    """

    def __init__(self, *, balancing: float = 4.0) -> None:
        self._balancing = balancing

    def decide(self, demand: Demand, view: ClusterView) -> Decision | Refusal:
        """By the predicted time to first token of that algorithm."""

        def key(table: CostTable, rows: Rows) -> Floats:
            live = demand.num_live_tokens
            base_s = view.loads.column("prefill_base_s", rows)
            per_token = view.loads.column("prefill_s_per_token", rows)
            queue_s = view.loads.column("pending_s", rows)
            if not demand.artifacts:
                plain: Floats = queue_s + base_s + live * per_token
                return plain
            everywhere = dict.fromkeys((Tier.HBM, Tier.DRAM, Tier.NVME), 1.0)
            own = _weighed(demand, table, everywhere)
            best = own.max()
            computed = queue_s + base_s + (live + demand.num_virtual_tokens - own) * per_token
            fetched = (
                queue_s + table.terms[1] + base_s
                + (live + demand.num_virtual_tokens - best) * per_token
            )  # fmt: skip
            is_near = best <= own * self._balancing
            return np.where(is_near, computed, fetched)

        return decide_by(key, demand, view, reason=lambda best: "conductor")
