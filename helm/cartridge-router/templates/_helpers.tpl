{{/* Names leave room for "-engine-headless" and an ordinal within 63 characters. */}}
{{- define "cartridge-router.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "cartridge-router.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "cartridge-router.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "cartridge-router.engineName" -}}
{{- printf "%s-engine" (include "cartridge-router.fullname" .) -}}
{{- end -}}

{{- define "cartridge-router.engineServiceName" -}}
{{- printf "%s-engine-headless" (include "cartridge-router.fullname" .) -}}
{{- end -}}

{{- define "cartridge-router.agentName" -}}
{{- printf "%s-agent" (include "cartridge-router.fullname" .) -}}
{{- end -}}

{{/* Where the node's folder with the agent's socket is in agent and engines. */}}
{{- define "cartridge-router.agentFolder" -}}
/run/cartridge-agent
{{- end -}}

{{- define "cartridge-router.agentSocket" -}}
unix:{{ include "cartridge-router.agentFolder" . }}/agent.sock
{{- end -}}

{{/* Labels that select pods: call with (dict "root" $ "component" "gateway"). */}}
{{- define "cartridge-router.selectorLabels" -}}
app.kubernetes.io/name: {{ include "cartridge-router.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "cartridge-router.labels" -}}
{{ include "cartridge-router.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Image reference: call with (dict "root" $ "image" .Values.router.image). */}}
{{- define "cartridge-router.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* Service account name: call with (dict "account" … "fallback" "name"). */}}
{{- define "cartridge-router.serviceAccountName" -}}
{{- if .account.create -}}
{{- default .fallback .account.name -}}
{{- else -}}
{{- default "default" .account.name -}}
{{- end -}}
{{- end -}}

{{/* "name=url" of each engine, comma separated; the name is the pod's and the replica id. */}}
{{- define "cartridge-router.replicas" -}}
{{- if .Values.engine.enabled -}}
{{- $name := include "cartridge-router.engineName" . -}}
{{- $service := include "cartridge-router.engineServiceName" . -}}
{{- $items := list -}}
{{- range $index := until (int .Values.engine.replicas) -}}
{{- $items = append $items (printf "%s-%d=http://%s-%d.%s:8001" $name $index $name $index $service) -}}
{{- end -}}
{{- join "," $items -}}
{{- else -}}
{{- join "," .Values.externalReplicas -}}
{{- end -}}
{{- end -}}

{{/* Redis URL and residency key, the same for gateway and engines. */}}
{{- define "cartridge-router.fleetEnv" -}}
- name: CARTRIDGE_ROUTER_REDIS_URL
  {{- if .Values.redis.urlSecret.name }}
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.urlSecret.name }}
      key: {{ .Values.redis.urlSecret.key }}
  {{- else }}
  value: {{ .Values.redis.url | quote }}
  {{- end }}
{{- if .Values.residencyKey.secretName }}
- name: CARTRIDGE_ROUTER_RESIDENCY_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .Values.residencyKey.secretName }}
      key: {{ .Values.residencyKey.secretKey }}
{{- end }}
{{- end -}}

{{/* Folder or URL, the same for gateway and engines. */}}
{{- define "cartridge-router.store" -}}
{{- .Values.store.url | default "/store" -}}
{{- end -}}

{{/* The account of a store that is named by URL. */}}
{{- define "cartridge-router.storeEnvFrom" -}}
{{- with .Values.store.credentialsSecret -}}
envFrom:
  - secretRef: {name: {{ . }}}
{{- end -}}
{{- end -}}

{{/* --kv-transfer-config. Kubernetes fills in $(…) from the container's environment. */}}
{{- define "cartridge-router.kvTransferConfig" -}}
{{- $extra := dict
      "store" (include "cartridge-router.store" .)
      "redis_url" "$(CARTRIDGE_ROUTER_REDIS_URL)"
      "replica_id" "$(POD_NAME)"
      "self_url" "http://127.0.0.1:8001"
      "control_address" (printf "$(POD_IP):%d" (int .Values.engine.control.port)) -}}
{{- if .Values.engine.nvme.volume -}}
{{- $_ := set $extra "nvme_dir" "/nvme" -}}
{{- $_ := set $extra "nvme_bytes" (int64 .Values.engine.nvme.bytes) -}}
{{- end -}}
{{- if .Values.agent.enabled -}}
{{- $_ := set $extra "agent_socket" (include "cartridge-router.agentSocket" .) -}}
{{- end -}}
{{- dict
      "kv_connector" "CartridgeConnector"
      "kv_connector_module_path" "cartridge_engine_ext.connector"
      "kv_role" "kv_both"
      "kv_load_failure_policy" "fail"
      "kv_connector_extra_config" $extra | toJson -}}
{{- end -}}

{{/* No fsGroup: it would change the owner of every file in a shared store. */}}
{{- define "cartridge-router.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "cartridge-router.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Where pods may run: call with .Values.router or .Values.engine. */}}
{{- define "cartridge-router.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
