{{- /* What follows from several values, and what they must not be together. */ -}}

{{- /* The settings of the server: what is given, and nothing that is a secret. */ -}}
{{- define "polyhead.config" -}}
{{- range $key := list "api_key" "api_keys" "admin_key" "fleet_key" }}
{{- if hasKey $.Values.config $key }}
{{- fail (printf "config.%s: a ConfigMap is no place for keys; put them into a Secret and name it as keys.secret" $key) }}
{{- end }}
{{- end }}
{{- range $key := list "host" "port" "config" }}
{{- if hasKey $.Values.config $key }}
{{- fail (printf "config.%s: the chart sets this itself; leave it out" $key) }}
{{- end }}
{{- end }}
{{- range $key := list "ray" "ray_address" "replicas" "queued_tokens" "replica_cpus" "replica_gpus" "replica_ports" "pools" }}
{{- if hasKey $.Values.config $key }}
{{- fail (printf "config.%s: the values under ray and autoscaling say this; leave it out" $key) }}
{{- end }}
{{- end }}
{{- toYaml .Values.config }}
{{- end }}

{{- /* A flag or a variable would win over the file: what the chart reckons with stands in `config`, keys in a Secret. */ -}}
{{- define "polyhead.args" -}}
{{- range $argument := .Values.extraArgs }}
{{- if hasPrefix "--drain-seconds" $argument }}
{{- fail "extraArgs: set config.drain_seconds instead of --drain-seconds; the time a pod is given to leave follows from it" }}
{{- end }}
{{- if or (hasPrefix "--api-key" $argument) (hasPrefix "--admin-key" $argument) (hasPrefix "--fleet-key" $argument) }}
{{- fail "extraArgs: whoever may list pods reads arguments; put keys into a Secret and name it as keys.secret" }}
{{- end }}
{{- end }}
{{- toYaml .Values.extraArgs }}
{{- end }}

{{- define "polyhead.env" -}}
{{- range $variable := .Values.extraEnv }}
{{- if eq "POLYHEAD_DRAIN_SECONDS" $variable.name }}
{{- fail "extraEnv: set config.drain_seconds instead of POLYHEAD_DRAIN_SECONDS; the time a pod is given to leave follows from it" }}
{{- end }}
{{- if and (has $variable.name (list "POLYHEAD_API_KEY" "POLYHEAD_API_KEYS" "POLYHEAD_ADMIN_KEY" "POLYHEAD_FLEET_KEY")) (hasKey $variable "value") }}
{{- fail (printf "extraEnv: %s stands here for all to read; put it into a Secret and name it as keys.secret" $variable.name) }}
{{- end }}
{{- end }}
{{- toYaml .Values.extraEnv }}
{{- end }}

{{- /* 8 seconds after the drain the process ends itself (GRACE in service/server/assembly.py); 2 more are ours. */ -}}
{{- define "polyhead.graceSeconds" -}}
{{- $drain := hasKey .Values.config "drain_seconds" | ternary .Values.config.drain_seconds 30 | int }}
{{- $least := add (int .Values.preStopSeconds) $drain 10 | int }}
{{- $given := int .Values.terminationGracePeriodSeconds }}
{{- if and $given (lt $given $least) }}
{{- fail (printf "terminationGracePeriodSeconds: %d is too short for preStopSeconds + config.drain_seconds + 10 = %d; requests would be cut" $given $least) }}
{{- end }}
{{- $given | default $least }}
{{- end }}

{{- /* "yes" where models come from outside: said so, or nothing is named and the quick start fetches its own. */ -}}
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
