"""The workloads that can be generated, and their parameters that nobody published.

A and B are from "KVCache cache in the wild" §3: in one cluster of a cloud, people's services, and programs that call an
API. The profile ``toolagent`` is Mooncake's (Table 2). What is printed there is a constant here, with its place; other
parameters are :class:`Free` within a range. Where the paper contradicts itself, Fig. 5 is followed: next-turn
probabilities of 0.5 and 0.8 (§3.3) would make 71 % multi-turn requests, not 46 %."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pinyon.core.errors import InvalidArgument
from pinyon.core.near import did_you_mean
from pinyon_lab.traces.generate.draws import Quantiles
from pinyon_lab.traces.generate.profile import Chats, Free, Hours, Profile, ProfileSpec, Programs, UserGroups

MINUTE_S = 60.0
HOUR_S = 3600.0
PEOPLE = ((0.19, 0.5), (0.72, 0.9), (1.0, 1.0))
"""The share of the requests that a share of the users send, the busiest first (§3.2, Fig. 8)."""


def _qwen_a(free: Mapping[str, float]) -> Profile:
    think_s = free["think_s"]

    def more(median: float) -> Quantiles:
        median *= free["growth"]
        return Quantiles((0, median / 8), (0.5, median), (0.9, median * 2.6), (0.99, median * 6), (1, median * 12))

    text = Chats(
        "text",
        0.78,  # Fig. 5, as the other kinds' shares
        again_first=0.325,
        again_later=0.62,
        long_share=free["long_share"],
        long_again=0.98,
        first=Quantiles((0, 60), (0.5, 390), (0.9, 760), (0.99, 2900), (1, 9000)),
        more=more(950),
        output=Quantiles((0, 20), (0.5, 240), (0.9, 500), (0.99, 1100), (1, 3000)),
        think_s=think_s,
        think_later=free["think_later"],
        spread=free["spread"],
        system_tokens=int(free["system_tokens"]),
        system_life_s=800 * MINUTE_S,  # §3.5: the longest lifespan
    )
    file = replace(
        text,
        kind="file",
        share=0.04,
        again_first=0.38,
        again_later=0.63,
        first=Quantiles((0, 500), (0.5, 4000), (0.9, 12000), (0.99, 24000), (1, 30000)),
        more=more(300),
        think_s=think_s * 1.9,  # Fig. 14: the longest, then search, then text, then multimodal
        system_tokens=0,
    )
    multimodal = replace(
        text,
        kind="multimodal",
        share=0.03,
        again_first=0.085,
        again_later=0.3,
        long_share=0.0,
        first=Quantiles((0, 60), (0.5, 300), (0.9, 900), (0.99, 2400), (1, 6000)),
        more=more(250),
        output=Quantiles((0, 5), (0.5, 90), (0.9, 300), (0.99, 900), (1, 2000)),
        think_s=think_s * 0.5,
        spread=0.0,
    )
    search = replace(
        file,
        kind="search",
        share=0.15,
        again_first=0.35,
        first=Quantiles((0, 200), (0.5, 2200), (0.9, 7000), (0.99, 16000), (1, 20000)),
        more=more(700),
        think_s=think_s * 1.4,
    )
    return Profile(
        "qwen-a",
        "qwen",
        per_s=5.9,
        duration_s=2 * HOUR_S,
        start_s=10 * HOUR_S,
        hours=Hours(night=free["night"], slower=free["night_slower"], workdays_differ=0.1),
        users=UserGroups(int(free["users"]), PEOPLE, 4.0),
        parts=(text, file, multimodal, search),
        chatty_users=free["chatty_users"],
        chatty_more=3.0,
    )


def _qwen_b(free: Mapping[str, float]) -> Profile:
    return Profile(
        "qwen-b",
        "qwen",
        per_s=10.0,
        duration_s=2 * HOUR_S,
        start_s=10 * HOUR_S,
        hours=Hours(night=free["night"], workdays_differ=0.1),
        # §3.2, Fig. 8
        users=UserGroups(int(free["users"]), ((0.04, free["head_share"]), (0.15, 0.9), (1.0, 1.0)), 8.0),
        parts=(
            Programs(
                "",  # §3.1: their types are unknown
                1.0,
                calls=Quantiles(
                    (0, 1), (0.5, free["calls"]), (0.9, free["calls"] * 6), (0.99, 25 * free["calls"]), (1, 1e3)
                ),
                per_s=Quantiles((0, 0.01), (0.3, 0.1), (0.5, 0.5), (0.9, 15), (1, 40)),
                tokens=Quantiles((0, 200), (0.5, free["tokens"]), (0.9, 2 * free["tokens"]), (1, 4 * free["tokens"])),
                fixed=(free["fixed"] - 0.08, free["fixed"] + 0.08),
                output=Quantiles((0, 1), (0.5, 60), (0.9, 400), (1, 2000)),
                head_users=0.04,
                head_longer=2.2,
                life_s=1200 * MINUTE_S,  # §3.5: the longest lifespan
                same=free["same"],
                same_after_s=Quantiles((0, 0.1), (0.1, 0.3), (0.5, 3), (0.9, 30), (0.98, 97), (1, 3600)),
                second_turn=0.0008,  # Fig. 5
            ),
        ),
    )


def _toolagent(free: Mapping[str, float]) -> Profile:
    tools, chats = 0.149 + 0.378, 1 - 0.149 - 0.378  # DualMap A.2.1
    return Profile(
        "toolagent",
        "mooncake",
        per_s=23_608 / HOUR_S,
        duration_s=HOUR_S,
        start_s=10 * HOUR_S,
        hours=Hours(),
        users=UserGroups(int(free["users"]), PEOPLE, 4.0),
        parts=(
            Programs(
                "tool",
                tools,
                calls=Quantiles((0, 1), (0.5, 2), (1, 30)),
                per_s=Quantiles((0, 0.05), (0.5, 0.5), (1, 5)),
                tokens=Quantiles((0, 20), (0.5, 450), (0.9, 1100), (1, 6000)),
                fixed=(0.5, 0.5),
                output=Quantiles((0, 2), (0.5, 18), (0.9, 40), (1, 300)),
                hot=((0.149 / tools, 5), (0.378 / tools, 12)),
            ),
            Chats(
                "chat",
                chats,
                again_first=0.36,
                again_later=0.52,
                long_share=free["long_share"],
                long_again=0.9,
                first=Quantiles((0, 300), (0.5, 3000), (0.9, 13000), (0.99, 50000), (1, 120_000)),
                more=Quantiles((0, 30), (0.5, 2200 * free["growth"]), (0.9, 8000 * free["growth"]), (1, 40_000)),
                output=Quantiles((0, 3), (0.5, 320), (0.9, 640), (1, 2000)),
                think_s=free["think_s"],
                think_later=1.0,
                system_tokens=512,  # DualMap A.2.1: one block is the system's
                context_max=131_072,
            ),
        ),
    )


PROFILES: Mapping[str, ProfileSpec] = {
    "qwen-a": ProfileSpec(
        "people's services: chat, files, images, search (KVCache in the wild §3, trace A)",
        {
            "users": Free(10_000, 5_000, 20_000, "users who are active"),
            "chatty_users": Free(0.12, 0.0, 0.25, "share of users who mostly have a second turn"),
            "think_s": Free(380.0, 250.0, 510.0, "mean time to the next turn of a text conversation"),
            "think_later": Free(0.65, 0.4, 1.0, "the same after the second and later turns, relative to the first"),
            "long_share": Free(0.004, 0.001, 0.01, "of the conversations with a second turn, those that go on and on"),
            "growth": Free(1.0, 0.7, 1.4, "what a turn adds to the prompt, relative"),
            "spread": Free(0.7, 0.3, 1.1, "sigma of a conversation's own factor on that"),
            "system_tokens": Free(256, 0, 704, "an application's own instructions, text and multimodal"),
            "night": Free(0.25, 0.1, 0.5, "the night's rate, relative to the day's"),
            "night_slower": Free(1.6, 1.0, 2.5, "times to the next turn at night, relative to the day's"),
        },
        _qwen_a,
    ),
    "qwen-b": ProfileSpec(
        "programs that call an API (KVCache in the wild §3, trace B)",
        {
            "users": Free(400, 200, 1_000, "users who are active"),
            "head_share": Free(0.82, 0.75, 0.87, "of the requests, those of the busiest 4 % of users"),
            "calls": Free(5, 2, 15, "calls of a job, median"),
            "tokens": Free(900, 450, 1_800, "of a prompt, median over users"),
            "fixed": Free(0.5, 0.42, 0.56, "share of a prompt that is instructions"),
            "same": Free(0.16, 0.08, 0.24, "share of calls whose text comes again"),
            "night": Free(0.5, 0.2, 1.0, "the night's rate, relative to the day's"),
        },
        _qwen_b,
    ),
    "toolagent": ProfileSpec(
        "tools and agents (Mooncake §5.2.1, DualMap A.2.1)",
        {
            "users": Free(3_000, 1_000, 10_000, "users who are active"),
            "long_share": Free(0.01, 0.0, 0.05, "of the conversations with a second turn, those that go on"),
            "growth": Free(1.0, 0.7, 1.4, "what a turn adds to the prompt, relative"),
            "think_s": Free(180.0, 90.0, 360.0, "mean time to the next turn"),
        },
        _toolagent,
    ),
}


def profile(name: str, /, **free: float) -> Profile:
    """Returns a profile with these free parameters. Raises :class:`InvalidArgument` for an unknown name or value."""
    if name not in PROFILES:
        hint = did_you_mean(name, PROFILES)
        raise InvalidArgument(f"no profile {name!r}{hint}; known: {', '.join(PROFILES)}", field="profile")
    spec = PROFILES[name]
    for key, value in free.items():
        if key not in spec.free:
            hint = did_you_mean(key, spec.free)
            known = ", ".join(spec.free)
            raise InvalidArgument(f"profile {name} has no parameter {key!r}{hint}; known: {known}", field=key)
        low, high = spec.free[key].low, spec.free[key].high
        if not low <= value <= high:
            raise InvalidArgument(f"{key} of profile {name} must be from {low:g} to {high:g}, got {value:g}", field=key)
    return spec.make({key: each.usual for key, each in spec.free.items()} | free)
