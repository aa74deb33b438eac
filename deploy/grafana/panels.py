"""The panels of the Grafana dashboard, in rows.

A panel has a title, a unit, a description and queries; its place follows from the order.  dashboard.py writes Grafana's
JSON from it.  A test runs every query against a real Prometheus.
"""

from decisions import DECISIONS
from panel import JOB, MODEL, TOGETHER, Panel, mean, per_second, quantiles, stat, total
from replicas import REPLICAS

BOTH = "{{model}} {{task}}"
ROWS: dict[str, list[Panel]] = {
    "Overview": [
        stat("Servers up", "short", "Servers whose metrics page Prometheus can read.", (f"sum(up{{{JOB}}})", "")),
        stat("Models ready", "short", "Loaded and warm, on all servers.", (f"sum(polyhead_model_ready{{{JOB}}})", "")),
        stat(
            "Versions",
            "short",
            "Servers by version.",
            (f"count by (version) (polyhead_build_info{{{JOB}}})", "{{version}}"),
        ),
        stat(
            "Requests",
            "reqps",
            "Texts and prompts that ended, with any outcome.",
            (f"sum(rate(polyhead_requests_total{{{MODEL}}}[$__rate_interval]))", ""),
        ),
        stat(
            "Failures",
            "percentunit",
            "Share of requests that failed with a server error (5xx) in five minutes; the objective is 0.1 %.",
            (f"max(job:polyhead_errors:ratio_rate5m{{{TOGETHER}}})", ""),
            red=0.001,
        ),
        stat(
            "Rejected with 429",
            "percentunit",
            "Share of requests answered 429 in five minutes, over a limit on work in flight.",
            (f"max(job:polyhead_overloaded:ratio_rate5m{{{TOGETHER}}})", ""),
            red=0.05,
        ),
        Panel(
            "Requests by outcome",
            "reqps",
            "Texts and prompts that ended; those rejected before the model is known have an empty name.",
            [(per_second("polyhead_requests_total", "model, outcome"), "{{model}} {{outcome}}")],
            stacked=True,
        ),
        Panel(
            "HTTP requests by status",
            "reqps",
            "HTTP requests of all routes, probes and /metrics included.",
            [(per_second("polyhead_http_requests_total", "status", JOB), "{{status}}")],
            stacked=True,
        ),
        Panel(
            "Error budget",
            "percentunit",
            "Share of requests that fail with a server error (5xx); above 0.1 % the budget of 30 days is exceeded.",
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
            "From submission to the first token of an answer: queue time and prefill.",
            quantiles("polyhead_time_to_first_token_seconds"),
        ),
        Panel(
            "Inter-token latency",
            "s",
            "Between two tokens of an answer.",
            quantiles("polyhead_inter_token_seconds"),
        ),
        Panel(
            "Request latency",
            "s",
            "From submission to the last event; for a generator it depends on the lengths of answers.",
            quantiles("polyhead_request_seconds"),
        ),
    ],
    "Queue and admission": [
        Panel(
            "Waiting",
            "short",
            "Texts and prompts before their first step.  If it keeps growing, the load exceeds the capacity.",
            [(total("polyhead_requests_waiting", "model, task"), BOTH)],
        ),
        Panel(
            "Running",
            "short",
            "Texts and prompts being computed; at most max_running for a generator on each server.",
            [(total("polyhead_requests_running", "model, task"), BOTH)],
        ),
        Panel(
            "Queue time",
            "s",
            "From submission to the first step.",
            quantiles("polyhead_stage_seconds", extra=',stage="queue"'),
        ),
        Panel(
            "HTTP requests in flight",
            "short",
            "Admitted and not answered; limited by max_requests on each server.",
            [(total("polyhead_http_requests_in_flight", "instance", JOB), "{{instance}}")],
        ),
        Panel(
            "Tokens in flight",
            "short",
            "Tokens of texts and prompts not answered yet, for autoscaling; limited by max_tokens_in_flight.",
            [(total("polyhead_tokens_in_flight", "instance", JOB), "{{instance}}")],
        ),
        Panel(
            "Rejected with 429 by server",
            "reqps",
            "HTTP requests over a limit; the answer has Retry-After.  The panel Rejections by code shows which limit.",
            [(per_second("polyhead_http_requests_total", "instance", f'{JOB},status="429"'), "{{instance}}")],
        ),
    ],
    "Engine": [
        Panel(
            "Steps",
            "ops",
            "Forward passes by model; an adapter's are counted for its base model.",
            [(per_second("polyhead_engine_steps_total", "model, task"), BOTH)],
        ),
        Panel(
            "Sequences per step",
            "short",
            "The mean number of sequences in a step.",
            [(mean("polyhead_batch_sequences"), BOTH)],
        ),
        Panel(
            "Tokens per step",
            "short",
            "The mean; limited by step_tokens and encoder_step_tokens.",
            [(mean("polyhead_batch_tokens"), BOTH)],
        ),
        Panel(
            "Tokens",
            "short",
            "Per second: prompt tokens, generated tokens, and computed tokens (without those found in the cache).",
            [(per_second("polyhead_tokens_total", "model, kind"), "{{model}} {{kind}}")],
        ),
        Panel(
            "Time by stage",
            "percentunit",
            "Share of a server's time by stage; forward near 1 means that its engine is always busy.",
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
            "Step time",
            "s",
            "One forward pass.",
            quantiles("polyhead_stage_seconds", extra=',stage="forward"'),
        ),
        Panel(
            "Padding",
            "percentunit",
            "Share of the computed positions that are padding.",
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
            "Time without a step while requests wait; the server is not ready above stall_seconds (8).",
            [(f"polyhead_engine_stalled_seconds{{{JOB}}}", "{{instance}}")],
            red=8,
        ),
    ],
    "Cache": [
        Panel(
            "Cache blocks",
            "short",
            "Blocks of running sequences, and all blocks.",
            [
                (total("polyhead_kv_blocks_used", "instance, model"), "{{instance}} {{model}} used"),
                (total("polyhead_kv_blocks", "instance, model"), "{{instance}} {{model}} total"),
            ],
        ),
        Panel(
            "Preemptions",
            "ops",
            "Sequences whose blocks were freed for others and that are computed again: the cache is too small.",
            [(per_second("polyhead_preemptions_total", "model, task"), BOTH)],
        ),
        Panel(
            "Prefix cache hit rate",
            "percentunit",
            "Share of prompt tokens whose keys and values were in the cache.",
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
            "Draft tokens",
            "short",
            "Per second: proposed and accepted.  None if the measured acceptance rate is too low.",
            [
                (per_second("polyhead_draft_tokens_total", "model"), "{{model}} proposed"),
                (per_second("polyhead_accepted_tokens_total", "model"), "{{model}} accepted"),
            ],
            width=12,
        ),
        Panel(
            "Generated tokens from drafts",
            "percentunit",
            "Share of generated tokens that were accepted draft tokens.",
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
    "Decisions": DECISIONS,
    "Replicas": REPLICAS,
    "Keys": [
        Panel(
            "Requests by key",
            "reqps",
            "HTTP requests by the name of the key and status.",
            [(per_second("polyhead_key_requests_total", "key, status", JOB), "{{key}} {{status}}")],
            width=12,
            stacked=True,
        ),
        Panel(
            "Tokens by key",
            "short",
            "Prompt tokens and generated tokens per second, by the name of the key.",
            [(per_second("polyhead_key_tokens_total", "key, kind", JOB), "{{key}} {{kind}}")],
            width=12,
            stacked=True,
        ),
    ],
    "Failures": [
        Panel(
            "Failures by reason",
            "reqps",
            "Texts and prompts that failed or expired after they were submitted, by the error's code.",
            [(per_second("polyhead_failures_total", "model, reason"), "{{model}} {{reason}}")],
        ),
        Panel(
            "Rejections by code",
            "reqps",
            "HTTP requests answered with an error before submission, by the error's code.",
            [(per_second("polyhead_rejections_total", "code", JOB), "{{code}}")],
        ),
        Panel(
            "Connections cut",
            "cps",
            "Connections of clients that read nothing of their answer for write_seconds.",
            [(per_second("polyhead_connections_cut_total", "instance", JOB), "{{instance}}")],
        ),
    ],
    "Process": [
        Panel(
            "Memory",
            "bytes",
            "Resident memory: weights, caches and the rest.",
            [(f"process_resident_memory_bytes{{{JOB}}}", "{{instance}}")],
        ),
        Panel(
            "Cores",
            "short",
            "CPU seconds per second, of all threads.",
            [(per_second("process_cpu_seconds_total", "instance", JOB), "{{instance}}")],
        ),
        Panel(
            "File descriptors",
            "short",
            "Open file descriptors, most of them connections, and their limit.",
            [
                (f"process_open_fds{{{JOB}}}", "{{instance}} open"),
                (f"process_max_fds{{{JOB}}}", "{{instance}} limit"),
            ],
        ),
        Panel(
            "Uptime",
            "s",
            "Time since the process started; a drop is a restart.",
            [(f"time() - process_start_time_seconds{{{JOB}}}", "{{instance}}")],
            width=12,
        ),
        Panel(
            "Drain",
            "s",
            "Time since the drain began, and its limit; zero while the server accepts requests.",
            [
                (f"polyhead_draining_seconds{{{JOB}}}", "{{instance}} draining"),
                (f"polyhead_draining_limit_seconds{{{JOB}}}", "{{instance}} limit"),
            ],
            width=12,
        ),
    ],
}
