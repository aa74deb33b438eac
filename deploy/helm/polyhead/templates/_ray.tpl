{{- /* The parts of a RayService: the file that Ray Serve reads, and the pods of head and workers. */ -}}

{{- define "polyhead.rayRules" -}}
{{- if not .Values.config.models }}
{{- fail "config.models: must not be empty with ray.enabled; there is no quick start on Ray" }}
{{- end }}
{{- if and (eq .Values.autoscaling.by "ray") (not .Values.autoscaling.tokens) }}
{{- fail "autoscaling.tokens: must not be 0; it is Ray's only metric" }}
{{- end }}
{{- if .Values.extraArgs }}
{{- fail "extraArgs: with ray.enabled there is no command line; put settings under config" }}
{{- end }}
{{- if gt (len (include "polyhead.fullname" .)) 47 }}
{{- fail (printf "fullnameOverride: KubeRay takes names of at most 47 characters, and %s has %d" (include "polyhead.fullname" .) (len (include "polyhead.fullname" .))) }}
{{- end }}
{{- range $pool, $names := .Values.ray.pools }}
{{- range $name := $names }}
{{- if not (hasKey $.Values.config.models $name) }}
{{- fail (printf "ray.pools.%s: %s is not in config.models" $pool $name) }}
{{- end }}
{{- end }}
{{- if hasKey $.Values.config.models $pool }}
{{- fail (printf "ray.pools.%s: a model of config.models has this name; rename the pool" $pool) }}
{{- end }}
{{- end }}
{{- $known := append (keys (include "polyhead.replicated" . | fromYaml)) "Ingress" }}
{{- range $name := keys .Values.ray.deployments }}
{{- if not (has $name $known) }}
{{- fail (printf "ray.deployments.%s: unknown; the deployments are %s" $name (join ", " (sortAlpha $known))) }}
{{- end }}
{{- end }}
{{- range $group := .Values.ray.workers }}
{{- if gt (int $group.minReplicas) (int $group.maxReplicas) }}
{{- fail (printf "ray.workers: %s has a minReplicas of %d, more than its maxReplicas, %d" $group.name (int $group.minReplicas) (int $group.maxReplicas)) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Deployments that have replicas of an engine: each model that is no adapter and in no pool, and each pool. */ -}}
{{- define "polyhead.replicated" -}}
{{- $found := dict }}
{{- $pooled := list }}
{{- range $pool, $names := .Values.ray.pools }}
{{- $pooled = concat $pooled $names }}
{{- $_ := set $found $pool true }}
{{- end }}
{{- range $name := keys .Values.config.models }}
{{- if not (or (contains ":" $name) (has $name $pooled)) }}
{{- $_ := set $found $name true }}
{{- end }}
{{- end }}
{{- toYaml $found }}
{{- end }}

{{- define "polyhead.drainSeconds" -}}
{{- hasKey .Values.config "drain_seconds" | ternary .Values.config.drain_seconds 30 | int }}
{{- end }}

{{- /* Settings of the application; those of Ray Serve are in its own options. */ -}}
{{- define "polyhead.rayArgs" -}}
{{- include "polyhead.config" . }}
replica_cpus: {{ .Values.ray.replica.cpus }}
replica_gpus: {{ .Values.ray.replica.gpus }}
replica_ports: {{ .Values.ray.replicaPorts | quote }}
{{- if eq .Values.autoscaling.by "ray" }}
{{- include "polyhead.replicaBounds" . }}
replicas: "{{ .Values.autoscaling.minReplicas }}-{{ .Values.autoscaling.maxReplicas }}"
queued_tokens: {{ .Values.autoscaling.tokens }}
{{- else }}
replicas: {{ .Values.replicas | quote }}
{{- end }}
{{- with .Values.ray.pools }}
pools:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "polyhead.rayCounted" -}}
autoscaling_config:
  min_replicas: {{ .Values.autoscaling.minReplicas }}
  max_replicas: {{ .Values.autoscaling.maxReplicas }}
  metrics_interval_s: 1
  look_back_period_s: 5
  upscale_delay_s: 5
  downscale_delay_s: {{ .Values.autoscaling.downAfterSeconds }}
  policy:
    policy_function: polyhead.service.fleet.autoscaling:QueuedTokensPolicy
    policy_kwargs: {target: {{ .Values.autoscaling.tokens }}}
{{- end }}

{{- define "polyhead.serveConfig" -}}
{{- $deployments := list (merge (dict "name" "Ingress") (default dict .Values.ray.deployments.Ingress) (dict "num_replicas" .Values.ray.ingresses)) }}
{{- range $name := sortAlpha (keys (include "polyhead.replicated" . | fromYaml)) }}
{{- $own := default dict (index $.Values.ray.deployments $name) }}
{{- $ours := dict }}
{{- if eq $.Values.autoscaling.by "ray" }}
{{- $ours = include "polyhead.rayCounted" $ | fromYaml }}
{{- /* A number of replicas alone would be overridden by the application's autoscaling. */ -}}
{{- with $own.num_replicas }}
{{- $_ := set $ours "autoscaling_config" (merge (dict "min_replicas" . "max_replicas" .) $ours.autoscaling_config) }}
{{- $own = omit $own "num_replicas" }}
{{- end }}
{{- end }}
{{- if or $own $ours }}
{{- $deployments = append $deployments (merge (dict "name" $name) $own $ours) }}
{{- end }}
{{- end -}}
proxy_location: EveryNode
http_options: {host: 0.0.0.0, port: 8000}
applications:
  - name: polyhead
    import_path: polyhead.service.fleet.ray_app:application
    route_prefix: /
    args:
      {{- include "polyhead.rayArgs" . | fromYaml | toYaml | nindent 6 }}
    deployments:
      {{- toYaml $deployments | nindent 6 }}
{{- end }}

{{- /* Labels and annotations of a pod of Ray: .root, .role. */ -}}
{{- define "polyhead.rayPodMeta" -}}
labels:
  {{- include "polyhead.selector" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .role }}
  {{- with .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .root.Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "polyhead.rayEnv" -}}
env:
  # Otherwise HOME is the volume with the models, which is read-only.
  - {name: HOME, value: /tmp}
  - {name: XDG_CACHE_HOME, value: /cache}
  - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
  {{- if .Values.keys.fileSecret }}
  - {name: POLYHEAD_KEYS_FILE, value: /etc/polyhead-keys/keys.yaml}
  {{- end }}
  {{- if .Values.extraEnv }}
  {{- include "polyhead.env" . | nindent 2 }}
  {{- end }}
{{- with .Values.keys.secret }}
envFrom:
  - secretRef: {name: {{ . }}}
{{- end }}
{{- end }}
