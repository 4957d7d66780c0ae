{{- define "tide.fullname" -}}
{{- if contains "tide" .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-tide" .Release.Name | trunc 40 | trimSuffix "-" }}{{- end -}}
{{- end }}

{{- define "tide.selector" -}}
app.kubernetes.io/name: tide
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "tide.labels" -}}
{{ include "tide.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "tide.image" -}}
{{- $image := index .root.Values.images .name -}}
{{- if $image.digest -}}{{ $image.repository }}@{{ $image.digest }}
{{- else -}}{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}{{- end -}}
{{- end }}

{{- define "tide.stateClaim" -}}
{{ .Values.state.claim | default (printf "%s-state" (include "tide.fullname" .)) }}
{{- end }}

{{- define "tide.trackingUri" -}}
{{- if .Values.mlflow.enabled -}}http://{{ include "tide.fullname" . }}-mlflow:5000
{{- else -}}{{ required "mlflow.trackingUri: give the address of the existing MLflow server" .Values.mlflow.trackingUri }}{{- end -}}
{{- end }}

{{- define "tide.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "tide.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* pod-level fields: account, whether it may ask the API, security, pull secrets */}}
{{- define "tide.pod" -}}
serviceAccountName: {{ include "tide.fullname" .root }}-{{ .account }}
automountServiceAccountToken: {{ .api }}
enableServiceLinks: false {{/* they would set variables that begin with TIDE_, which are settings */}}
securityContext:
  {{- include "tide.podSecurity" . | nindent 2 }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "tide.environment" -}}
- {name: TIDE_CONFIG, value: /etc/tide/tide.yaml}
- {name: TIDE_HOME, value: /tmp/tide}
- {name: HOME, value: /tmp}
- {name: HF_HUB_OFFLINE, value: "1"}
- {name: MLFLOW_DISABLE_TELEMETRY, value: "true"}
- {name: DO_NOT_TRACK, value: "true"}
- {name: GIT_PYTHON_REFRESH, value: quiet}
- {name: PYTHONDONTWRITEBYTECODE, value: "1"}
{{- end }}

{{- define "tide.dagsterEnvironment" -}}
- {name: DAGSTER_HOME, value: /opt/dagster/dagster_home}
- {name: DAGSTER_DISABLE_TELEMETRY, value: "1"}
{{- end }}

{{/* envFrom: `names` are keys of .Values.secrets; an empty one is left out */}}
{{- define "tide.secretNames" -}}
{{- $names := list -}}
{{- range .names }}{{- with index $.root.Values.secrets . }}{{- $names = append $names . }}{{- end }}{{- end }}
{{- $names | uniq | toJson -}}
{{- end }}

{{- define "tide.secrets" -}}
{{- range (include "tide.secretNames" . | fromJsonArray) }}
- secretRef: {name: {{ . }}}
{{- end }}
{{- end }}

{{- define "tide.baseVolumes" -}}
- {name: config, configMap: {name: {{ include "tide.fullname" . }}-config}}
- {name: tmp, emptyDir: {sizeLimit: 10Gi}}
{{- end }}

{{- define "tide.baseMounts" -}}
- {name: config, mountPath: /etc/tide, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "tide.dagsterVolumes" -}}
- {name: dagster-home, emptyDir: {sizeLimit: 1Gi}}
- {name: dagster-config, configMap: {name: {{ include "tide.fullname" . }}-dagster}}
{{- end }}

{{- define "tide.dagsterMounts" -}}
- {name: dagster-home, mountPath: /opt/dagster/dagster_home}
- {name: dagster-config, mountPath: /opt/dagster/dagster_home/dagster.yaml, subPath: dagster.yaml, readOnly: true}
- {name: dagster-config, mountPath: /etc/dagster, readOnly: true}
{{- end }}

{{- define "tide.stateVolumes" -}}
- {name: shared, persistentVolumeClaim: {claimName: {{ include "tide.stateClaim" . }}}}
- {name: models, persistentVolumeClaim: {claimName: {{ .Values.models.claim }}, readOnly: true}}
{{- end }}

{{- define "tide.stateMounts" -}}
- {name: shared, mountPath: {{ .Values.state.path }}}
- {name: models, mountPath: {{ .Values.models.path }}, readOnly: true}
{{- end }}

{{/* a part of the shared claim is mounted alone: kubelet would make a missing folder as root */}}
{{- define "tide.makeFolder" -}}
- name: folders
  image: {{ include "tide.image" (dict "root" .root "name" "orchestrator") }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  command: [mkdir, -p, /shared/{{ .folder }}]
  securityContext:
    {{- include "tide.containerSecurity" . | nindent 4 }}
  resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {memory: 64Mi}}
  volumeMounts:
    - {name: shared, mountPath: /shared}
{{- end }}

{{- define "tide.checksums" -}}
checksum/config: {{ include "tide.settings" . | sha256sum }}
{{- if eq .Values.orchestrator.mode "own" }}
checksum/dagster: {{ include "tide.dagsterYaml" . | sha256sum }}
{{- end }}
{{- end }}
