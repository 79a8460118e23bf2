"""A pipeline of blocking ranks, played step by step: what the validator is held against.

Tokens stand for tensors. A rank does its entry when it holds every token that the entry reads; a
transfer happens when both ranks have reached it, and is the first of its direction that either has
open between these two. Nothing here is shared with the code under test but the actions' names.
"""

from __future__ import annotations

from collections import Counter

from zeroexp.pipeline.action import Exchange
from zeroexp.pipeline.schedule import Schedule


def plays(schedule: Schedule) -> bool:
    """Whether every rank comes to its end with all work done exactly once and no tensor mixed up.

    Compute actions, sends and receives only.
    """
    lists = [
        [
            [str(a) for a in entry.actions] if isinstance(entry, Exchange) else [str(entry)]
            for entry in entries
        ]
        for entries in schedule.lists
    ]
    last, home = len(schedule.rank_of) - 1, schedule.rank_of
    holds: list[set[str]] = [set() for _ in lists]
    done: Counter[str] = Counter()

    def split(name: str) -> tuple[str, int, int]:
        kind = name.rstrip("0123456789.")
        stage, _, micro_batch = name[len(kind) :].partition(".")
        return kind, int(stage), int(micro_batch)

    def compute(rank: int, name: str) -> bool:
        kind, s, m = split(name)
        reads = {
            "F": {f"act{s - 1}.{m}"} if s else set(),
            "B": {f"saved{s}.{m}"} | ({f"grad{s + 1}.{m}"} if s < last else set()),
            "I": {f"saved{s}.{m}"} | ({f"grad{s + 1}.{m}"} if s < last else set()),
            "W": {f"half{s}.{m}"},
        }[kind]
        if not reads <= holds[rank] or home[s] != rank:
            return False
        holds[rank] -= reads
        makes = {
            "F": {f"act{s}.{m}", f"saved{s}.{m}"},
            "B": {f"grad{s}.{m}"},
            "I": {f"grad{s}.{m}", f"half{s}.{m}"},
            "W": set(),
        }
        holds[rank] |= makes[kind]
        done[name] += 1
        return True

    def channel(name: str) -> tuple[int, int, str]:
        """(from, to, token)"""
        kind, s, m = split(name)
        if kind == "SA":
            return home[s], home[s + 1], f"act{s}.{m}"
        if kind == "RA":
            return home[s - 1], home[s], f"act{s - 1}.{m}"
        if kind == "SG":
            return home[s], home[s - 1], f"grad{s}.{m}"
        return home[s + 1], home[s], f"grad{s + 1}.{m}"

    moved = True
    while moved:
        moved = False
        for rank, entries in enumerate(lists):
            while entries and (not entries[0] or split(entries[0][0])[0] in "FBIW"):
                if entries[0] and not compute(rank, entries[0][0]):
                    break
                entries.pop(0)
                moved = True
            if not entries or not entries[0] or split(entries[0][0])[0] in "FBIW":
                continue
            for name in entries[0]:
                if split(name)[0] not in ("SA", "SG"):
                    continue
                source, target, token = channel(name)
                if source != rank or token not in holds[rank] or not lists[target]:
                    continue
                ours = [
                    n for n in entries[0] if n.startswith("S") and channel(n)[:2] == (rank, target)
                ]
                theirs = [
                    n
                    for n in lists[target][0]
                    if n.startswith("R") and channel(n)[:2] == (rank, target)
                ]
                if ours[0] != name or not theirs:
                    continue
                if channel(theirs[0])[2] != token:
                    return False
                entries[0].remove(name)
                lists[target][0].remove(theirs[0])
                holds[rank].remove(token)
                holds[target].add(token)
                moved = True
                break
    if any(lists):
        return False
    for s in range(last + 1):
        for m in range(schedule.micro_batches):
            work = [done[f"{kind}{s}.{m}"] for kind in "FBIW"]
            if work not in ([1, 1, 0, 0], [1, 0, 1, 1]):
                return False
    return sum(done.values()) == sum(1 for n in done)
