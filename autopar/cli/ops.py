"""``autopar ops``."""

from __future__ import annotations

import argparse
import json

from autopar import api


def run(arguments: argparse.Namespace) -> int:
    """Print the ops of a model with their rules, as a table or as JSON."""
    found = api.ops(arguments.model, api.Cluster(arguments.cluster), seq_len=arguments.seq_len)
    print(json.dumps(_document(found), indent=1) if arguments.json else _table(found))
    return 0


def _document(found: api.Coverage) -> dict[str, object]:
    def entry(use: api.OpUse) -> dict[str, object]:
        cost = {} if use.rule else {"replicated_seconds": use.seconds, "sources": use.sources}
        return {"op": use.op, "count": use.count, "rule": use.rule, **cost}

    return {
        "model": found.model,
        "ops": [entry(use) for use in found.uses],
        "without_rule": [entry(use) for use in found.without_rule],
        "rule_coverage": found.rule_coverage,
        "split_flops_fraction": found.split_flops_fraction,
        "unsplit": [
            {"op": op, "source": source, "share": share} for op, source, share in found.unsplit
        ],
    }


def _table(found: api.Coverage) -> str:
    width = max((len(use.op) for use in found.uses), default=0)
    lines = [f"{'op':{width}}  count  rule"]
    for use in found.uses:
        text = use.rule
        if text is None:
            at = f" ({', '.join(use.sources)})" if use.sources else ""
            text = f"none: replicated, costs {_seconds(use.seconds)} per sequence on a rank{at}"
        lines.append(f"{use.op:{width}}  {use.count:5}  {text}")
    lines += [
        "",
        f"{found.rule_coverage:.1%} of ops have a rule; "
        f"rules split {found.split_flops_fraction:.2%} of matmul FLOPs at tp 2",
    ]
    lines += [f"not split: {op} at {source}: {share:.2%}" for op, source, share in found.unsplit]
    if found.without_rule:
        lines.append("a rule lets an op be split: see autopar.register_rule")
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
