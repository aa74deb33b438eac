{{- define "polyhead.pod" -}}
serviceAccountName: {{ include "polyhead.serviceAccount" . }}
automountServiceAccountToken: false
{{ include "polyhead.podSpec" . }}
containers:
  - name: polyhead
    {{- include "polyhead.container" . | nindent 4 }}
volumes:
  - name: config
    configMap: {name: {{ include "polyhead.fullname" . }}}
  {{- include "polyhead.volumes" . | nindent 2 }}
{{- end }}

{{- /* Security, scheduling and the grace period of a pod; .graceSeconds is a minimum for the latter. */ -}}
{{- define "polyhead.podSpec" -}}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ max (int (include "polyhead.graceSeconds" .)) (int .graceSeconds) }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.gpu.runtimeClass }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.spread }}
topologySpreadConstraints:
  {{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - topologyKey: {{ $key }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "polyhead.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "polyhead.container" -}}
image: {{ include "polyhead.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  - serve
  - --config
  - /etc/polyhead/polyhead.yaml
  {{- if .Values.extraArgs }}
  {{- include "polyhead.args" . | nindent 2 }}
  {{- end }}
ports:
  - {name: http, containerPort: 8000}
  {{- with .Values.probes.port }}
  - {name: probes, containerPort: {{ . }}}
  {{- end }}
env:
  - {name: POLYHEAD_HOST, value: "0.0.0.0"}
  - {name: POLYHEAD_PORT, value: "8000"}
  {{- with .Values.probes.port }}
  - {name: POLYHEAD_PROBE_PORT, value: {{ . | quote }}}
  {{- end }}
  - {name: XDG_CACHE_HOME, value: /cache}
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
startupProbe:
  httpGet: {path: /startupz, {{ include "polyhead.probed" . }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: {{ div (add (int .Values.probes.startupSeconds) 1) 2 }}
livenessProbe:
  httpGet: {path: /livez, {{ include "polyhead.probed" . }}}
  {{- toYaml .Values.probes.live | nindent 2 }}
readinessProbe:
  httpGet: {path: /readyz, {{ include "polyhead.probed" . }}}
  {{- toYaml .Values.probes.ready | nindent 2 }}
{{- if .Values.preStopSeconds }}
lifecycle:
  preStop:
    sleep: {seconds: {{ .Values.preStopSeconds }}}
{{- end }}
resources:
  {{- include "polyhead.resources" . | nindent 2 }}
{{- include "polyhead.security" . | nindent 0 }}
volumeMounts:
  - {name: config, mountPath: /etc/polyhead, readOnly: true}
  {{- include "polyhead.mounts" . | nindent 2 }}
{{- end }}

{{- /* Port and scheme of probes.  The port of clients has TLS if the settings name a certificate, which is not checked. */ -}}
{{- define "polyhead.probed" -}}
{{- if gt (int .Values.probes.port) 0 -}}
port: probes
{{- else if .Values.config.tls_cert -}}
port: http, scheme: HTTPS
{{- else -}}
port: http
{{- end }}
{{- end }}

{{- define "polyhead.security" -}}
securityContext:
  allowPrivilegeEscalation: false
  privileged: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "polyhead.mounts" -}}
- {name: cache, mountPath: /cache}
- {name: tmp, mountPath: /tmp}
{{- if .Values.keys.fileSecret }}
- {name: keys, mountPath: /etc/polyhead-keys, readOnly: true}
{{- end }}
{{- if include "polyhead.modelVolume" . }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "polyhead.resources" -}}
requests:
  {{- toYaml .Values.resources.requests | nindent 2 }}
limits:
  {{- toYaml .Values.resources.limits | nindent 2 }}
  {{- if gt (int .Values.gpu.count) 0 }}
  {{ .Values.gpu.resource }}: {{ .Values.gpu.count | quote }}
  {{- end }}
{{- end }}

{{- define "polyhead.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
- name: cache
  {{- if .Values.models.cache.claim }}
  persistentVolumeClaim: {claimName: {{ .Values.models.cache.claim }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.models.cache.size }}}
  {{- end }}
{{- with .Values.keys.fileSecret }}
- name: keys
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with include "polyhead.modelVolume" . }}
- name: models
  {{- . | nindent 2 }}
{{- end }}
{{- end }}
