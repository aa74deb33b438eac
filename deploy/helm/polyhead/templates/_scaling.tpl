{{- /* Metrics and rates of autoscaling, the same for every autoscaler. */ -}}

{{- /* The target load of a pod, as metrics of the server: {triggers: [{metric, labels, target, always}]}; a
missing series of an `always` metric is a failure. */ -}}
{{- define "polyhead.triggers" -}}
{{- $by := .Values.autoscaling }}
{{- if not (or $by.tokens $by.running $by.waiting) }}
{{- fail "autoscaling: tokens, running and waiting are all 0; at least one must be set" }}
{{- end }}
triggers:
{{- with $by.tokens }}
  - {metric: polyhead_tokens_in_flight, labels: {}, target: {{ int . }}, always: true}
{{- end }}
{{- with $by.running }}
  - {metric: polyhead_requests_running, labels: {task: generate}, target: {{ int . }}, always: false}
{{- end }}
{{- with $by.waiting }}
  - {metric: polyhead_requests_waiting, labels: {}, target: {{ int . }}, always: true}
{{- end }}
{{- end }}

{{- /* The sum of a trigger's metric over the pods of this release, in PromQL. */ -}}
{{- define "polyhead.work" -}}
{{- $matching := list (printf "namespace=%q" .root.Release.Namespace) (printf "service=%q" (include "polyhead.fullname" .root)) }}
{{- range $label, $value := .trigger.labels }}
{{- $matching = append $matching (printf "%s=%q" $label $value) }}
{{- end }}
{{- printf "sum(avg_over_time(%s{%s}[1m]))" .trigger.metric (join ", " $matching) }}
{{- end }}

{{- define "polyhead.scaling" -}}
scaleUp: {stabilizationWindowSeconds: 0}
scaleDown:
  stabilizationWindowSeconds: {{ .Values.autoscaling.downAfterSeconds }}
  # A stopped pod loses its cache, and a new one takes minutes to load.
  policies: [{type: Pods, value: 1, periodSeconds: 60}]
{{- end }}

{{- /* The autoscaler must be able to start the pods. */ -}}
{{- define "polyhead.counted" -}}
{{- if and .Values.ray.enabled (has .Values.autoscaling.by (list "hpa" "keda")) }}
{{- fail (printf "autoscaling.by: %s scales pods, but with ray.enabled Ray scales replicas; use ray or none" .Values.autoscaling.by) }}
{{- end }}
{{- if and (not .Values.ray.enabled) (eq .Values.autoscaling.by "ray") }}
{{- fail "autoscaling.by: ray needs ray.enabled; use keda, hpa or none" }}
{{- end }}
{{- end }}

{{- define "polyhead.replicaBounds" -}}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) }}
{{- fail (printf "autoscaling.minReplicas: %d is more than autoscaling.maxReplicas, %d" (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) }}
{{- end }}
{{- end }}
