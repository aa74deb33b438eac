"""What the Grafana dashboard shows: rows of panels.

Knows neither Grafana's JSON (dashboard.py) nor how the server counts.  The one idea: a panel is a title, a unit, a
sentence that says how to read it, and queries; where it stands follows from the order.  A test runs every query against
a real Prometheus.
"""

from panel import JOB, MODEL, TOGETHER, Panel, mean, per_second, quantiles, stat, total
from replicas import REPLICAS

BOTH = "{{model}} {{task}}"
ROWS: dict[str, list[Panel]] = {
    "Overview": [
        stat("Servers that answer", "short", "Of all that Prometheus knows.", (f"sum(up{{{JOB}}})", "")),
        stat("Models ready", "short", "Loaded and warm, on all servers.", (f"sum(polyhead_model_ready{{{JOB}}})", "")),
        stat(
            "Versions",
            "short",
            "How many servers run which version.",
            (f"count by (version) (polyhead_build_info{{{JOB}}})", "{{version}}"),
        ),
        stat(
            "Requests",
            "reqps",
            "Texts and prompts that ended, however they did.",
            (f"sum(rate(polyhead_requests_total{{{MODEL}}}[$__rate_interval]))", ""),
        ),
        stat(
            "Failures",
            "percentunit",
            "Part of requests that failed through our fault in five minutes; the objective is 0.1 %.",
            (f"max(job:polyhead_errors:ratio_rate5m{{{TOGETHER}}})", ""),
            red=0.001,
        ),
        stat(
            "Turned away",
            "percentunit",
            "Part of requests answered 429 in five minutes, because as much was in flight as the bounds allow.",
            (f"max(job:polyhead_overloaded:ratio_rate5m{{{TOGETHER}}})", ""),
            red=0.05,
        ),
        Panel(
            "Requests by outcome",
            "reqps",
            "Texts and prompts that ended; what was turned away before a model was known has an empty name.",
            [(per_second("polyhead_requests_total", "model, outcome"), "{{model}} {{outcome}}")],
            stacked=True,
        ),
        Panel(
            "HTTP by status",
            "reqps",
            "HTTP requests of all routes, probes and /metrics included.",
            [(per_second("polyhead_http_requests_total", "status", JOB), "{{status}}")],
            stacked=True,
        ),
        Panel(
            "Error budget",
            "percentunit",
            "Part of requests that fail through our fault; above 0.1 % the budget of 30 days is overspent.",
            [
                (f"job:polyhead_errors:ratio_rate{window}{{{TOGETHER}}}", f"{{{{job}}}} {window}")
                for window in ("1h", "6h", "3d")
            ],
        ),
    ],
    "Latency": [
        Panel(
            "Time to first token",
            "s",
            "From submission to the first token of an answer: queue and prompt.",
            quantiles("polyhead_time_to_first_token_seconds"),
        ),
        Panel(
            "Time between tokens",
            "s",
            "Between one token of an answer and its next: what a reader of a stream waits.",
            quantiles("polyhead_inter_token_seconds"),
        ),
        Panel(
            "Time of a request",
            "s",
            "From submission to the last event; a generator's depends on how long answers are.",
            quantiles("polyhead_request_seconds"),
        ),
    ],
    "Queue and admission": [
        Panel(
            "Waiting",
            "short",
            "Texts and prompts before their first step.  Always above zero and growing: more comes than is answered.",
            [(total("polyhead_requests_waiting", "model, task"), BOTH)],
        ),
        Panel(
            "Running",
            "short",
            "Texts and prompts being computed; a generator advances max_running at once on each server, at most.",
            [(total("polyhead_requests_running", "model, task"), BOTH)],
        ),
        Panel(
            "Time in the queue",
            "s",
            "From submission to the first step.",
            quantiles("polyhead_stage_seconds", extra=',stage="queue"'),
        ),
        Panel(
            "HTTP requests in flight",
            "short",
            "Admitted and not answered; bounded by max_requests on each server.",
            [(total("polyhead_http_requests_in_flight", "instance", JOB), "{{instance}}")],
        ),
        Panel(
            "Tokens in flight",
            "short",
            "Of texts and prompts not answered yet: what servers are counted by; bounded by max_tokens_in_flight.",
            [(total("polyhead_tokens_in_flight", "instance", JOB), "{{instance}}")],
        ),
        Panel(
            "Turned away with 429",
            "reqps",
            "HTTP requests over a bound; clients are told when to come again.  Turned away by code, below, says which.",
            [(per_second("polyhead_http_requests_total", "instance", f'{JOB},status="429"'), "{{instance}}")],
        ),
    ],
    "Engine": [
        Panel(
            "Steps",
            "ops",
            "Forward passes, by the model that steps; adapters step with their trunk.",
            [(per_second("polyhead_engine_steps_total", "model, task"), BOTH)],
        ),
        Panel(
            "Sequences in a step",
            "short",
            "The mean: how well requests share steps.",
            [(mean("polyhead_batch_sequences"), BOTH)],
        ),
        Panel(
            "Tokens in a step",
            "short",
            "The mean; bounded by step_tokens and encoder_step_tokens.",
            [(mean("polyhead_batch_tokens"), BOTH)],
        ),
        Panel(
            "Tokens",
            "short",
            "A second: of prompts, of answers, and through the network (without what was found in the cache).",
            [(per_second("polyhead_tokens_total", "model, kind"), "{{model}} {{kind}}")],
        ),
        Panel(
            "Time by stage",
            "percentunit",
            "Of each second of a server, how much goes to what; forward near 1 means that its engine is always busy.",
            [
                (
                    "avg by (model, stage) "
                    f'(rate(polyhead_stage_seconds_sum{{{MODEL},stage!="queue"}}[$__rate_interval]))',
                    "{{model}} {{stage}}",
                )
            ],
            stacked=True,
        ),
        Panel(
            "Time of a step",
            "s",
            "One forward pass.",
            quantiles("polyhead_stage_seconds", extra=',stage="forward"'),
        ),
        Panel(
            "Padding",
            "percentunit",
            "Part of the computed slots that held no token.",
            [
                (
                    f"{per_second('polyhead_padding_tokens_total', 'model, task')} / "
                    f"({per_second('polyhead_padding_tokens_total', 'model, task')} + "
                    + per_second("polyhead_tokens_total", "model, task", f'{MODEL},kind="computed"')
                    + ")",
                    BOTH,
                )
            ],
        ),
        Panel(
            "Stalled",
            "s",
            "Time without a step while somebody waits for one: not ready above stall_seconds (8).",
            [(f"polyhead_engine_stalled_seconds{{{JOB}}}", "{{instance}}")],
            red=8,
        ),
    ],
    "Cache": [
        Panel(
            "Blocks",
            "short",
            "Held by running sequences, and all there are.",
            [
                (total("polyhead_kv_blocks_used", "instance, model"), "{{instance}} {{model}} used"),
                (total("polyhead_kv_blocks", "instance, model"), "{{instance}} {{model}} all"),
            ],
        ),
        Panel(
            "Preemptions",
            "ops",
            "Sequences that lost their blocks to others and are computed again: the cache is too small for what runs.",
            [(per_second("polyhead_preemptions_total", "model, task"), BOTH)],
        ),
        Panel(
            "Prompt tokens found",
            "percentunit",
            "Part of the prompts' tokens whose keys and values were in the cache already.",
            [
                (
                    f"{per_second('polyhead_prefix_cached_tokens_total', 'model, task')} / "
                    + per_second("polyhead_tokens_total", "model, task", f'{MODEL},kind="prompt"'),
                    BOTH,
                )
            ],
        ),
    ],
    "Speculation": [
        Panel(
            "Tokens foretold",
            "short",
            "A second: tried, and those that came.  None where measured odds say that it doesn't pay.",
            [
                (per_second("polyhead_draft_tokens_total", "model"), "{{model}} tried"),
                (per_second("polyhead_accepted_tokens_total", "model"), "{{model}} came"),
            ],
            width=12,
        ),
        Panel(
            "Answers foretold",
            "percentunit",
            "Part of the answers' tokens that were foretold and came.",
            [
                (
                    f"{per_second('polyhead_accepted_tokens_total', 'model')} / "
                    + per_second("polyhead_tokens_total", "model", f'{MODEL},kind="generated"'),
                    "{{model}}",
                )
            ],
            width=12,
        ),
    ],
    "Replicas": REPLICAS,
    "Keys": [
        Panel(
            "Requests by key",
            "reqps",
            "HTTP requests under a key's name, by status.",
            [(per_second("polyhead_key_requests_total", "key, status", JOB), "{{key}} {{status}}")],
            width=12,
            stacked=True,
        ),
        Panel(
            "Tokens by key",
            "short",
            "A second: of prompts and of answers, under a key's name.",
            [(per_second("polyhead_key_tokens_total", "key, kind", JOB), "{{key}} {{kind}}")],
            width=12,
            stacked=True,
        ),
    ],
    "Failures": [
        Panel(
            "Failures by reason",
            "reqps",
            "Texts and prompts that were begun and failed, or came too late, by the error's code.",
            [(per_second("polyhead_failures_total", "model, reason"), "{{model}} {{reason}}")],
        ),
        Panel(
            "Turned away by code",
            "reqps",
            "HTTP requests answered with an error before anything was computed.",
            [(per_second("polyhead_rejections_total", "code", JOB), "{{code}}")],
        ),
        Panel(
            "Connections cut",
            "cps",
            "Of clients that did not read what they were sent for write_seconds.",
            [(per_second("polyhead_connections_cut_total", "instance", JOB), "{{instance}}")],
        ),
    ],
    "Process": [
        Panel(
            "Memory",
            "bytes",
            "Resident: weights, caches and the rest.",
            [(f"process_resident_memory_bytes{{{JOB}}}", "{{instance}}")],
        ),
        Panel(
            "Cores",
            "short",
            "Processor seconds a second, of all threads.",
            [(per_second("process_cpu_seconds_total", "instance", JOB), "{{instance}}")],
        ),
        Panel(
            "Open files",
            "short",
            "Descriptors: connections, for the most part; and how many there may be.",
            [
                (f"process_open_fds{{{JOB}}}", "{{instance}} open"),
                (f"process_max_fds{{{JOB}}}", "{{instance}} most"),
            ],
        ),
        Panel(
            "Age",
            "s",
            "Since the process began: where it falls, a server was started again.",
            [(f"time() - process_start_time_seconds{{{JOB}}}", "{{instance}}")],
            width=12,
        ),
        Panel(
            "Leaving",
            "s",
            "Since a drain began, and how long it may take; zero while it serves.",
            [
                (f"polyhead_draining_seconds{{{JOB}}}", "{{instance}} leaving"),
                (f"polyhead_draining_limit_seconds{{{JOB}}}", "{{instance}} allowed"),
            ],
            width=12,
        ),
    ],
}
