"""The row of panels about several replicas of a model: how many, how full beside each other, and who decided.

An ingress says it of replicas on Ray; servers behind a Service are told from each other by their own pages.
"""

from panel import MODEL, ROUTED, TOGETHER, Panel, per_second

REPLICAS: list[Panel] = [
    Panel(
        "Replicas",
        "short",
        "Of each model, those that take requests, and those that Ray wants.  Servers behind a Service have none.",
        [
            (f"max by (model) (polyhead_replicas{{{ROUTED}}})", "{{model}}"),
            (f"max by (model) (polyhead_wanted_replicas{{{ROUTED}}})", "{{model}} wanted"),
        ],
    ),
    Panel(
        "Queued tokens by replica",
        "short",
        "Not computed yet, as the ingress reckons.  Replicas are counted by it, and requests go where it is least.",
        [(f"max by (model, replica) (polyhead_replica_queued_tokens{{{ROUTED}}})", "{{model}} {{replica}}")],
    ),
    Panel(
        "Imbalance",
        "short",
        "The fullest queue beside the mean, over ten minutes: 1 is even; far above, some wait while others rest.",
        [
            (f"job_model:polyhead_replica_queued_tokens:imbalance_10m{{{ROUTED}}}", "{{model}}"),
            (f"job:polyhead_tokens_in_flight:imbalance_10m{{{TOGETHER}}}", "{{job}}"),
        ],
        red=1.5,
    ),
    Panel(
        "Routing",
        "reqps",
        "By what decided: the prompt's beginning is in a replica's cache, less is queued there, there is only one.",
        [(per_second("polyhead_routed_total", "model, why", ROUTED), "{{model}} {{why}}")],
        stacked=True,
    ),
    Panel(
        "Prompt tokens found, by server",
        "percentunit",
        "Part of the prompts' tokens that were in its cache already: what routing by affinity is for.",
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
        "Connections to replicas that broke, and requests that were sent again because of it, in five minutes.",
        [
            (f"max by (model) (increase(polyhead_replicas_lost_total{{{ROUTED}}}[5m]))", "{{model}} lost"),
            (f"sum by (model) (increase(polyhead_rerouted_total{{{ROUTED}}}[5m]))", "{{model}} sent again"),
        ],
    ),
]
