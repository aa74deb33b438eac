{{- /* Values derived from several others, and combinations that are rejected. */ -}}

{{- /* The settings of the server that are given, without secrets. */ -}}
{{- define "polyhead.config" -}}
{{- range $key := list "api_key" "api_keys" "admin_key" "fleet_key" }}
{{- if hasKey $.Values.config $key }}
{{- fail (printf "config.%s: a ConfigMap must not contain keys; put them into a Secret and name it as keys.secret" $key) }}
{{- end }}
{{- end }}
{{- range $key := list "host" "port" "config" }}
{{- if hasKey $.Values.config $key }}
{{- fail (printf "config.%s: the chart sets this itself; leave it out" $key) }}
{{- end }}
{{- end }}
{{- range $key := list "ray" "ray_address" "replicas" "queued_tokens" "replica_cpus" "replica_gpus" "replica_ports" "pools" }}
{{- if hasKey $.Values.config $key }}
{{- fail (printf "config.%s: set the values under ray and autoscaling instead; leave it out" $key) }}
{{- end }}
{{- end }}
{{- toYaml .Values.config }}
{{- end }}

{{- /* A flag or a variable overrides the file: settings that the chart uses must be in `config`, keys in a Secret. */ -}}
{{- define "polyhead.args" -}}
{{- range $argument := .Values.extraArgs }}
{{- if hasPrefix "--drain-seconds" $argument }}
{{- fail "extraArgs: set config.drain_seconds instead of --drain-seconds; the grace period of pods is derived from it" }}
{{- end }}
{{- if or (hasPrefix "--api-key" $argument) (hasPrefix "--admin-key" $argument) (hasPrefix "--fleet-key" $argument) }}
{{- fail "extraArgs: arguments of pods can be read by listing pods; put keys into a Secret and name it as keys.secret" }}
{{- end }}
{{- end }}
{{- toYaml .Values.extraArgs }}
{{- end }}

{{- define "polyhead.env" -}}
{{- range $variable := .Values.extraEnv }}
{{- if eq "POLYHEAD_DRAIN_SECONDS" $variable.name }}
{{- fail "extraEnv: set config.drain_seconds instead of POLYHEAD_DRAIN_SECONDS; the grace period of pods is derived from it" }}
{{- end }}
{{- if and (has $variable.name (list "POLYHEAD_API_KEY" "POLYHEAD_API_KEYS" "POLYHEAD_ADMIN_KEY" "POLYHEAD_FLEET_KEY")) (hasKey $variable "value") }}
{{- fail (printf "extraEnv: %s would be readable here; put it into a Secret and name it as keys.secret" $variable.name) }}
{{- end }}
{{- end }}
{{- toYaml .Values.extraEnv }}
{{- end }}

{{- /* The process exits at most 8 seconds after the drain (EXIT_SECONDS in service/server/process.py); 2 more are a margin. */ -}}
{{- define "polyhead.graceSeconds" -}}
{{- $drain := hasKey .Values.config "drain_seconds" | ternary .Values.config.drain_seconds 30 | int }}
{{- $least := add (int .Values.preStopSeconds) $drain 10 | int }}
{{- $given := int .Values.terminationGracePeriodSeconds }}
{{- if and $given (lt $given $least) }}
{{- fail (printf "terminationGracePeriodSeconds: %d is too short for preStopSeconds + config.drain_seconds + 10 = %d; requests would be aborted" $given $least) }}
{{- end }}
{{- $given | default $least }}
{{- end }}

{{- /* "yes" if models are fetched: models.download is set, or config.models is empty and the quick start fetches them. */ -}}
{{- define "polyhead.downloads" -}}
{{- if or .Values.models.download (not .Values.config.models) }}yes{{ end }}
{{- end }}

{{- define "polyhead.modelVolume" -}}
{{- if and .Values.models.claim .Values.models.hostPath }}
{{- fail "models: claim and hostPath are both given; one volume is mounted at /models" }}
{{- end }}
{{- if .Values.models.claim -}}
persistentVolumeClaim: {claimName: {{ .Values.models.claim }}, readOnly: true}
{{- else if .Values.models.hostPath -}}
hostPath: {path: {{ .Values.models.hostPath | quote }}, type: Directory}
{{- end }}
{{- end }}
