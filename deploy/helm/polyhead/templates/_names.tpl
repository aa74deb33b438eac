{{- define "polyhead.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "polyhead.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains (include "polyhead.name" .) .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "polyhead.name" .) | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "polyhead.selector" -}}
app.kubernetes.io/name: {{ include "polyhead.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "polyhead.labels" -}}
{{ include "polyhead.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "polyhead.metadata" -}}
name: {{ include "polyhead.fullname" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "polyhead.labels" . | nindent 2 }}
{{- end }}

{{- define "polyhead.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- .Values.serviceAccount.name | default (include "polyhead.fullname" .) }}
{{- else }}
{{- .Values.serviceAccount.name | default "default" }}
{{- end }}
{{- end }}

{{- define "polyhead.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- $variant := printf "%s%s" (ternary "-gpu" "" (gt (int .Values.gpu.count) 0)) (ternary "-ray" "" .Values.ray.enabled) }}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default (printf "%s%s" .Chart.AppVersion $variant)) }}
{{- end }}
{{- end }}
