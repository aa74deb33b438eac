"""The row of panels about replicas of a model: their number, their queues and the routing.

For replicas on Ray the metrics are those of the ingress; for servers behind a Service those of each server.
"""

from panel import MODEL, ROUTED, TOGETHER, Panel, per_second

REPLICAS: list[Panel] = [
    Panel(
        "Replicas",
        "short",
        "Replicas of each model that accept requests, and Ray's target number.  Servers behind a Service have none.",
        [
            (f"max by (model) (polyhead_replicas{{{ROUTED}}})", "{{model}}"),
            (f"max by (model) (polyhead_wanted_replicas{{{ROUTED}}})", "{{model}} target"),
        ],
    ),
    Panel(
        "Queued tokens by replica",
        "short",
        "Tokens not computed yet, as the ingress estimates.  Autoscaling uses the sum, routing the smallest.",
        [(f"max by (model, replica) (polyhead_replica_queued_tokens{{{ROUTED}}})", "{{model}} {{replica}}")],
    ),
    Panel(
        "Imbalance",
        "short",
        "The longest queue divided by the mean queue, over ten minutes: 1 is balanced.",
        [
            (f"job_model:polyhead_replica_queued_tokens:imbalance_10m{{{ROUTED}}}", "{{model}}"),
            (f"job:polyhead_tokens_in_flight:imbalance_10m{{{TOGETHER}}}", "{{job}}"),
        ],
        red=1.5,
    ),
    Panel(
        "Routing",
        "reqps",
        "Requests by the reason of the choice: cached prefix, shortest queue, or only one replica.",
        [(per_second("polyhead_routed_total", "model, why", ROUTED), "{{model}} {{why}}")],
        stacked=True,
    ),
    Panel(
        "Prefix cache hit rate by server",
        "percentunit",
        "Share of prompt tokens that were in the server's cache; routing by affinity increases it.",
        [
            (
                f"{per_second('polyhead_prefix_cached_tokens_total', 'instance')} / "
                + per_second("polyhead_tokens_total", "instance", f'{MODEL},kind="prompt"'),
                "{{instance}}",
            )
        ],
    ),
    Panel(
        "Replicas lost",
        "short",
        "Broken connections to replicas, and requests sent to another replica because of it, in five minutes.",
        [
            (f"max by (model) (increase(polyhead_replicas_lost_total{{{ROUTED}}}[5m]))", "{{model}} lost"),
            (f"sum by (model) (increase(polyhead_rerouted_total{{{ROUTED}}}[5m]))", "{{model}} rerouted"),
        ],
    ),
]
